"""DynaServe's policies in the virtual cluster: random load, small caches; segments that meet at any given token;
KV transfers broken in every phase. The world checks every slot of KV and that nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import Any

import pytest

from cohort.common.messages import KvAccepted, KvChunk, KvGrant, KvHandoff, KvOffer, Message, SegmentEnded
from cohort.common.policies.interface import ClusterView, Impossible, Placed, Placement, Wait, WaitingRequest
from cohort.common.types import FinishReason, Segment
from tests.common.machines.clusters import UNIFIED_TWICE, Asked, finish, of_config, offer, small, tokens, total
from tests.common.machines.world import STOP_TOKEN, World, expected_output
from tests.support.kinds import in_turn


class SplitAt(Placement):
    """[0, position) on the first worker, the rest on the second; whole on the worker that is left when one is dead."""

    def __init__(self, position: int) -> None:
        self._position = position

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: str | None
    ) -> Placed | Wait | Impossible:
        names = sorted(cluster.instances)
        if not names:
            return Wait("nobody is there")
        if len(names) == 1 or len(waiting.request.tokens) > self._position > waiting.request.prompt_tokens:
            return Placed((Segment(0, None, names[0]),), "alone")
        return Placed((Segment(0, self._position, names[0]), Segment(self._position, None, names[1])), "forced")


def world_of(
    seed: int,
    placement: Callable[[], Placement] | None = None,
    *,
    preemption: str = "recompute",
    kind: type[World] = World,
    **options: Any,
) -> World:
    """Two workers of the preset; `placement` instead of its own."""
    config = small("dynaserve", {"engine": {"preemption": preemption}, "dynaserve": {"least_prefill": 16}})
    return of_config(seed, config, placement=placement, kind=kind, **options)


def requests(random: Random) -> Iterator[Asked]:
    while True:
        prompt = tokens(random, random.randint(1, 40))
        yield Asked(prompt, random.randint(1, 30), predicted=float(random.randint(1, 30)))


@pytest.mark.parametrize(("blocks", "preemption"), in_turn(product((22, 64), ("swap", "recompute")), of=2))
def test_random_load_with_wrong_predictions(blocks: int, preemption: str) -> None:
    world = world_of(1, preemption=preemption, blocks=blocks, host_blocks=40)
    offer(world, 90, requests, over_s=2.5)
    finish(world)
    stats = world.manager.stats()
    assert stats["splits_total"] > 4
    assert stats["whole_total"] > 0
    assert stats["finish_tracked_total"] == 90 - world.attempts_lost
    assert total(world, "transfers_in") > 5


# -- segments that meet at a given token (D1, D7, D8) ----------------------------------------------------------------

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38]  # 13 tokens; its response has 20 without a stop token
OUTPUT = 20


def test_the_prompt_of_these_tests_is_answered_at_length() -> None:
    assert len(expected_output(PROMPT, OUTPUT)) == OUTPUT
    assert STOP_TOKEN not in expected_output(PROMPT, OUTPUT)


@pytest.mark.parametrize(
    ("position", "sampled_first"),
    [(1, 0), (7, 0), (12, 0), (13, 1), (14, 2), (25, 13), (31, 19)],
    ids=["first token", "mid prompt", "one before P", "P", "P + 1", "deep in the output", "one before the end"],
)
def test_a_request_changes_hands_at_exactly_this_token(position: int, sampled_first: int) -> None:
    """Computing position p yields the token at p + 1: the first worker draws s − P + 1 tokens."""
    world = world_of(2, lambda: SplitAt(position))
    world.run(2.0)
    world.submit("r", PROMPT, OUTPUT)
    world.run_until_quiet()
    world.check_outputs()
    assert world.owned["r"].finish is FinishReason.LENGTH
    assert world.attempts_lost == 0
    first, second = (world.workers[name].machine.counters for name in UNIFIED_TWICE)
    assert (first.transfers_out, second.transfers_in) == (1, 1)
    assert first.prefill_tokens + first.decode_tokens == position
    assert second.prefill_tokens + second.decode_tokens == len(PROMPT) + OUTPUT - 1 - position
    assert first.decode_tokens == max(0, sampled_first - 1)


@pytest.mark.parametrize("position", [32, 33, 40], ids=["last position", "the end", "beyond"])
def test_an_answer_that_ends_before_the_split_frees_the_second_worker_at_once(position: int) -> None:
    world = world_of(3, lambda: SplitAt(position))
    world.run(2.0)
    world.submit("r", PROMPT, OUTPUT)
    world.run(2.6, lambda: world.owned["r"].finish is not None)
    assert world.owned["r"].finish is FinishReason.LENGTH
    second = world.workers["unified-1"].machine
    world.run(world.now_s + 0.05)  # a few message delays
    assert second.kv.owners() == {}
    assert len(second.leases) == 0
    assert second.idle
    world.run_until_quiet()
    world.check_outputs()
    assert second.counters.transfers_in == 0


def test_an_answer_longer_than_predicted_goes_on() -> None:
    """D8: the split was chosen for 3 tokens and a margin of 2; the response has 20."""
    world = world_of(4)
    world.run(2.0)
    for index in range(6):
        world.submit(f"r{index}", [*PROMPT, index], OUTPUT, predicted=3.0)
    world.run_until_quiet()
    world.check_outputs()


# -- KV transfers broken in every phase -------------------------------------------------------------------------------

PHASES: dict[str, tuple[type[Message], int]] = {
    "offered": (KvOffer, 1),
    "granted": (KvGrant, 1),
    "first chunk": (KvChunk, 1),
    "all chunks": (KvChunk, 99),
    "handed over": (KvHandoff, 1),
    "accepted": (KvAccepted, 1),
    "ended": (SegmentEnded, 1),
}


class Breaking(World):
    """Kills a worker at the moment a message of a phase of the KV transfer is sent, or has just arrived."""

    armed = fired = False

    def arm(self, phase: str, victim: str, when: str) -> None:
        self.phase, self.victim, self.when = PHASES[phase], victim, when
        self.seen, self.armed = 0, True
        self.network.watch = self._note

    def _note(self, when: str, message: Message) -> None:
        if not self.armed:
            return
        kind, count = self.phase
        if count == 99 and isinstance(message, KvHandoff) and when == "sent":
            kind, count, when = KvHandoff, self.seen + 1, self.when  # it is sent right behind the last chunk
        if not isinstance(message, kind) or when != self.when:
            return
        self.seen += 1
        if self.seen >= count:
            self.armed, self.fired = False, True
            # Not in the middle of a machine's effects.
            self.at(0.0, lambda: self.kill_worker(self.victim, 1.0))


# The first worker sends, the second receives, split in the prompt, at its end, in the output.
@pytest.mark.parametrize(
    ("phase", "victim", "when", "position"),
    in_turn(product(PHASES, UNIFIED_TWICE, ("sent", "arrived"), (9, 13, 22)), of=3),
)
def test_a_worker_killed_in_any_phase_of_a_kv_transfer(phase: str, victim: str, when: str, position: int) -> None:
    world = world_of(5, lambda: SplitAt(position), kind=Breaking)
    assert isinstance(world, Breaking)
    world.run(2.0)
    world.arm(phase, victim, when)
    for index in range(4):
        world.submit(f"r{index}", [*PROMPT[index:], *PROMPT[:index]], OUTPUT)
    world.run_until_quiet()
    world.check_outputs()
    assert world.fired
