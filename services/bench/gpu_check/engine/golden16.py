"""Responses in 16 bits against float32: what the path of every real model is held to, flash prefill included.

The float32 golden section never meets flash attention, which serves 16 bits only. Called by the golden section on a GPU
(`agreement`, then `Agreement.holds`), and by a test on the processor, where attention is the engine's own in the same
type. The reference is transformers in float32 over the same weights, rounded to 16 bits first. Prompts go in as two
chunks, so that the second one attends to a cached prefix; every other row's blocks are filled right to left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, StepBatch, TokenLogprobs
from cohort.services.bench.gpu_check.engine.reference import responses

SMALL_MARGIN = 0.1
"""In standard deviations of a position's logits: where the two best are no further apart, either may be chosen."""

LARGEST_ERROR = 0.1
"""In the same unit: log-probabilities of the likeliest tokens may be off by so much."""

_COMPARED = 5  # likeliest tokens of each position
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Agreement:
    """`error`: the largest of a log-probability, in standard deviations of its position's logits, over the positions
    before a response leaves the reference. `clear`: decisions that had to agree; `wrong`: those that did not."""

    error: float
    clear: int
    wrong: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.error <= LARGEST_ERROR and self.clear > 0 and not self.wrong


def agreement(
    folder: Path, device: str, prompts: Sequence[Sequence[int]], outputs: int, dtype: str = "bfloat16"
) -> Agreement:
    """Greedy responses of `outputs` tokens to all prompts at once, of a Llama-shaped model with weights in `folder`."""
    expected = responses(folder, prompts, outputs, device, dtype)
    tokens, logprobs = _Responses(folder, device, dtype, prompts, outputs).run()
    error, clear, wrong = 0.0, 0, []
    for index, reference in enumerate(expected):
        for position in range(outputs):
            logits = reference.logits[position]
            spread = float(logits.std())
            best = logits.topk(2).values
            ours = logprobs[index][position]
            truth = logits.log_softmax(dim=-1)[list(ours.top_ids)]
            error = max(error, float((truth - torch.tensor(ours.top_logprobs)).abs().max()) / spread)
            agrees = tokens[index][position] == reference.tokens[position]
            if float(best[0] - best[1]) < SMALL_MARGIN * spread:
                break  # from here on the two may be different texts
            clear += 1
            if not agrees:
                wrong.append(f"response {index}, token {position}")
                break
    return Agreement(error, clear, tuple(wrong))


class _Responses:
    """The engine's side: a model runner, and rows over blocks of their own."""

    def __init__(self, folder: Path, device: str, dtype: str, prompts: Sequence[Sequence[int]], outputs: int) -> None:
        self._tokens = [list(prompt) for prompt in prompts]
        self._prompts = [len(prompt) for prompt in prompts]
        self._outputs = outputs
        self._computed = [0] * len(prompts)
        self._width = -(-(max(self._prompts) + outputs) // _BLOCK_SIZE)
        self._runner = ModelRunner(
            folder,
            dtype=dtype,
            device=device,
            threads=0,
            block_size=_BLOCK_SIZE,
            num_blocks=self._width * len(prompts) + 1,
            host_blocks=0,
            max_rows=len(prompts),
            max_step_tokens=sum(self._prompts),
            device_steps=True,
            share=DeviceShare(graphs=1 << 30),
        )
        self._runner.warm_up()

    def run(self) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
        """The tokens of each response, and the log-probabilities at each."""
        found: list[list[TokenLogprobs]] = [[] for _ in self._tokens]
        rows = range(len(self._tokens))
        self._step({row: count // 2 for row, count in enumerate(self._prompts) if count > 1}, found)
        for _ in range(self._outputs):
            self._step({row: len(self._tokens[row]) - self._computed[row] for row in rows}, found)
        return [tokens[count:] for tokens, count in zip(self._tokens, self._prompts, strict=True)], found

    def _step(self, counts: dict[int, int], found: list[list[TokenLogprobs]]) -> None:
        rows = sorted(counts, key=lambda row: counts[row] == 1)  # rows of several tokens come first
        if not rows:
            return
        batch = self._batch(rows, counts)
        output = self._runner.execute(batch)
        for row in rows:
            self._computed[row] += counts[row]
        for place, token, logprobs in zip(
            batch.sample_rows.tolist(), output.tokens.tolist(), output.logprobs, strict=True
        ):
            assert logprobs is not None
            self._tokens[rows[place]].append(token)
            found[rows[place]].append(logprobs)

    def _batch(self, rows: Sequence[int], counts: dict[int, int]) -> StepBatch:
        spans = [range(self._computed[row], self._computed[row] + counts[row]) for row in rows]
        sampled = [
            place
            for place, (row, span) in enumerate(zip(rows, spans, strict=True))
            if span.stop == len(self._tokens[row])
        ]
        tables = np.array([np.arange(self._width) + row * self._width for row in rows], dtype=np.int32)
        directions = np.array([[row % 2] * self._width for row in rows], dtype=np.uint8)
        slots = [
            (row * self._width + at // _BLOCK_SIZE) * _BLOCK_SIZE
            + (_BLOCK_SIZE - 1 - at % _BLOCK_SIZE if row % 2 else at % _BLOCK_SIZE)
            for row, span in zip(rows, spans, strict=True)
            for at in span
        ]
        pairs = zip(rows, spans, strict=True)
        want = dataclasses.replace(GREEDY, logprobs=_COMPARED)
        batch = StepBatch(
            token_ids=np.array([self._tokens[row][at] for row, span in pairs for at in span], dtype=np.int64),
            positions=np.array([at for span in spans for at in span], dtype=np.int64),
            query_start=np.cumsum([0, *(counts[row] for row in rows)], dtype=np.int32),
            context_lens=np.array([span.stop for span in spans], dtype=np.int32),
            block_tables=tables,
            directions=directions,
            slot_mapping=np.array(slots, dtype=np.int64),
            sample_rows=np.array(sampled, dtype=np.int32),
            sampling=(want,) * len(sampled),
        )
        batch.check()
        return batch
