"""What a killed process costs in virtual time: work that was lost goes before work that came later, and a restarted
manager places at once."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.types import Attempt, Role
from tests.common.machines.world import MANAGER_SETTINGS, VOCABULARY, Owned, World
from tests.support.kinds import by_default

UNIFIED = {"unified-0": Role.UNIFIED}
PD = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


def prompt(random: Random) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(random.randint(20, 60))]


def submit_at(world: World, at_s: float, name: str, tokens: list[int], max_tokens: int) -> None:
    world.at(at_s - world.now_s, lambda: world.submit(name, tokens, max_tokens))


def killed_once(seed: int, preset: str) -> tuple[list[Owned], list[Owned]]:
    """A worker of a preset dies with 8 requests and is back after a second, in which 40 more have come: more than is
    sent ahead to a worker. Returns those that it had lost, and those that had waited in the manager."""
    overrides = {"manager": {"dispatch_ahead_tokens": 400}, "policies": {"prefill_order": "fcfs"}}
    config = load_config(preset=preset, overrides=overrides)
    random = Random(seed)
    world = World(
        seed,
        UNIFIED,
        Colocated,
        blocks=128,
        host_blocks=128,
        step=(config.engine.max_rows, config.engine.max_step_tokens),
        order=lambda: compose.prefill_order(config),
        scheduler=lambda: compose.iteration(config),
        allocator=lambda geometry, device, host: compose.allocation(config, geometry, device, host),
    )
    for index in range(8):
        submit_at(world, 1.7, f"lost{index}", prompt(random), 40)
    for index in range(40):
        submit_at(world, 2.01 + 0.02 * index, f"later{index}", prompt(random), 30)
    world.run(2.0)
    world.kill_worker("unified-0", 1.0)
    world.run(3.0)
    world.run_until_quiet()
    world.check_outputs()
    lost = [
        owned for name, owned in world.owned.items() if name.startswith("lost") and owned.attempt == Attempt(name, 1)
    ]
    later = [
        owned for name, owned in world.owned.items() if name.startswith("later") and owned.attempt == Attempt(name, 0)
    ]
    return lost, later


@pytest.mark.parametrize("preset", by_default(["unified", "bros", "ecoserve"], "unified", "bros"))
def test_lost_requests_go_before_those_that_came_while_their_worker_was_away(preset: str) -> None:
    """The worker is told of the newcomers first: the gateway has yet to resubmit what was lost."""
    overtaken = pairs = 0
    waits_s: list[float] = []
    for seed in (1, 2):
        lost, later = killed_once(seed, preset)
        assert len(lost) >= 4
        assert len(later) >= 10
        for one in lost:
            waits_s.append(one.next_token_s(3.0) - 3.0)
            pairs += len(later)
            overtaken += sum(other.times_s[0] < one.next_token_s(3.0) for other in later)
    print(
        f"{preset}: {overtaken} of {pairs} pairs overtaken, longest wait {max(waits_s):.2f} s after the worker is back"
    )
    assert overtaken < 0.05 * pairs


@pytest.mark.parametrize(("roles", "placement"), [(UNIFIED, Colocated), (PD, Disaggregated)])
def test_a_restarted_manager_places_as_soon_as_its_workers_are_there(
    roles: dict[str, Role], placement: type[Colocated] | type[Disaggregated]
) -> None:
    """Requests from before the kill, from meanwhile and from afterwards: none waits for `settle_s` (1.5 s)."""
    world, random = World(4, roles, placement), Random(4)
    for index, at_s in enumerate((2.0, 2.9, 3.0, 3.1, 3.25, 3.4)):
        submit_at(world, at_s, f"r{index}", prompt(random), 20)
    world.at(3.05, lambda: world.kill_manager(back_after_s=0.2))
    world.run(4.0)
    world.run_until_quiet()
    world.check_outputs()
    waits_s = [owned.times_s[0] - owned.submitted_s for owned in world.owned.values()]
    print([round(wait_s, 2) for wait_s in waits_s])
    assert max(waits_s) < 1.0


def test_a_worker_that_died_with_the_manager_delays_placements_by_the_listening_time_only() -> None:
    world, random = World(4, {"unified-0": Role.UNIFIED, "unified-1": Role.UNIFIED}, Colocated), Random(4)
    world.run(3.0)
    world.kill_worker("unified-1", None)
    world.kill_manager(back_after_s=0.2)
    world.at(0.3, lambda: world.submit("r", prompt(random), 20))
    world.run(4.0)
    world.run_until_quiet()
    (owned,) = world.owned.values()
    assert owned.times_s[0] - owned.submitted_s < 1.2


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_the_other_role_takes_over_before_a_dead_worker_would_count_as_silent(victim: str) -> None:
    """And it keeps the work while the dead one stays away: prompts and tokens, old requests and new ones."""
    world, random = World(4, PD, Disaggregated, blocks=256), Random(4)
    for index in range(6):
        submit_at(world, 2.0 + 0.01 * index, f"streaming{index}", prompt(random), 60)
    submit_at(world, 2.5, "new", prompt(random), 20)
    world.at(2.3, lambda: world.inflict(f"crash {victim}", 1e6))
    world.run(4.0, lambda: all(owned.over for owned in world.owned.values()) and len(world.owned) == 7)
    world.check_outputs()
    gaps_s = [later - sooner for it in world.owned.values() for sooner, later in pairwise(it.times_s)]
    assert world.attempts_lost > 0
    assert max(gaps_s) < 0.5 < MANAGER_SETTINGS.report_timeout_s
    assert world.owned["new"].over
    assert world.owned["new"].attempt == Attempt("new", 0)


def test_requests_use_both_roles_again_once_the_dead_worker_is_back() -> None:
    world, random = World(4, PD, Disaggregated), Random(4)
    world.run(2.0)
    world.inflict("crash decode-0", 1.0)
    submit_at(world, 2.5, "meanwhile", prompt(random), 20)
    submit_at(world, 4.0, "afterwards", prompt(random), 20)
    world.run(5.0)
    world.run_until_quiet()
    world.check_outputs()
    transfers = {name: node.worker.counters.transfers_out for name, node in world.workers.items()}
    assert transfers == {"prefill-0": 1, "decode-0": 0}


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_false_alarm_costs_attempts_and_no_tokens(victim: str) -> None:
    """The worker lives: what it goes on computing is superseded, and it serves again as soon as it has registered."""
    world, random = World(4, PD, Disaggregated), Random(4)
    for index in range(6):
        submit_at(world, 2.0 + 0.01 * index, f"r{index}", prompt(random), 60)
    world.at(2.3, lambda: world.inflict(f"alarm {victim}", 0.0))
    submit_at(world, 3.5, "afterwards", prompt(random), 20)
    world.run(4.0)
    world.run_until_quiet()
    world.check_outputs()
    lost = world.attempts_lost
    assert 0 < lost <= 6, "each request at most once"
    assert world.manager.workers == 2
    assert world.workers["decode-0"].worker.counters.decode_tokens > 0
    assert world.owned["afterwards"].attempt == Attempt("afterwards", 0)
