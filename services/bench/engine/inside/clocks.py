"""Clocks around functions that know nothing of them: where a step's time goes, without a line of it in the engine.

`clocked` puts a wrapper in place of each function, by its name in the module, class or object that callers look it up
in, and puts the function back at the end. Times are the functions' own: time inside another clocked function counts for
that one alone, so the parts of a step add up to the step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from cohort.common.engine.runner import model_runner
from cohort.kernels.cpu import native
from cohort.services.bench.engine.report import StepPart

_KERNELS: dict[StepPart, tuple[str, ...]] = {
    "products": ("panel_product", "panel_product_added", "panel_product_gated"),
    "attention": ("paged_attention",),
    "elementwise": ("rms_norm", "rope_inplace", "silu_mul", "write_kv"),
    "embedding": ("panel_rows",),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A function: the attribute `name` of `owner`, whose time counts for `part`."""

    owner: Any
    name: str
    part: StepPart


class StepClock:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[StepPart, float] = defaultdict(float)
        self._inside = 0.0  # of clocked functions inside the one that is running

    def wrap(self, part: StepPart, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inside = self._inside, 0.0
            begin_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                whole_s = time.perf_counter() - begin_s
                self.seconds[part] += whole_s - self._inside
                self._inside = outer + whole_s

        return timed


def engine_targets() -> list[Target]:
    """Everything inside `ModelRunner.execute`. Raises nothing where kernels are not compiled: they just are missing."""
    targets = [
        Target(model_runner.ModelRunner, "execute", "dispatch"),
        Target(model_runner, "step_inputs", "inputs"),
        Target(model_runner, "sample", "sampling"),
    ]
    if (operators := native.operators()) is not None:
        targets += [Target(operators, name, part) for part, names in _KERNELS.items() for name in names]
    return targets


@contextmanager
def clocked(clock: StepClock, targets: Iterable[Target]) -> Iterator[None]:
    """Within, the targets' time goes to the clock. One thread only."""
    with ExitStack() as restoring:
        for target in targets:
            function = getattr(target.owner, target.name)
            restoring.callback(setattr, target.owner, target.name, function)
            setattr(target.owner, target.name, clock.wrap(target.part, function))
        yield
