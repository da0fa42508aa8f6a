"""The model's final states in texts, its own answers among them, as this machine's engine computes them.

Called by `command`. Runs the engine in process, many texts at a time; writes and reads what it found as safetensors, so
that nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cohort.common.config import Config
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import StepBatch
from cohort.common.errors import ConfigError
from cohort.common.policies.interface import IterationPlan
from cohort.common.types import SamplingParams
from cohort.services.bench.engine.inside.in_process import InProcessEngine

AT_ONCE = 32
"""Texts in the engine at a time."""


@dataclass(frozen=True, slots=True)
class Text:
    """`tokens` [n], and the model's final states there [n, hidden], behind its last norm. What is learned from begins
    at `begins`: before it stands a question."""

    tokens: Tensor
    states: Tensor
    begins: int


class Work(NamedTuple):
    """A text to come: how the engine goes on from `tokens`, and from where on it is learned from."""

    tokens: Sequence[int]
    sampling: SamplingParams
    begins: int


class Collector:
    """An engine whose states are kept."""

    def __init__(self, config: Config, runner: ModelRunner) -> None:
        """`config` without prefix caching: what is cached is not computed. Raises `ConfigError`."""
        model = runner.keeps_states
        if model is None or runner.geometry.family not in ("llama", "moe"):
            raise ConfigError(f"states of {runner.geometry.model_type} models are not kept; of Llama's form they are")
        self._runner, self._model = runner, model
        self._states = model.keep_states(len(runner.kv.with_spare) * runner.block_size)
        self._engine = InProcessEngine(config, runner, self._ran)
        self._under_way: dict[str, Text] = {}
        self._ends: dict[str, int] = {}

    def outer(self) -> tuple[Tensor, Tensor]:
        """Embedding and last product [vocabulary, hidden] as the engine has them, whatever they are kept as."""
        table, product = self._model.outer
        with torch.inference_mode():
            ones = torch.eye(product.in_features, dtype=self._states.dtype)
            columns = torch.empty((product.in_features, product.out_features))
            product.into(ones, columns)
            rows = torch.empty((product.out_features, product.in_features), dtype=self._states.dtype)
            table.into(torch.arange(len(rows)), rows)
        return rows.clone(), columns.t().contiguous().to(rows.dtype)

    def run(self, work: Iterable[Work], progress: Callable[[int], bool] = lambda tokens: True) -> list[Text]:
        """Each with what the model says behind it, in the order in which they end. `progress` hears of the tokens so
        far; once it says no, no further one is begun."""
        found, waiting, tokens, going = list[Text](), enumerate(work), 0, True
        while True:
            while going and len(self._under_way) < AT_ONCE and (following := next(waiting, None)) is not None:
                self._begin(str(following[0]), following[1])
            if not self._under_way:
                return found
            for sequence in self._engine.step():
                params = sequence.request.sampling
                if sequence.output_tokens < params.max_tokens and sequence.tokens[-1] not in params.stop_token_ids:
                    continue
                text, end = self._under_way.pop(sequence.request_id), self._ends.pop(sequence.request_id)
                found.append(Text(text.tokens[:end].clone(), text.states[:end].clone(), text.begins))
                tokens += end
                going = going and progress(tokens)

    def _begin(self, name: str, work: Work) -> None:
        longest = len(work.tokens) + work.sampling.max_tokens
        states = self._states.new_empty((longest, self._states.shape[1]))
        self._under_way[name] = Text(torch.zeros(longest, dtype=torch.int64), states, work.begins)
        self._engine.submit(name, list(work.tokens), work.sampling.max_tokens, work.sampling)

    def _ran(self, plan: IterationPlan, batch: StepBatch) -> None:
        for row, (begin, end) in zip(plan.rows, pairwise(batch.query_start.tolist()), strict=True):
            name, positions = row.sequence.request_id, torch.from_numpy(batch.positions[begin:end])
            text = self._under_way[name]
            text.tokens[positions] = torch.from_numpy(batch.token_ids[begin:end])
            text.states[positions] = self._states[torch.from_numpy(batch.slot_mapping[begin:end])]
            self._ends[name] = int(positions[-1]) + 1


def write_texts(texts: Sequence[Text], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        "tokens": torch.cat([text.tokens for text in texts]),
        "states": torch.cat([text.states for text in texts]),
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
        "begins": torch.tensor([text.begins for text in texts]),
    }
    whole = file.with_suffix(".part")
    save_file(tensors, whole)
    whole.replace(file)


def read_texts(file: Path, hidden: int) -> list[Text]:
    """Raises `ConfigError` for a file that is none of `write_texts`, or of a model with other states."""
    try:
        read = load_file(file)
        if read["states"].shape[1] != hidden:
            raise ConfigError(f"{file}: states of {read['states'].shape[1]} numbers, the model's have {hidden}")
        lengths = read["lengths"].tolist()
        parts = zip(
            *[torch.split(read[name], lengths) for name in ("tokens", "states")], read["begins"].tolist(), strict=True
        )
        return [Text(tokens, states, begins) for tokens, states, begins in parts]
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{file}: no collected texts ({error})") from error
