"""Limits of a key over several gateways: never more than the limit, and nothing lost with a gateway that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.config import KeyLimits
from cohort.common.errors import ConfigError
from cohort.common.keys.key_file import OwnLimits
from cohort.services.gateway.keys import key_table
from cohort.services.gateway.keys.key_budget import KeyBudget, KeyLimited
from cohort.services.gateway.keys.key_shared import SharedKeyBudget
from cohort.services.gateway.keys.key_table import KeyTable
from tests.services.gateway.apis.test_tenants import add, endless, of, post
from tests.services.gateway.conftest import OpenSite, eventually

NOON_S = 1_700_000_000.0 // 86_400 * 86_400 + 43_200
DAY = 3000
LIMITS = KeyLimits(concurrent_requests=5, requests_per_minute=50, tokens_per_minute=300, tokens_per_day=DAY)


class Process:
    """What one gateway has of one key. `die`: as with a kill, nothing is said and the kernel drops its locks."""

    def __init__(self, folder: Path, limits: KeyLimits = LIMITS, *, name: str = "alice", used_today: int = 0) -> None:
        self.table = KeyTable(folder)
        self.table.open()
        self.budget: KeyBudget = SharedKeyBudget(self.table, name, name, "rt", limits, 0.0, NOON_S, used_today)
        self.held: list[int] = []

    def opens(self, now_s: float = 0.0) -> bool:
        try:
            self.budget.admit(now_s, NOON_S)
        except KeyLimited:
            return False
        return True

    def die(self) -> None:
        self.table.close()


@pytest.mark.parametrize("gateways", [1, 3])
def test_the_limit_of_open_requests_is_that_of_all(tmp_path: Path, gateways: int) -> None:
    processes = [Process(tmp_path, KeyLimits(concurrent_requests=2)) for _ in range(gateways)]
    opened = [process.opens() for process in processes * 4]
    assert opened.count(True) == 2
    holder = processes[opened.index(True) % gateways]
    holder.budget.leave(0.0, counts=True)
    assert processes[-1].opens() and not processes[0].opens()


def test_levels_headers_and_messages_are_those_of_all(tmp_path: Path) -> None:
    limits = KeyLimits(requests_per_minute=60, tokens_per_minute=600, concurrent_requests=2)
    first, second = Process(tmp_path, limits), Process(tmp_path, limits)
    assert first.opens()
    first.budget.reserve(0.0, NOON_S, 300)
    alone = KeyBudget("alice", "rt", limits, 0.0, NOON_S)
    alone.admit(0.0, NOON_S)
    alone.reserve(0.0, NOON_S, 300)
    assert second.budget.headers(0.0, NOON_S) == first.budget.headers(0.0, NOON_S) == alone.headers(0.0, NOON_S)
    assert second.opens()
    with pytest.raises(KeyLimited, match="2 are open"):
        second.budget.check(0.0, NOON_S)
    with pytest.raises(KeyLimited, match="300 are left, this request may use 301"):
        second.budget.reserve(0.0, NOON_S, 301)
    assert second.budget.headers(15.0, NOON_S)["x-ratelimit-remaining-tokens"] == "450"


def test_keys_and_classes_have_records_of_their_own(tmp_path: Path) -> None:
    limits = KeyLimits(concurrent_requests=1)
    alice, bob = Process(tmp_path, limits), Process(tmp_path, limits, name="bob")
    relaxed = SharedKeyBudget(bob.table, "alice", "alice", "be", limits, 0.0, NOON_S)
    assert alice.opens() and bob.opens()
    relaxed.admit(0.0, NOON_S)
    for each in (alice.budget, bob.budget, relaxed):
        with pytest.raises(KeyLimited):
            each.check(0.0, NOON_S)


def test_what_was_used_today_counts_once_and_for_the_first_gateway_alone(tmp_path: Path) -> None:
    first, second = (Process(tmp_path, used_today=2900) for _ in range(2))
    first.budget.reserve(0.0, NOON_S, 60)
    with pytest.raises(KeyLimited, match="tokens_per_day"):
        second.budget.reserve(0.0, NOON_S, 41)
    second.budget.reserve(0.0, NOON_S, 40)
    first.die()
    second.die()
    assert Process(tmp_path, used_today=2950).budget.day.limit == DAY
    last = Process(tmp_path, used_today=0)
    last.budget.reserve(0.0, NOON_S, 50)  # the table began anew, with what the database had then


def test_another_gateway_that_takes_the_slot_has_none_of_what_the_dead_one_had(tmp_path: Path) -> None:
    first, second = (Process(tmp_path, KeyLimits(concurrent_requests=4, tokens_per_day=DAY)) for _ in range(2))
    for each in (first, second):
        assert each.opens() and each.opens()
        each.budget.reserve(0.0, NOON_S, 100)
    slot = second.table.slot
    second.die()
    third = Process(tmp_path, KeyLimits(concurrent_requests=4, tokens_per_day=DAY))
    assert third.table.slot == slot
    third.budget.check(0.0, NOON_S)
    assert third.budget.open == 2 and third.budget.day.used == 100


def test_changed_limits_keep_what_was_used_everywhere(tmp_path: Path) -> None:
    first, second = (Process(tmp_path, KeyLimits(requests_per_minute=10)) for _ in range(2))
    assert all(each.opens() for each in (first, second) * 5) and not first.opens()
    first.budget.relimit(KeyLimits(requests_per_minute=12), 0.0)
    assert not second.opens(), "this one has not read the file yet"
    assert first.opens() and first.opens() and not first.opens()


def test_more_gateways_than_slots_are_told(tmp_path: Path) -> None:
    held = [KeyTable(tmp_path) for _ in range(key_table.SLOTS)]
    for each in held:
        each.open()
    assert sorted(each.slot for each in held) == list(range(key_table.SLOTS))
    with pytest.raises(ConfigError, match=r"gateway\.processes"):
        KeyTable(tmp_path).open()
    held[7].close()
    again = KeyTable(tmp_path)
    again.open()
    assert again.slot == 7
    for each in (*held, again):
        each.close()


STEPS = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 3), st.integers(1, 80)),
    st.tuples(st.just("end"), st.integers(0, 3), st.integers(0, 9), st.integers(0, 120), st.booleans()),
    st.tuples(st.just("die"), st.integers(0, 3)),
    st.tuples(st.just("pass"), st.floats(0, 40)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_no_interleaving_grants_more_than_the_limit_or_loses_capacity(script: list[Any]) -> None:
    """Grants, ends and deaths of four gateways, each replaced when it dies. What the living hold is never more than the
    limit, and a request is refused only where the living have it all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        anchor = KeyTable(folder)  # the table outlives every single gateway
        anchor.open()
        processes = [Process(folder) for _ in range(4)]
        now_s, used = 0.0, 0
        taken = 0
        for step in script:
            open_before = sum(len(each.held) for each in processes)
            match step:
                case ("open", which, tokens):
                    process = processes[which]
                    day_left = DAY - used - sum(sum(each.held) for each in processes)
                    try:
                        process.budget.admit(now_s, NOON_S)
                    except KeyLimited as error:
                        full = open_before == 5
                        assert full == ("concurrent_requests" in error.message)
                        assert full or "per_minute" in error.message or day_left < 1
                        continue
                    assert open_before < 5
                    try:
                        process.budget.reserve(now_s, NOON_S, tokens)
                    except KeyLimited as error:
                        assert "per_minute" in error.message or tokens > day_left
                        process.budget.leave(now_s, counts=False)
                        continue
                    assert tokens <= day_left
                    process.held.append(tokens)
                    taken += 1
                case ("end", which, place, tokens, counts) if processes[which].held:
                    process = processes[which]
                    process.budget.settle(now_s, NOON_S, process.held.pop(place % len(process.held)), tokens)
                    process.budget.leave(now_s, counts=counts)
                    used += tokens
                case ("die", which):
                    processes[which].die()
                    processes[which] = Process(folder)
                case ("pass", seconds):
                    now_s += seconds
        for each in processes:
            each.die()
        later_s = now_s + 60.0 * (1 + taken)
        fresh = Process(folder)
        assert [fresh.opens(later_s) for _ in range(6)] == [True] * 5 + [False]
        fresh.budget.headers(later_s, NOON_S)
        assert fresh.budget.day.used == used
        for each in (fresh.table, anchor):
            each.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 20), st.integers(1, 60)), max_size=50))
def test_several_gateways_decide_as_one_would(script: list[tuple[int, float, int]]) -> None:
    """Without deaths the shared budget is the budget of a single gateway, whichever is asked."""
    with tempfile.TemporaryDirectory() as name:
        processes = [Process(Path(name)) for _ in range(3)]
        alone, now_s = KeyBudget("alice", "rt", LIMITS, 0.0, NOON_S), 0.0
        for which, pause_s, tokens in script:
            now_s += pause_s
            said = []
            for budget in (processes[which].budget, alone):
                try:
                    budget.admit(now_s, NOON_S)
                    budget.reserve(now_s, NOON_S, tokens)
                    said.append("yes")
                except KeyLimited as error:
                    said.append(error.message)
            assert said[0] == said[1]
            assert processes[0].budget.headers(now_s, NOON_S) == alone.headers(now_s, NOON_S)
        for each in processes:
            each.die()


HOLDER = """
import sys, time
from pathlib import Path
from tests.services.gateway.keys.test_key_shared import Process
process = Process(Path(sys.argv[1]))
while process.opens():
    process.budget.reserve(0.0, 1_700_000_000.0 // 86_400 * 86_400 + 43_200, 10)
print(process.budget.open, flush=True)
time.sleep(60)
"""


def test_a_process_that_is_killed_gives_back_what_it_had(tmp_path: Path) -> None:
    here = Process(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, cwd=os.getcwd())
    try:
        assert other.stdout is not None and other.stdout.readline() == b"5\n"
        assert not here.opens()
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert [here.opens() for _ in range(6)] == [True] * 5 + [False]
        assert here.budget.day.used == 0
    finally:
        other.kill()
        other.communicate()


# -- Gateways ------------------------------------------------------------------------------------------------------


async def test_two_gateways_have_one_limit_of_open_requests(open_site: OpenSite, tmp_path: Path) -> None:
    key_file = tmp_path / "keys" / "keys.json"
    alice = add(key_file, "alice", rt=OwnLimits(concurrent_requests=2, requests_per_minute=10))
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
    async with (
        open_site(endless, keys=of(key_file), step_s=0.02, processes=2) as first,
        open_site(endless, keys=of(key_file), step_s=0.02, processes=2) as second,
    ):
        running = [asyncio.create_task(post(site, alice, body)) for site in (first, second)]
        await eventually(lambda: bool(first.manager.submitted and second.manager.submitted))
        for site in (first, second):
            status, headers, answer = await post(site, alice, body)
            assert status == 429 and "2 are open" in answer["error"]["message"]
            assert headers["x-ratelimit-remaining-requests"] == "8"
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await eventually(lambda: first.nothing_left() and second.nothing_left())
        assert [(await post(site, alice))[0] for site in (first, second)] == [200, 200]
    assert list((tmp_path / "batches" / "0" / "limits").iterdir())


async def test_a_single_gateway_keeps_no_table(open_site: OpenSite, tmp_path: Path) -> None:
    key_file = tmp_path / "keys" / "keys.json"
    alice = add(key_file, "alice", rt=OwnLimits(concurrent_requests=2))
    async with open_site(keys=of(key_file)) as site:
        assert (await post(site, alice))[0] == 200
    assert not (tmp_path / "batches" / "0" / "limits").exists()
