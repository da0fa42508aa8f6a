"""Any other decoder: transformers' own layers with their attention replaced by ours over the paged cache.

Called by the model runner for architectures without a lean form. transformers' models call the function registered as
`cohort_paged` instead of their own attention; transformers builds no mask for a name it does not know. A model that
the replacement cannot serve is refused at load. Two questions decide: is attention, in the form the kernels compute,
all that the model remembers its past by (`check_structure`); and does it, over the paged cache, answer what it answers
by itself (`check_answers`), which catches all that an architecture hides from the first question. So one that loads
computes what transformers computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.step_inputs import Model, StepInputs
from cohort.common.errors import ModelError
from cohort.kernels.ops.paged_attention import AttentionMeta, paged_attention, write_kv

ATTENTION_NAME = "cohort_paged"
_UNSUPPORTED = ("position_bias", "alibi", "head_mask", "cross_attn_head_mask")
"""Arguments of the interface that change the scores in a way the kernels do not compute."""
_LAYER_KINDS = {"full_attention", "sliding_attention"}
_TRIAL_TOKENS = 48
_RECORDED_ROWS = 3
_BLOCK_SIZE = 16
_KNOWN = frozenset({"aten", "prims", "cohort"})
"""Libraries of operations; what those of others do is not seen."""
_READ_BY_THE_HOST = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero"),
        *("unique_consecutive", "unique_dim", "_unique2"),
    )
)
"""Operations with a result, or a result's size, that the host waits for."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's call of attention."""

    kv_heads: int
    key_width: int
    value_width: int
    sliding_window: int


@dataclass(slots=True)
class Probe:
    """Observations of a trial forward, by layer index, and calls that the kernels cannot serve."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)
    problems: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The forward in progress."""

    inputs: StepInputs
    kv: Tensor


# Not every architecture hands unknown keyword arguments down to its attention, so the step travels beside the call.
_current: ContextVar[RunningStep | Probe | None] = ContextVar("cohort_attention", default=None)


@contextmanager
def attending(state: RunningStep | Probe) -> Iterator[None]:
    """Let a model that runs within this context attend for `state`."""
    token = _current.set(state)
    try:
        yield
    finally:
        _current.reset(token)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in a layer: query [1, Hq, T, D], key and value [1, Hkv, T, D] → [1, T, Hq, D]. `s_aux`: a sink a head."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    match _current.get():
        case RunningStep(step, kv):
            rows = query[0].transpose(0, 1).contiguous()
            out = torch.empty_like(rows)
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            place, slots, meta = step.of_layer(layer)
            write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), kv, place, slots)
            window, cap = int(sliding_window or 0), float(softcap or 0.0)
            sinks = None if s_aux is None else s_aux.float()
            paged_attention(rows, kv, place, meta, scale, out, sliding_window=window, softcap=cap, sinks=sinks)
            return out.unsqueeze(0), None
        case Probe() as probe:
            if layer in probe.layers:
                probe.problems.add(f"layer {layer} attends more than once")
            probe.layers[layer] = LayerAttention(key.shape[1], key.shape[3], value.shape[3], int(sliding_window or 0))
            if s_aux is not None and s_aux.shape != query.shape[1:2]:
                probe.problems.add("sinks that are not one per query head")
            probe.problems.update(f"{name} in its attention" for name in _UNSUPPORTED if kwargs.get(name) is not None)
            if attention_mask is not None:
                probe.problems.add("a mask of its own")
            if not getattr(module, "is_causal", True):
                probe.problems.add("attention that is not causal")
            if query.shape[1] % key.shape[1]:
                probe.problems.add("query heads that are no multiple of its KV heads")
            return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None
        case None:
            raise ModelError(f"{ATTENTION_NAME} attention was called outside a step of the engine")


class GenericModel:
    """A transformers model over the paged cache."""

    def __init__(self, model_dir: Path, geometry: ModelGeometry, *, dtype: torch.dtype, device: torch.device) -> None:
        # Slow to import, and lean models never need it.
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        AttentionInterface.register(ATTENTION_NAME, attention)
        try:
            # Loaded with the attention every architecture has; whether ours can take its place is the next question.
            model: Any = AutoModelForCausalLM.from_pretrained(
                model_dir,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,  # left out, transformers asks on a terminal whether to run the folder's code
            )
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise ModelError(f"{model_dir}: transformers cannot load {geometry.model_type}: {error}") from error
        self._model = model.to(device).eval()
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        expected = check_structure(self._model, geometry, model_dir, device)
        check_answers(self, expected, geometry, model_dir, dtype, device)
        self.unrecordable = unrecordable_operations(self, geometry, dtype, device)
        """Operations of its decode steps that keep them from being recorded; none: they are, as a lean model's are."""

    sampled_states: Tensor | None = None  # transformers' forward hands out logits only

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """See `step_inputs.Model`."""
        extra = {"logits_to_keep": step.sample_index} if self._keeps_logits else {}
        with attending(RunningStep(step, kv)), self._keeping_states(step):
            output = self._model(
                input_ids=step.token_ids.unsqueeze(0),
                position_ids=step.positions.unsqueeze(0),
                use_cache=False,
                **extra,
            )
        logits: Tensor = output.logits[0]
        return (logits if self._keeps_logits else logits[step.sample_index]).float()

    @contextmanager
    def _keeping_states(self, step: StepInputs) -> Iterator[None]:
        """Read the states that the decoder hands to its head, within this context, if any are wanted."""
        index = step.state_index
        if index is None:
            yield
            return

        def keep(_: Any, __: Any, output: Any) -> None:
            step.states = output.last_hidden_state[0][index]

        hook = self._model.base_model.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()


def check_structure(model: Any, geometry: ModelGeometry, model_dir: Path, device: torch.device) -> Tensor:
    """Switch `model`, loaded with eager attention, to the paged one; returns its own logits [tokens, vocabulary]."""
    refused = f"{model_dir}: {geometry.model_type} cannot be served: "
    if getattr(model, "_is_stateful", False):
        raise ModelError(refused + "it keeps recurrent state besides attention")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(refused + "it takes no position ids, so rows of different requests cannot share a forward")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := kinds - _LAYER_KINDS:
        raise ModelError(refused + f"it has layers of kind {', '.join(sorted(unknown))}")
    ids = _trial_ids(geometry, device)
    positions = torch.arange(len(ids), device=device)
    trial = {"input_ids": ids.unsqueeze(0), "position_ids": positions.unsqueeze(0), "use_cache": False}
    probe = Probe()
    with torch.inference_mode():
        try:
            own_logits: Tensor = model(**trial).logits[0].float()
        except Exception as error:  # an architecture's code for values that it was not written for fails in any way
            raise ModelError(refused + f"a trial forward of it fails ({error})") from error
        try:
            model.set_attn_implementation(ATTENTION_NAME)
            with attending(probe):
                model(**trial)
        except (KeyError, ValueError) as error:
            raise ModelError(refused + f"its attention cannot be replaced ({error})") from error
    if not probe.layers:
        raise ModelError(refused + "its attention does not go through transformers' attention interface")
    if probe.problems:
        raise ModelError(refused + "it has " + "; ".join(sorted(probe.problems)))
    if sorted(probe.layers) != list(range(geometry.num_layers)):
        raise ModelError(refused + f"attention in layers {sorted(probe.layers)}, not in all {geometry.num_layers}")
    for index, layer in probe.layers.items():
        _check_layer(index, layer, model, geometry, refused)
    return own_logits


def check_answers(
    model: Model, expected: Tensor, geometry: ModelGeometry, model_dir: Path, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare the trial's logits over a paged cache with the model's own.

    The median over positions: in 16 bits a mixture of experts may route single tokens differently, and rightly.
    """
    ids = _trial_ids(geometry, device)
    positions = torch.arange(len(ids), device=device)
    tables = torch.arange(-(-len(ids) // _BLOCK_SIZE), device=device).unsqueeze(0)
    step = _trial_step(ids, positions, positions, tables)
    with torch.inference_mode():
        logits = model.forward(step, _trial_cache(geometry, tables, dtype))
    error = float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).median())
    allowed = 1e-3 if dtype == torch.float32 else 0.1
    if not error <= allowed:  # NaN is refused too
        raise ModelError(
            f"{model_dir}: {geometry.model_type} cannot be served: over the paged cache its logits differ from its own "
            f"by {error:.2g} (allowed {allowed})"
        )


def _check_layer(index: int, layer: LayerAttention, model: Any, geometry: ModelGeometry, refused: str) -> None:
    expected = (geometry.num_kv_heads, geometry.head_dim, geometry.head_dim)
    if (seen := (layer.kv_heads, layer.key_width, layer.value_width)) != expected:
        raise ModelError(refused + f"layer {index} has (KV heads, key width, value width) {seen}, not {expected}")
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    if kinds and (kinds[index] == "sliding_attention") != (layer.sliding_window > 0):
        raise ModelError(refused + f"layer {index} is {kinds[index]} but asks for a window of {layer.sliding_window}")


def _trial_ids(geometry: ModelGeometry, device: torch.device) -> Tensor:
    """Return tokens spread over the vocabulary."""
    tokens = min(_TRIAL_TOKENS, geometry.max_positions)
    return (torch.arange(tokens, device=device) * 7919 + 11) % geometry.vocab_size


def _trial_step(ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor) -> StepInputs:
    """Return a step of rows of equal length over `tables` [R, blocks], all of whose tokens are sampled."""
    rows, tokens = len(tables), len(ids) // len(tables)
    ends = positions.view(rows, tokens)[:, -1] + 1
    return StepInputs(
        token_ids=ids,
        positions=positions.clone(),
        slot_mapping=slots.clone(),
        sample_index=torch.arange(len(ids), device=ids.device),
        meta=AttentionMeta(
            query_start=torch.arange(0, len(ids) + 1, tokens, dtype=torch.int32, device=ids.device),
            context_lens=ends.int(),
            block_tables=tables.int(),
            directions=None,
            block_size=_BLOCK_SIZE,
            max_query_len=tokens,
            num_prefill_rows=rows if tokens > 1 else 0,
        ),
    )


def _trial_cache(geometry: ModelGeometry, tables: Tensor, dtype: torch.dtype) -> Tensor:
    shape = (tables.numel(), geometry.num_layers, 2, geometry.num_kv_heads, _BLOCK_SIZE, geometry.head_dim)
    return torch.zeros(shape, dtype=dtype, device=tables.device)


def unrecordable_operations(
    model: Model, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device
) -> tuple[str, ...]:
    """Return the operations of a decode step that cannot be recorded; none: it can.

    A recorded step repeats kernels, not Python: an operation whose result the host reads (the largest position of a
    dynamic rotary embedding, say), or one that copies between host and device, cannot be in it. Every operation of a
    forward passes torch's dispatcher, so a trial on any device shows them all; the same code runs for every step of
    that shape.
    """
    rows, last = torch.arange(_RECORDED_ROWS, device=device), min(_BLOCK_SIZE, geometry.max_positions) - 1
    step = _trial_step(
        rows % geometry.vocab_size, torch.full_like(rows, last), rows * _BLOCK_SIZE + last, rows.unsqueeze(1)
    )
    kv = _trial_cache(geometry, step.meta.block_tables, dtype)
    watch = _Watch()
    with torch.inference_mode():
        model.forward(step, kv)  # what is made at the first call only is none of the step's
        with watch:
            model.forward(step, kv)
    return tuple(sorted(watch.found))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode an operation that is made of others comes whole
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _READ_BY_THE_HOST:
            self.found.add(name)
        elif name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]):
                self.found.add(f"{name} by a mask")
        elif name.partition("::")[0] not in _KNOWN:
            self.found.add(f"{name}, which is not torch's own")
        elif name == "aten::repeat_interleave" and not (kwargs or {}).get("output_size"):
            self.found.add(name)
        # A number that Python made lies on the host and is part of a kernel's arguments.
        devices = {each.device.type for each in _tensors((args, kwargs, result)) if each.dim()}
        if len(devices) > 1:
            self.found.add(f"{name} between host and device")
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _tensors(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _tensors(each)
