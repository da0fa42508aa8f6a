"""`cohort bench links` end to end with tiny messages, and what it derives from what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cohort.common.errors import TransferError
from cohort.services.bench import links as measuring
from cohort.services.bench.__main__ import main
from cohort.services.bench.links import LINKS, NAMES, PERFTEST, LinkRates, LinkReport, link_targets, perftest_result


def test_the_links_are_measured_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "links.json"
    assert main(["links", "--quick", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["mode"] == "kv_link" and found["rounds"] == 1
    measured = {each["name"]: each for each in found["rates"]}
    assert set(measured) | set(found["missing"]) == {*LINKS, PERFTEST}
    assert measured["zmq"]["size_mb"] == 1 and measured["zmq"]["median"] > 0
    assert "ZeroMQ link" in out
    for name in found["missing"]:
        assert f"{NAMES[name]} was not measured" in " ".join(out.split())


async def test_a_missing_tool_is_said_and_the_rest_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "find_perftest", lambda: None)
    said: list[tuple[int, int, str]] = []
    report = await measuring.measure(["zmq"], [1, 2], 2, 4, lambda *progress: said.append(progress))
    assert [(each.name, each.size_mb, len(each.rates)) for each in report.rates] == [("zmq", 1, 2), ("zmq", 2, 2)]
    assert "ucx_perftest" in report.missing[PERFTEST]
    assert report.ratio("zmq", PERFTEST, 1) is None and list(link_targets(report)) == []
    assert said == [(0, 2, "1 MB"), (1, 2, "2 MB")]


def test_a_tool_that_fails_is_said_too(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "ucx_perftest"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    tool.chmod(0o755)
    with pytest.raises(TransferError, match="ucx_perftest failed: broken"):
        measuring.perftest_rate(tool, 1, 4)


def test_ratios_are_taken_within_rounds() -> None:
    def rates(name: str, *values: float) -> LinkRates:
        return LinkRates(name=name, size_mb=4, rates=list(values))

    report = LinkReport(
        rounds=3,
        total_mb=8,
        cores=2,
        load_1m=[0.0, 0.0],
        missing={},
        rates=[rates("ucx", 6.0, 2.0, 9.0), rates(PERFTEST, 8.0, 4.0, 10.0)],
    )
    assert report.ratio("ucx", PERFTEST, 4) == 0.75
    (target,) = link_targets(report)
    assert (target.found, target.met) == (0.75, True)


def test_the_tools_last_line_is_read() -> None:
    shown = "| some |\nFinal:       128      0.512   250.0   260.0     4000.50     3900.25     3900     3800\n"
    assert perftest_result(shown) == 3900.25 * (1 << 20)
    assert perftest_result("nothing final") is None
