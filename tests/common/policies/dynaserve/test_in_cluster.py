"""DynaServe's policies in the virtual cluster: random load, small caches, kills; segments that meet at any given token;
hand-overs broken in every phase. The world checks every slot of KV and that nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cohort.common.config import load_config
from cohort.common.messages import KvAccepted, KvChunk, KvGrant, KvHandOver, KvOffer, Message, SegmentEnded
from cohort.common.policies import compose
from cohort.common.policies.interface import (
    ClusterView,
    Impossible,
    IterationScheduler,
    KvAllocator,
    Placed,
    Placement,
    PrefillOrder,
    Wait,
    WaitingRequest,
)
from cohort.common.types import FinishReason, KvGeometry, Role, Segment
from tests.common.machines.faults import any_faults
from tests.common.machines.world import STOP_TOKEN, VOCABULARY, World, expected_output
from tests.examples import examples

TWO = {"unified-0": Role.UNIFIED, "unified-1": Role.UNIFIED}
THREE = {**TWO, "unified-2": Role.UNIFIED}


class SplitAt:
    """[0, position) on the first worker, the rest on the second; whole on whoever is left when one is dead."""

    def __init__(self, position: int) -> None:
        self._position = position

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, wish: str | None
    ) -> Placed | Wait | Impossible:
        names = sorted(cluster.instances)
        if not names:
            return Wait("nobody is there")
        if len(names) == 1 or len(waiting.request.tokens) > self._position > waiting.request.prompt_tokens:
            return Placed((Segment(0, None, names[0]),), "alone")
        return Placed((Segment(0, self._position, names[0]), Segment(self._position, None, names[1])), "forced")

    def finished(self, now_s: float, request_id: str) -> None:
        """Keeps nothing."""


@dataclass
class Seats:
    """The preset's policies, as the world wants them."""

    preemption: Literal["swap", "recompute"] = "recompute"
    caching: bool = True

    def __post_init__(self) -> None:
        self.config = load_config(
            preset="dynaserve",
            overrides={
                "engine": {"max_rows": 8, "max_step_tokens": 32, "prefill_chunk": 8, "preemption": self.preemption},
                "kv": {"prefix_caching": self.caching},
                "manager": {"dispatch_ahead_tokens": 64},
                # The world's iterations take 10 ms each, whatever is in them: only a tight bound ever binds.
                "dynaserve": {
                    "tbt_slo_s": 0.012,
                    "least_segment": 3,
                    "margin_tokens": 2,
                    "hand_over_s": 0.0,
                    "await_arrivals": False,
                },
            },
        )

    def order(self) -> PrefillOrder:
        return compose.prefill_order(self.config)

    def placement(self) -> Placement:
        return compose.placement(self.config)

    def scheduler(self) -> IterationScheduler:
        return compose.iteration(self.config)

    def allocator(self, geometry: KvGeometry, blocks: int, host_blocks: int) -> KvAllocator:
        return compose.allocation(self.config, geometry, blocks, host_blocks)


def world_of(
    seed: int,
    seats: Seats,
    roles: dict[str, Role],
    placement: Callable[[], Placement] | None = None,
    blocks: int = 64,
    failures: float = 0.0,
    delay_s: float = 0.01,
) -> World:
    return World(
        seed,
        roles,
        placement or seats.placement,
        blocks=blocks,
        host_blocks=40,
        preemption=seats.preemption,
        caching=seats.caching,
        order=seats.order,
        scheduler=seats.scheduler,
        allocator=seats.allocator,
        run_failure_rate=failures,
        message_delay_s=delay_s,
    )


def offer(world: World, count: int, over_s: float = 2.5) -> None:
    random = Random(world.random.getrandbits(32))
    for index in range(count):
        prompt = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 40))]
        most = random.randint(1, 30)
        predicted = float(random.randint(1, 30))
        world.at(random.random() * over_s, partial(world.submit, f"r{index}", prompt, most, predicted=predicted))


def finish(world: World, until_s: float = 4.0) -> None:
    world.run(until_s)
    world.run_until_quiet()
    world.check_outputs()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("blocks", [22, 64])
def test_random_load_with_wrong_predictions(blocks: int, preemption: Literal["swap", "recompute"]) -> None:
    world = world_of(1, Seats(preemption), TWO, blocks=blocks)
    offer(world, 90)
    finish(world)
    figures = world.manager.figures()
    assert figures["splits_total"] > 4
    assert figures["whole_total"] > 0
    assert figures["finish_judged_total"] == 90 - world.displaced
    assert sum(node.machine.counters.transfers_in for node in world.workers.values()) > 5


@settings(
    max_examples=examples(0.25),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a world shrinks slowly
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    preemption=st.sampled_from(["swap", "recompute"]),
    blocks=st.sampled_from([20, 30, 64]),
    caching=st.booleans(),
    failures=st.sampled_from([0.0, 0.1]),
    delay_s=st.sampled_from([0.002, 0.05]),
    faults=any_faults(["unified-0", "unified-1", "unified-2"], longest_s=6.0),
)
def test_anything_may_break_at_any_time(
    seed: int,
    preemption: Literal["swap", "recompute"],
    blocks: int,
    caching: bool,
    failures: float,
    delay_s: float,
    faults: list[tuple[str, float, float]],
) -> None:
    world = world_of(seed, Seats(preemption, caching), THREE, blocks=blocks, failures=failures, delay_s=delay_s)
    offer(world, 25)
    for kind, at_s, back_s in faults:
        world.at(at_s, partial(world.inflict, kind, back_s, leaving="unified-1"))
    finish(world, 6.0)


# -- segments that meet at a given token (D1, D7, D8) ----------------------------------------------------------------

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38]  # 13 tokens; its answer has 20 without a stop token
OUTPUT = 20


def test_the_prompt_of_these_tests_is_answered_at_length() -> None:
    assert len(expected_output(PROMPT, OUTPUT)) == OUTPUT
    assert STOP_TOKEN not in expected_output(PROMPT, OUTPUT)


@pytest.mark.parametrize(
    ("position", "drawn_first"),
    [(1, 0), (7, 0), (12, 0), (13, 1), (14, 2), (25, 13), (31, 19)],
    ids=["first token", "mid prompt", "one before P", "P", "P + 1", "deep in the output", "one before the end"],
)
def test_a_request_changes_hands_at_exactly_this_token(position: int, drawn_first: int) -> None:
    """Computing position p yields the token at p + 1: the first worker draws s − P + 1 tokens."""
    world = world_of(2, Seats(), TWO, lambda: SplitAt(position))
    world.run(2.0)
    world.submit("r", PROMPT, OUTPUT)
    world.run_until_quiet()
    world.check_outputs()
    assert world.owned["r"].finish is FinishReason.LENGTH
    assert world.displaced == 0
    first, second = (world.workers[name].machine.counters for name in TWO)
    assert (first.transfers_out, second.transfers_in) == (1, 1)
    assert first.prefill_tokens + first.decode_tokens == position
    assert second.prefill_tokens + second.decode_tokens == len(PROMPT) + OUTPUT - 1 - position
    assert first.decode_tokens == max(0, drawn_first - 1)


@pytest.mark.parametrize("position", [32, 33, 40], ids=["last position", "the end", "beyond"])
def test_an_answer_that_ends_before_the_split_frees_the_second_worker_at_once(position: int) -> None:
    world = world_of(3, Seats(), TWO, lambda: SplitAt(position))
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
    """D8: the split was chosen for 3 tokens and a margin of 2; the answer has 20."""
    world = world_of(4, Seats(), TWO)
    world.run(2.0)
    for index in range(6):
        world.submit(f"r{index}", [*PROMPT, index], OUTPUT, predicted=3.0)
    world.run_until_quiet()
    world.check_outputs()


# -- hand-overs broken in every phase -------------------------------------------------------------------------------

PHASES: dict[str, tuple[type[Message], int]] = {
    "offered": (KvOffer, 1),
    "granted": (KvGrant, 1),
    "first chunk": (KvChunk, 1),
    "all chunks": (KvChunk, 99),
    "handed over": (KvHandOver, 1),
    "accepted": (KvAccepted, 1),
    "ended": (SegmentEnded, 1),
}


class Breaking(World):
    """Kills a worker at the moment a message of a phase of the hand-over is sent, or has just arrived."""

    armed = fired = False

    def arm(self, phase: str, victim: str, when: str) -> None:
        self.phase, self.victim, self.when = PHASES[phase], victim, when
        self.seen, self.armed = 0, True

    def post(self, source: str, target: str, message: Message) -> None:
        super().post(source, target, message)
        self._note("sent", message)

    def _deliver(self, source: str, target: str, message: Message) -> None:
        super()._deliver(source, target, message)
        self._note("arrived", message)

    def _note(self, when: str, message: Message) -> None:
        if not self.armed:
            return
        kind, count = self.phase
        if count == 99 and isinstance(message, KvHandOver) and when == "sent":
            kind, count, when = KvHandOver, self.seen + 1, self.when  # it is sent right behind the last chunk
        if not isinstance(message, kind) or when != self.when:
            return
        self.seen += 1
        if self.seen >= count:
            self.armed, self.fired = False, True
            # Not in the middle of a machine's effects.
            self.at(0.0, lambda: self.kill_worker(self.victim, 1.0))


@pytest.mark.parametrize("position", [9, 13, 22], ids=["in the prompt", "at its end", "in the output"])
@pytest.mark.parametrize("when", ["sent", "arrived"])
@pytest.mark.parametrize("victim", list(TWO), ids=["sender dies", "receiver dies"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_killed_in_any_phase_of_a_hand_over(phase: str, victim: str, when: str, position: int) -> None:
    seats = Seats()
    world = Breaking(
        5, TWO, lambda: SplitAt(position), order=seats.order, scheduler=seats.scheduler, allocator=seats.allocator
    )
    world.run(2.0)
    world.arm(phase, victim, when)
    for index in range(4):
        world.submit(f"r{index}", [*PROMPT[index:], *PROMPT[:index]], OUTPUT)
    world.run_until_quiet()
    world.check_outputs()
    assert world.fired
