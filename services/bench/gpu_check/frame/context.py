"""The inputs of a section: the device, its rates, the guard of its items, and models of known shapes.

A shape's folder holds a configuration and a tokenizer of one token per word, and no weights: `model.weights: random`
draws them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.config.runner_options import RunnerOptions
from cohort.common.engine.ranks.ranks import RankSettings
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import StepBatch, trial_batch
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.guard import DoesNotFit, Guard
from cohort.services.bench.gpu_check.frame.rates import Ceilings
from cohort.services.bench.gpu_check.frame.report import Findings

LLAMA_3_8B: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
QWEN25_14B: Mapping[str, Any] = {
    **LLAMA_3_8B,
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "intermediate_size": 13824,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
TINY: Mapping[str, Any] = {
    **LLAMA_3_8B,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def shape_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write this configuration to `folder`, and a tokenizer whose words are `t0 t1 …`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocabulary = {f"t{index}": index for index in range(config["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return folder


_ROTATED_BYTES = 256 << 20  # several times the second-level cache

Made = TypeVar("Made")


@dataclass(slots=True)
class Check:
    """`real`: a GPU is measured; else tiny shapes show that everything runs. `folder`: for models and run files;
    `logs`: for what is to be kept. `alone`: no other section runs beside it."""

    device: torch.device
    real: bool
    folder: Path
    found: Findings
    guard: Guard
    logs: Path
    alone: bool = True
    _ceilings: Ceilings | None = field(default=None, init=False)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.real else torch.float32

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def ceilings(self) -> Ceilings:
        """Return this device's rates, measured by this process at the first call."""
        if self._ceilings is None:
            self._ceilings = rates.ceilings(self.device, self.dtype, real=self.real)
            print(f"ceilings: {self._ceilings}", flush=True)
        return self._ceilings

    def over_copies_s(
        self, first: Made, size: int, another: Callable[[], Made], call: Callable[[Made], object], most: int = 16
    ) -> float:
        """Return the seconds of `call`, each over another copy of `first` of `size` bytes: read from memory, as in a
        step."""
        count = max(1, min(most, -(-_ROTATED_BYTES // size))) if self.real else min(most, 2)
        copies = [first, *(another() for _ in range(count - 1))]

        def every() -> None:
            for each in copies:
                call(each)

        return rates.seconds(rates.replayed(every, self.device), self.device) / count

    def shape(self, name: str) -> Mapping[str, Any]:
        """Return a model shape to measure; on the processor there is one for all."""
        return {"Llama-3-8B": LLAMA_3_8B, "Qwen2.5-14B": QWEN25_14B}[name] if self.real else TINY

    def runner(self, name: str, config: Mapping[str, Any], **overrides: Any) -> ModelRunner:
        return random_model(self.folder / name, config, self.device, real=self.real, **overrides)


def random_model(
    folder: Path,
    config: Mapping[str, Any],
    device: torch.device,
    *,
    real: bool,
    group: RankSettings | None = None,
    **overrides: Any,
) -> ModelRunner:
    """Return a model of this shape with random weights, as a worker would load it; where not `real`, with a small
    cache."""
    options: dict[str, Any] = {
        "dtype": "bfloat16" if real else "float32",
        "device": str(device),
        "threads": 0,
        "block_size": 16,
        "num_blocks": 0 if real else 64,
        "host_blocks": 0,
        "max_rows": 256 if real else 8,
        "max_step_tokens": 8192 if real else 128,
        "weights": "random",
        "device_steps": True,
        "share": DeviceShare(graphs=2 << 30),
    }
    return ModelRunner(shape_folder(folder, config), RunnerOptions(**{**options, **overrides}), group)


def rows_of(runner: ModelRunner, rows: int, tokens_per_row: int, context: int) -> StepBatch:
    """Return a greedy batch. Raises `DoesNotFit` where the cache cannot hold it."""
    batch = trial_batch(rows, tokens_per_row, context, block_size=runner.block_size, num_blocks=len(runner.kv.blocks))
    if batch is None:
        needed = rows * -(-context // runner.block_size)
        raise DoesNotFit(f"{needed} blocks of a cache of {len(runner.kv.blocks)}")
    return batch
