"""Rows and requests of a census: every process and every two, and streams of every kind of text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from cohort.services.bench.chaos.accounts import Accounts
from cohort.services.bench.chaos.census import Census, Life, RunFile
from cohort.services.bench.chaos.faults import Faults
from cohort.services.bench.chaos.kill_table import KINDS_OF_TEXT, KillTable, Load
from cohort.services.bench.chaos.users import Place

PLACE = Place("http://127.0.0.1:1", "http://127.0.0.1:2", [""], 0.0)
LOAD = Load(100, 3, 64, seed=0, mixed=True, adapter="own")


class TwoWorkers(Census):
    """Three processes, a helper and the launcher, none of which runs."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))

    def run_file(self) -> RunFile:
        mark = RunFile.Mark(1, 1)
        return RunFile(mark, {name: mark for name in ("decode-0", "decode-1", "manager")}, {})

    def living(self) -> dict[str, Life]:
        return {name: Life(name, 1, 1) for name in ("launcher", "manager", "decode-1", "manager/helper", "decode-0")}


def table() -> KillTable:
    return KillTable("cohort", PLACE, TwoWorkers(), 2, LOAD, print)


def test_a_census_breaks_every_process_and_every_two_in_both_ways_and_never_kills_the_launcher() -> None:
    singles = ["decode-0", "decode-1", "manager", "manager/helper"]
    pairs = ["decode-0+decode-1", "decode-0+manager", "decode-1+manager"]
    stopped = [f"stop:{name}" for name in (*singles[:2], "launcher", *singles[2:], *pairs)]
    assert table().all_faults() == [*singles, *pairs, *stopped]
    assert all(map(table().has, table().all_faults()))
    assert not table().has("stop:decode-0+monitor") and not table().has("gateway")


async def test_a_helper_that_does_not_live_is_left_out_with_the_reason_and_an_instance_is_not() -> None:
    said = list[str]()
    table = KillTable("cohort", PLACE, TwoWorkers(), 2, Load(0, 0, 1, seed=0), said.append)
    assert await table.run("launcher/template 2", kills=1) is None
    assert said[-1] == "cohort: launcher/template 2 is left out: it did not live when it was to be struck"
    missed = await table.run("monitor", kills=1)
    assert missed is not None and missed.findings == ["0 of 1 kills found their process"]


def test_two_of_one_kind_are_two_processes() -> None:
    faults = Faults(PLACE, TwoWorkers(), Accounts(), 2, Random(3), print)
    assert {faults.one_of("decode+decode") for _ in range(20)} == {"decode-0+decode-1", "decode-1+decode-0"}
    assert faults.one_of("manager+decode-1") == "manager+decode-1"
    assert faults.one_of("manager+manager") is None


def test_every_client_and_all_at_once_have_texts_of_every_kind() -> None:
    cases = [LOAD.cases(client) for client in range(LOAD.clients)]
    for number in range(LOAD.requests):
        counts = Counter(case[number].name.partition(":")[0] for case in cases)
        assert set(counts) == set(KINDS_OF_TEXT) and min(counts.values()) >= LOAD.clients // len(KINDS_OF_TEXT)
    bodies = [case.body for client in cases for case in client]
    assert all(body["temperature"] == 0 or "seed" in body for body in bodies)
    asked = Counter(name for body in bodies for name in ("guided_regex", "n", "model") if name in body)
    assert all(count >= len(bodies) // len(KINDS_OF_TEXT) for count in asked.values()) and len(asked) == 3
