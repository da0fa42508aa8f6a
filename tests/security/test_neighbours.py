"""Attack: one request that is accepted and has much to compute, beside plain ones of other clients.

A prompt of thousands of tokens, many choices, a prompt whose own log-probabilities are wanted: each is honest work, and
what it may cost others is bounded: how much later their first token comes, and how long they wait between two tokens.
Measured in the virtual time of two cores (`neighbours.py`), whatever runs these tests.

`cohort` bounds both in seconds. The baselines bound an iteration in tokens, so their bounds are a multiple of
the longest iteration that they plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random

import pytest

from cohort.common.config import Config, EngineConfig, GatewayConfig, load_config
from cohort.common.messages import StartSegment
from cohort.services.gateway.bounds import BOUNDS
from cohort.services.gateway.generation.preparation import CHOICE_UNITS
from cohort.services.gateway.http.bodies import MAX_LOGPROBS
from tests.examples import nightly
from tests.security.neighbours import PLAIN_PROMPT, PLAIN_TOKENS, Run, VirtualWorker, choices, request

ATTACK_S = 0.5
PLAIN_AT_S = [0.2 + 0.31 * number for number in range(4)]
SHIFTS = 6 if nightly() else 3
"""Runs, each with the plain requests a little later, so that they meet iterations in all their phases."""

Attack = Callable[[Random, Config], list[tuple[float, list[StartSegment]]]]


def ids(random: Random, count: int) -> list[int]:
    return [random.randrange(1000, 20_000) for _ in range(count)]


def attack(
    prompt: int, n: int = 1, *, max_tokens: int = 64, scored: bool = False, logprobs: int = -1, times: int = 1
) -> Attack:
    """`times`: as many such requests, one every 0.6 s."""
    logprobs = 20 if scored else logprobs

    def arrivals(random: Random, config: Config) -> list[tuple[float, list[StartSegment]]]:
        found = []
        for number in range(times):
            name, at_s = f"attack-{number}", ATTACK_S + 0.6 * number
            options = {"max_tokens": max_tokens, "logprobs": logprobs, "at_s": at_s, "config": config}
            found.append((at_s, choices(name, ids(random, prompt), n, scored=scored, **options)))
        return found

    return arrivals


def longest(prompt: int, logprobs: int = -1) -> Attack:
    """As many choices as one request may have, with the longest answers that it may ask for."""
    left = GatewayConfig().max_request_work // BOUNDS.choices - CHOICE_UNITS - prompt
    return attack(prompt, BOUNDS.choices, max_tokens=left // (2 + logprobs), logprobs=logprobs)


AGAIN = "128 short choices, again and again"
ATTACKS: dict[str, Attack] = {
    "a prompt of 2,000": attack(2000, max_tokens=4),
    "a prompt of 8,000": attack(8000, max_tokens=4),
    "64 choices": attack(3, 64),
    "64 choices of 500": attack(500, 64),
    "400 scored, n 3": attack(400, 3, max_tokens=1, scored=True),
    "2,000 scored": attack(2000, max_tokens=1, scored=True),
    "128 choices": longest(3),
    "128 choices of 60": longest(60),
    "128 choices of 500, scores": longest(500, MAX_LOGPROBS),
    "128 choices of 2,000, scores": longest(2000, MAX_LOGPROBS),
    "128 choices of 3,900": longest(3900),
    AGAIN: attack(3, BOUNDS.choices, max_tokens=8, times=5),
}


def runs(
    preset: str, name: str | None, *, learned: bool = True, slowness: float = 1.0, traffic_class: str = "rt"
) -> list[Run]:
    found = []
    for shift in range(SHIFTS):
        random, config = Random(shift), load_config(preset=preset)
        arrivals = ATTACKS[name](random, config) if name else []
        for number, at_s in enumerate(PLAIN_AT_S):
            at_s += 0.033 * shift
            plain = request(
                f"plain-{number}",
                ids(random, PLAIN_PROMPT),
                max_tokens=PLAIN_TOKENS,
                at_s=at_s,
                config=config,
                traffic_class=traffic_class,
            )
            arrivals.append((at_s, [plain]))
        found.append(VirtualWorker(config, learned=learned, slowness=slowness).run(arrivals, until="plain"))
    return found


def worst(found: list[Run]) -> tuple[float, float]:
    """First token after arrival, and time between two tokens: the longest of all plain requests."""
    names = [f"plain-{number}" for number in range(len(PLAIN_AT_S))]
    return (
        max(run.first_s(name) for run in found for name in names),
        max(run.longest_gap_s(name) for run in found for name in names),
    )


@functools.cache
def alone(learned: bool) -> tuple[float, float]:
    return worst(runs("cohort", None, learned=learned))


DELAY_S = 0.25
UNKNOWN_DELAY_S = 0.35
"""In the first iterations on a machine of which nothing is known."""


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "unknown machine"])
@pytest.mark.parametrize("name", ATTACKS)
def test_cohort_delays_a_neighbour_by_a_quarter_of_a_second(name: str, learned: bool) -> None:
    first_s, gap_s = worst(runs("cohort", name, learned=learned))
    alone_first_s, alone_gap_s = alone(learned)
    assert first_s - alone_first_s <= (DELAY_S if learned else UNKNOWN_DELAY_S)
    assert gap_s - alone_gap_s <= (DELAY_S if learned or name != AGAIN else UNKNOWN_DELAY_S)


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "unknown machine"])
def test_where_choices_take_longer_than_their_ttft_a_neighbour_waits_for_two_iterations(learned: bool) -> None:
    """Not for as many of them as leave it its own TTFT."""
    found = runs("cohort", AGAIN, learned=learned, slowness=4.0)
    assert worst(found)[0] <= 2 * max(max(run.steps_s) for run in found)


def test_as_many_choices_as_one_request_may_have_never_take_all_rows() -> None:
    assert 2 * BOUNDS.choices <= EngineConfig().max_rows


@pytest.mark.parametrize(
    ("preset", "name", "iterations"),
    [
        ("unified", "a prompt of 2,000", 2),
        ("unified", "64 choices", 2),
        ("unified", "400 scored, n 3", 2),
        ("unified", "2,000 scored", 2),
        ("baseline-chunked-prefill", "a prompt of 2,000", 6),
        ("baseline-chunked-prefill", "2,000 scored", 2),
    ],
)
def test_baselines_delay_a_neighbour_by_some_iterations(preset: str, name: str, iterations: int) -> None:
    """A newcomer by the one that runs and its own, or by what is before it in the queue; a decode by one."""
    found = runs(preset, name)
    first_s, gap_s = worst(found)
    longest_s = max(max(run.steps_s) for run in found)
    assert first_s <= iterations * longest_s
    assert gap_s <= longest_s + 1e-9


@pytest.mark.parametrize("name", ["a prompt of 2,000", "a prompt of 8,000", "400 scored, n 3", "2,000 scored"])
def test_bounded_iterations_keep_the_time_between_tokens(name: str) -> None:
    """D5 bounds an iteration beside decodes; prompts wait for each other, as they came."""
    _, gap_s = worst(runs("dynaserve", name))
    assert gap_s <= DELAY_S


def test_choices_share_their_prompt() -> None:
    """A long prompt is computed once and a little, not once for each of 64 choices."""
    for run in runs("cohort", "64 choices of 500"):
        computed = sum(count for name, count in run.prompt_tokens.items() if name.startswith("attack"))
        begun = sum(name.startswith("attack") for name in run.prompt_tokens)
        assert begun > 1
        assert computed <= 2 * 500 + begun * 16


def test_best_effort_neighbours_wait_but_are_served() -> None:
    first_s, _ = worst(runs("cohort", "a prompt of 2,000", traffic_class="be"))
    assert first_s <= 4.0
