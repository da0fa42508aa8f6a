"""What the result of a soak says: growth that is certain, bounds, and a table that can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.errors import ConfigError
from cohort.services.bench.chaos import soak_report as report
from cohort.services.bench.chaos.accounts import Fault, Unaccounted, Verdict
from cohort.services.bench.chaos.census import Life, Sample


def life(name: str, mb_per_h: float, at_start_mb: float = 100.0) -> dict[Life, list[Sample]]:
    sizes = [(float(t), round((at_start_mb + t * mb_per_h / 3600) * 1e6)) for t in range(0, 1500, 5)]
    return {Life(name, 7, 1): [Sample(t, size, size, 3, {"socket": 4, "pipe": 2}) for t, size in sizes]}


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
    series = {Life("gateway", 9, 1): [Sample(0.0, 1, 1, 1, {}), Sample(60.0, 1, 1, 1, {})]}
    assert report.lives(series, {}, 0) == [] and report.short(series) == {"gateway": 1}


def test_the_document_is_read_back_and_its_table_names_everything(tmp_path: Path) -> None:
    document = report.Document(
        command=["soak"],
        began="2026-11-22T00:00:00",
        seconds=1500.0,
        finished=True,
        preset="cohort",
        model="tiny",
        cpu_s=30.0,
        requests=3,
        verdicts={"right": 2, "lost": 1},
        by_kind={"read: a": {"right": 1}, "read: b": {"right": 1, "lost": 1}},
        refusals={},
        faults=[Fault("gateway", "kill", 3.0, 5.0)],
        lives=report.lives(life("gateway", 40.0), {}, 300),
        short_lives={},
        slope_limit_mb_per_h=16.0,
        counters={},
        unaccounted=[Unaccounted("read: b", Verdict.LOST, 1.0, 2.0, "reset", [])],
        findings=["1 requests are not accounted for"],
    )
    path = tmp_path / "soak.json"
    path.write_bytes(document.encode())
    assert report.read_document(path) == document
    said = report.table(document)
    assert "| read | 2 | 0 | 0 | 0 | 0 | 1 |" in said and "| gateway | 1 | 0 | 0 |" in said
    assert "- 1 requests are not accounted for" in said
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not the result of a soak"):
        report.read_document(path)
