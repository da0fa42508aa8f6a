"""One message that never arrives, and no gateway that loses patience: which machine notices, and that the request
continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import pytest

from cohort.common.messages import BindSegment, Message, SegmentEnded
from cohort.common.types import InstanceId, Outcome
from tests.common.machines.clusters import Asked, finish, of_config, small, submit_at, tokens
from tests.common.machines.world import World


def _lose_first(world: World, lost: Callable[[Message], bool]) -> list[Message]:
    """The first such message does not arrive. Returns where it is put instead."""
    arrivals, gone = world.network.arrivals, []

    def some(now_s: float, source: InstanceId, target: InstanceId, message: Message) -> Iterable[float]:
        if not gone and lost(message):
            gone.append(message)
            return ()
        return arrivals(now_s, source, target, message)

    world.network.arrivals = some  # type: ignore[method-assign]
    return gone


def _says_parked(message: Message) -> bool:
    return isinstance(message, SegmentEnded) and message.outcome is Outcome.PARKED


def _binds(message: Message) -> bool:
    return isinstance(message, BindSegment)


@pytest.mark.parametrize("lost", [_says_parked, _binds])
def test_parked_kv_that_is_not_sent_on_is_computed_anew(lost: Callable[[Message], bool]) -> None:
    """Every worker that has the request waits for another; two reports later the manager takes it for lost."""
    world = of_config(3, small("alignedserve"), stall_timeout_s=1e9)
    gone = _lose_first(world, lost)
    random = Random(5)
    for index in range(6):
        submit_at(world, 0.1 * index, f"r{index}", Asked(tokens(random, 12), 8))
    finish(world)
    assert len(gone) == 1
    assert world.attempts_lost == 1
