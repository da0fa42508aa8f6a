"""Recorded steps: computed once over standing buffers and repeated from then on.

Used by `static_decode` and `static_mixed`, which own the buffers and decide which batch a recorded step computes. The
recorder decides what repetition is: a CUDA graph on a GPU (`cuda_graphs`), plain repetition elsewhere, by which tests
compare the logic around it with the ordinary path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog
import torch
from torch import Tensor

from cohort.common.engine.step.decode_classes import CaptureBudget

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a recorded step, in buffers that the next step writes again."""

    logits: Tensor  # float32 [S, vocabulary], S rows of the class
    states: Tensor | None  # final hidden states [S, hidden], if the model stores them


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step that can be repeated, and the device memory that its recording took."""

    replay: Callable[[], StepResult]
    cost_bytes: int


class Recorder(Protocol):
    def record(self, step: Callable[[], StepResult]) -> Recorded:
        """Make `step` repeatable. Raises `torch.OutOfMemoryError` if the device has no memory for it."""


class PlainRecorder:
    def record(self, step: Callable[[], StepResult]) -> Recorded:
        self.warm_up(step)
        return self.capture(step)

    def warm_up(self, step: Callable[[], StepResult]) -> None:
        step()

    def capture(self, step: Callable[[], StepResult]) -> Recorded:
        return Recorded(step, 0)


Class = TypeVar("Class")


def record_all(
    kind: str,
    classes: Sequence[Class],
    step_of: Callable[[Class], Callable[[], StepResult]],
    recorder: Recorder,
    budget: CaptureBudget,
    first_estimate_bytes: int,
) -> dict[Class, Callable[[], StepResult]]:
    """Record these classes in this order, as far as the budget goes; log which. The first class is estimated at
    `first_estimate_bytes`, and each one after it at as much as the one before took."""
    steps: dict[Class, Callable[[], StepResult]] = {}
    estimate, refused = first_estimate_bytes, []
    for each in classes:
        if not budget.admits(estimate):
            refused.append(each)
            continue
        try:
            recorded = recorder.record(step_of(each))
        except torch.OutOfMemoryError:
            refused.append(each)
            continue
        except RuntimeError as error:  # a kernel that cannot be recorded: steps run one kernel after the other
            log.warning(f"{kind} cannot be recorded", rows=each, reason=str(error))
            break
        if not budget.spend(recorded.cost_bytes):
            refused.append(each)
            continue
        steps[each] = recorded.replay
        # A smaller class fits into the same pool: it adds no more than this one took.
        estimate = recorded.cost_bytes
    log.info(
        f"{kind} recorded",
        classes=sorted(steps),  # type: ignore[type-var]
        refused=refused,
        mebibytes=budget.spent_bytes >> 20,
        budget_mebibytes=budget.budget_bytes >> 20,
    )
    return steps
