"""What a step gave, as the machine is told it. Used by the worker loop."""

from __future__ import annotations

from cohort.common.engine.step.batch import StepBatch, StepOutput, TokenLogprobs
from cohort.common.machines.events import PromptScores, Sampled
from cohort.common.messages import TokenLogprob
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence


def sampled_of(sampling: list[Sequence], output: StepOutput | None) -> list[Sampled]:
    if output is None:
        return []
    if output.counts is not None:
        sampling = [each for each, count in zip(sampling, output.counts, strict=True) for _ in range(count)]
    return [
        Sampled(sequence.key, token, _to_wire(logprobs) if logprobs else None, output.failures.get(index, ""))
        for index, (sequence, token, logprobs) in enumerate(
            zip(sampling, output.tokens.tolist(), output.logprobs, strict=True)
        )
    ]


def scores_of(plan: IterationPlan, batch: StepBatch, output: StepOutput | None) -> list[PromptScores]:
    if output is None or not batch.scoring:
        return []
    return [
        PromptScores(plan.rows[scoring.row].sequence.key, plan.rows[scoring.row].start, [_to_wire(s) for s in scores])
        for scoring, scores in zip(batch.scoring, output.scores, strict=True)
    ]


def _to_wire(logprobs: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(logprobs.logprob, list(logprobs.top_ids), list(logprobs.top_logprobs))
