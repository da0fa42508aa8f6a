"""The draft model or head of a worker: what is refused before a byte is loaded, its share of the cache, its loading."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from cohort.common.config import Config
from cohort.common.devices.fit import weight_bytes
from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.config.device_memory import step_bytes
from cohort.common.engine.config.model_config import (
    DTYPE_BYTES,
    FP8_PLANES,
    SCALE_BYTES,
    ModelGeometry,
    kv_dtype,
    read_geometry,
)
from cohort.common.engine.config.quantization_config import rounding_of
from cohort.common.engine.device.device_name import TORCH_DTYPES
from cohort.common.engine.drafts.batch_drafts import FILLED_AT_ONCE, BatchDrafter, DraftModel
from cohort.common.engine.drafts.states_drafter import EagleHead, HeadModel, StatesDrafter
from cohort.common.engine.forward.device_steps import DeviceSteps, StepLimits
from cohort.common.engine.models.lora import LoraStore
from cohort.common.engine.models.model_files import Loading
from cohort.common.engine.models.model_forms import load_model
from cohort.common.engine.models.step_inputs import Model
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.errors import ConfigError
from cohort.common.json_files import read_json_object
from cohort.common.types import KvGeometry

log = structlog.get_logger(__name__)

_MARK_BYTES = 8
"""Bytes per token in addition to KV, that mark a slot's content; of a head also those of the model's state there."""
_HEAD = "LlamaForCausalLMEagle"
_OTHER_HEADS = ("Eagle3", "Medusa", "Eagle")
_MOST_ROWS = 64
_GRAPHS_SHARE = 4
"""Divisor of the memory for recorded steps that a draft model has in addition: four classes of rows."""
_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Draft model to be loaded."""

    folder: Path
    geometry: ModelGeometry
    dtype: str
    kv_dtype: str
    block_size: int
    vocabulary: int
    head: bool = False
    """Whether it continues from the model's own states."""
    graph_bytes: int = 0
    """Bytes on a GPU for its recorded steps."""
    device_bytes: int = 0
    """Bytes that it takes there in all, except its KV."""

    @property
    def kv_geometry(self) -> KvGeometry:
        return self.geometry.kv_geometry(self.kv_dtype, self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes that the draft model's KV adds to a block of the worker's cache."""
        extra = _MARK_BYTES
        if self.head:
            extra += _MARK_BYTES + self.geometry.hidden_size * DTYPE_BYTES[self.dtype]
        return self.kv_geometry.block_bytes + extra * self.block_size


def plan_draft(
    config: Config, model_dir: Path, geometry: ModelGeometry, *, dtype: str, device: torch.device, degree: int
) -> DraftPlan | None:
    """Return the plan; None if no model drafts. Raises `ConfigError`, `ModelError` for what is not served."""
    speculation = config.speculation
    if speculation.mode != "model":
        return None
    if not speculation.draft_model:
        raise ConfigError("speculation.draft_model: speculation.mode model needs the folder of a smaller model")
    folder = Path(speculation.draft_model).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"speculation.draft_model: no folder {folder}")
    refused = f"speculation.mode: model is not served {{}}; lookup is ({folder.name})"
    if device.type != "cpu" and rounding_of(speculation.draft_quantization) is not None:
        raise ConfigError(
            f"speculation.draft_quantization: {speculation.draft_quantization} is rounded on a processor alone, not on "
            f"{device}"
        )
    if degree > 1:
        raise ConfigError(refused.format(f"by a worker of {degree} ranks (tensor_parallel)"))
    if geometry.kv_window:
        raise ConfigError(
            refused.format(f"with {model_dir.name}, whose cache keeps the last {geometry.kv_window} tokens alone")
        )
    draft = read_geometry(folder, speculation.draft_quantization)
    if draft.family == "generic":
        raise ConfigError(
            f"speculation.draft_model: {draft.model_type} models run through transformers here, and drafts are made "
            "by the project's own forms alone (docs/models.md)"
        )
    head = _is_head(folder)
    if head:
        _check_head(model_dir, geometry, folder, draft)
    else:
        check_vocabulary(model_dir, geometry, folder, draft)
    cache_dtype = kv_dtype(config.kv.cache_dtype, dtype, draft, device.type)
    plan = DraftPlan(folder, draft, dtype, cache_dtype, config.kv.block_size, geometry.vocab_size, head)
    if device.type == "cpu":
        return plan
    element, graphs = DTYPE_BYTES[dtype], config.engine.cuda_graph_memory_bytes // _GRAPHS_SHARE
    extra = weight_bytes(folder, draft, element) + step_bytes(draft, element, _MOST_ROWS, FILLED_AT_ONCE)
    return dataclasses.replace(plan, graph_bytes=graphs, device_bytes=extra + graphs)


def _is_head(folder: Path) -> bool:
    """Return whether config.json, which is there, names a head. Raises `ConfigError` for a head that is not served."""
    named = read_json_object(folder / "config.json").get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    other = [name for name in names if name != _HEAD and any(kind in name for kind in _OTHER_HEADS)]
    if other:
        raise ConfigError(f"speculation.draft_model: {folder.name} is a {other[0]}; of heads {_HEAD} is served")
    return _HEAD in names


def _check_head(model_dir: Path, geometry: ModelGeometry, folder: Path, head: ModelGeometry) -> None:
    """Raise `ConfigError` for a head that cannot continue from this model's states."""
    refused = f"speculation.draft_model: {folder.name} ({_HEAD}) cannot draft for {model_dir.name}: "
    if geometry.family not in ("llama", "moe"):
        raise ConfigError(f"{refused}states of {geometry.model_type} models are not kept; of Llama's form they are")
    if head.family != "llama" or head.num_layers != 1 or any(head.sliding_windows):
        raise ConfigError(f"{refused}a head is one layer of Llama's form that sees every position")
    for name in ("hidden_size", "vocab_size"):
        own, other = getattr(head, name), getattr(geometry, name)
        if own != other:
            raise ConfigError(f"{refused}its {name} is {own}, the model's is {other}")


def load_draft(plan: DraftPlan, config: Config, runner: ModelRunner) -> BatchDrafter:
    """Load the draft model, on the engine's thread, before the model's steps are recorded."""
    dtype, device, on_device = TORCH_DTYPES[plan.dtype], runner.device, runner.samples_on_device
    kv = KvTensors(
        plan.kv_geometry,
        num_blocks=len(runner.kv.blocks),
        host_blocks=0,
        dtype=torch.uint8 if plan.kv_dtype in SCALE_BYTES else dtype,
        device=device,
        spare=on_device,
        apart=plan.kv_dtype == FP8_PLANES,
        latent=plan.geometry.latent is not None,
    )
    rounding = rounding_of(config.speculation.draft_quantization)
    log.info(
        "loading a head that drafts" if plan.head else "loading a draft model",
        model=plan.folder.name,
        family=plan.geometry.family,
        quantization=config.speculation.draft_quantization,
        kv_mebibytes=len(runner.kv.blocks) * kv.block_bytes >> 20,
    )
    model: HeadModel | Model
    with torch.inference_mode():
        load = Loading(
            plan.folder,
            plan.geometry,
            device=device,
            dtype=dtype,
            max_rows=_MOST_ROWS,
            max_step_tokens=FILLED_AT_ONCE,
            rounding=rounding,
        )
        if plan.head:
            target = runner.keeps_states
            assert target is not None, "checked by its family"
            model = HeadModel(EagleHead(load), target, len(kv.with_spare) * plan.block_size)
        else:
            model = load_model(load)
    steps = None
    if on_device:
        positions = kv.geometry.positions(len(kv.blocks))
        steps = DeviceSteps(
            model,
            plan.geometry,
            kv,
            dtype=dtype,
            limits=StepLimits(_MOST_ROWS, FILLED_AT_ONCE, min(plan.geometry.max_positions, positions)),
            lora=LoraStore((), plan.geometry, dtype, device),
        )
    graphs = plan.graph_bytes
    if isinstance(model, HeadModel):
        return StatesDrafter(model, kv, longest=plan.geometry.max_positions, steps=steps, graph_bytes=graphs)
    return DraftModel(model, plan.geometry, kv, vocabulary=plan.vocabulary, steps=steps, graph_bytes=graphs)


def check_vocabulary(model_dir: Path, geometry: ModelGeometry, draft_dir: Path, draft: ModelGeometry) -> None:
    """Raise `ConfigError` unless every token has the same id in both folders' tokenizers: the model verifies drafts by
    id. If neither has one, the vocabularies must be of one size; tables may be longer (padding)."""
    named, drafted = _tokens(model_dir), _tokens(draft_dir)
    refused = f"speculation.draft_model: {draft_dir.name} cannot draft for {model_dir.name}: "
    if (named is None) != (drafted is None):
        without = model_dir if named is None else draft_dir
        raise ConfigError(f"{refused}{without} holds no {_FILE}, so that their tokens cannot be compared")
    if named is None or drafted is None:
        if geometry.vocab_size != draft.vocab_size:
            raise ConfigError(f"{refused}its vocabulary has {draft.vocab_size} tokens, not {geometry.vocab_size}")
        return
    if other := sorted(token for token in named.keys() | drafted.keys() if named.get(token) != drafted.get(token)):
        first = other[0]
        raise ConfigError(
            f"{refused}{len(other)} tokens differ, the first of them {first!r}: id {_id(drafted, first)}, "
            f"not {_id(named, first)}; both need one tokenizer"
        )


def _id(tokens: dict[str, int], token: str) -> str:
    return str(tokens[token]) if token in tokens else "none"


def _tokens(folder: Path) -> dict[str, int] | None:
    """Return the ids of all tokens by their names; None if the folder has no tokenizer."""
    try:
        read: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        vocabulary = (read.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, dict):
            ids = {str(token): int(number) for token, number in vocabulary.items()}
        else:  # a unigram model's: pairs of token and weight, in the order of their ids
            ids = {str(pair[0]): index for index, pair in enumerate(vocabulary)}
        return ids | {str(added["content"]): int(added["id"]) for added in read.get("added_tokens") or ()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"speculation.draft_model: {folder / _FILE} cannot be read: {error}") from None
