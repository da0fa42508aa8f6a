"""What a result says: growth that is certain, bounds, what a kill table does not allow, tables of what is read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.errors import ConfigError
from cohort.services.bench.chaos import report
from cohort.services.bench.chaos.accounts import Accounts, Fault, Waits
from cohort.services.bench.chaos.census import Life, Sample
from cohort.services.bench.chaos.exchange import Broken, Refused, Replied
from cohort.services.bench.chaos.kill_table import lost


def life(name: str, mb_per_h: float, at_start_mb: float = 100.0) -> dict[Life, list[Sample]]:
    sizes = [(float(t), round((at_start_mb + t * mb_per_h / 3600) * 1e6)) for t in range(0, 1500, 5)]
    return {Life(name, 7, 1): [Sample(t, size, 3, {"socket": 4, "pipe": 2}) for t, size in sizes]}


def test_certain_growth_is_a_finding_and_a_flat_life_is_none() -> None:
    found = report.lives(life("gateway", 40.0) | life("manager", 2.0), {Life("gateway", 7, 1): 12.0}, skip_s=300)
    assert [(each.name, each.cpu_s, each.threads, each.descriptors) for each in found] == [
        ("gateway", 12.0, (3, 3), (6, 6)),
        ("manager", 0.0, (3, 3), (6, 6)),
    ]
    assert found[0].rss is not None and found[0].rss.mb_per_h == pytest.approx(40, rel=0.01)
    assert [said.partition(":")[0] for said in report.growing(found, limit_mb_per_h=16.0)] == ["gateway"]


def test_a_slope_over_a_few_minutes_is_told_and_not_judged() -> None:
    found = report.lives(life("gateway", 40.0), {}, skip_s=1000)
    assert found[0].rss is not None and found[0].rss.over_s < report.JUDGED_S
    assert report.growing(found, limit_mb_per_h=16.0) == []


def test_a_process_that_fills_up_is_judged_by_its_bound() -> None:
    filling, beyond = (life("predictor/trainer_process", 100.0, mb) for mb in (100.0, 290.0))
    assert report.growing(report.lives(filling, {}, 300), 16.0) == []
    assert report.growing(report.lives(beyond, {}, 300), 16.0) == [
        "predictor/trainer_process: 332 MB of memory, its bound is 300"
    ]


def test_a_short_life_is_counted_and_not_listed() -> None:
    series = {Life("gateway", 9, 1): [Sample(0.0, 1, 1, {}), Sample(60.0, 1, 1, {})]}
    assert report.lives(series, {}, 0) == [] and report.short(series) == {"gateway": 1}


def accounts(*faults: Fault, cut: int = 0) -> Accounts:
    """Two requests read, one of them lost, and as many cut off with the gateway."""
    made = Accounts()
    made.faults += faults
    made.book("read: a", 0.0, 1.0, Replied(200, {}), 200)
    made.book("read: b", 1.0, 2.0, Broken("reset"), 200)
    for _ in range(cut):
        made.book("read: c", 3.5, 4.0, Broken("reset"), 200)
    return made


def test_the_document_is_read_back_and_its_tables_name_everything(tmp_path: Path) -> None:
    first, second = Fault("gateway", "kill", 9, 11, Waits(0.4, 0.1)), Fault("gateway", "kill", 19, 21, Waits(0, 0.3))
    counted = accounts(first, second)
    of_a_soak = {"by_kind": report.kinds(counted), "cpu_s": 30.0, "lives": report.lives(life("gateway", 40.0), {}, 300)}
    calm, longer = Accounts(), Accounts()
    calm.waits.pause_s, longer.waits.pause_s = 0.2, 1.5
    runs = [
        report.Run.of("cohort", report.UNDISTURBED, 9.0, calm, []),
        report.Run.of("cohort", "decode-0+manager", 9.0, longer, []),
        report.Run.of("unified", report.DECK, 1500.0, counted, ["a socket is left"], **of_a_soak),
    ]
    document = report.Document(command=["chaos"], began="2026-11-22T00:00:00", model="tiny", finished=True, runs=runs)
    path = tmp_path / "soak.json"
    path.write_bytes(document.encode())
    assert report.read_document(path) == document
    said = report.table(document)
    assert "| cohort | none | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0.20 | 0.00 | – | 0.00 |" in said
    assert "| cohort | decode-0+manager | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1.50 | 0.00 | – | 1.30 |" in said
    assert "| unified | by the deck | 2 | 1 | 0 | 0 | 0 | 0 | 1 | 0 | 0.00 | 0.00 | 2.0 | – |" in said
    assert "| unified | gateway | 2 | 0 | 0 | 0 | 0.20 | 0.30 | 0.40 | 2.0 |" in said
    assert "| read | 1 | 0 | 0 | 0 | 0 | 1 |" in said and "| gateway | 24.9 |" in said
    assert document.findings == [
        "unified, by the deck: 1 requests are not accounted for",
        "unified, by the deck: read: b at 1.0 s: reset; under []",
        "unified, by the deck: a socket is left",
    ]
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a result of `cohort chaos`"):
        report.read_document(path)


def test_a_kill_table_allows_one_cut_of_a_client_and_kill_and_no_refusal() -> None:
    fault = Fault("gateway", "kill", 3.0, 5.0)
    assert list(lost(accounts(fault, cut=4), clients=2, kills=1)) == [
        "4 requests were cut off, more than one a client and kill"
    ]
    refused = accounts(fault, cut=2)
    refused.book("read: d", 3.0, 3.5, Refused(503, "away"), 200)
    assert list(lost(refused, clients=2, kills=2)) == ["1 requests were refused", "1 of 2 kills found their process"]
    assert list(lost(accounts(fault, cut=2), clients=2, kills=1)) == []
    assert list(lost(accounts(fault, cut=1), clients=0, kills=1)) == [
        "1 requests were cut off, more than one a client and kill"
    ]
