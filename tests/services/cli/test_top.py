"""`cohort top`: the picture of a pipeline, from real expositions and a monitor's state."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cohort.common.http.ports import free_port
from cohort.common.process.metrics import EngineMetrics, MetricFactory, RequestMetrics, SchedulerMetrics, exposition
from cohort.services.cli import top
from cohort.services.cli.__main__ import main
from cohort.services.cli.scraped import Scraped
from cohort.services.cli.top import Reading, picture

WORKER = {"requests_running": 5.0, "requests_waiting": 2.0, "kv_total_blocks": 100.0, "kv_free_blocks": 25.0}


class Site:
    """Gateway, manager and a worker, as far as their metrics go."""

    def __init__(self) -> None:
        self.registries = [CollectorRegistry() for _ in range(3)]
        make = [
            MetricFactory(registry, model_name="m", instance=name)
            for registry, name in zip(self.registries, ("gateway", "manager", "decode-0"), strict=True)
        ]
        self.requests, self.scheduler, self.engine = (
            RequestMetrics(make[0]),
            SchedulerMetrics(make[1]),
            EngineMetrics(make[2]),
        )

    def reading(self, at_s: float, **worker: Any) -> Reading:
        process = {"instance": "decode-0", "role": "decode_worker", "status": "up", "ready": True, "stats": WORKER}
        state = {
            "name": "cohort",
            "model": "tiny",
            "uptime_s": 400.0,
            "processes": [process | worker],
            "arrival_rate": 2.0,
            "arrival_rate_forecast": 3.5,
            "samples": {"output_tokens_per_s": [0.0, 80.0, 80.0, 80.0, 80.0, 80.0]},
        }
        # One text, as the monitor merges it; families of one name are written once here.
        seen: set[str] = set()
        lines = [
            line
            for registry in self.registries
            for line in exposition(registry).decode().splitlines()
            if not line.startswith("#") and not (line in seen or seen.add(line))  # type: ignore[func-returns-value]
        ]
        return Reading(at_s, state, Scraped("\n".join(lines) + "\n"))

    def work(self) -> None:
        """Of one request: 0.2 s to its first token, 10 ms for each later one, in time by one objective of two."""
        self.requests.ttft_seconds("rt").observe(0.2)
        self.requests.tpot_seconds("rt").observe(0.01)
        self.requests.generation_tokens("rt").inc(100)
        self.requests.slo("rt", "ttft", "met").inc(3)
        self.requests.slo("rt", "ttft", "missed").inc()
        self.engine.step_rows().observe(6)
        self.engine.decode_tokens().inc(90)


def line_of(lines: list[str], word: str) -> str:
    return next(line for line in lines if line.startswith(word))


def test_one_picture_is_of_all_since_the_start() -> None:
    site = Site()
    site.work()
    site.requests.in_flight("rt").set(7)
    site.scheduler.requests_waiting("all").set(4)
    lines = picture(site.reading(10.0), None, coloured=False)
    assert lines[0] == "tiny  preset cohort  up 6 min  1 of 1 processes ready  (since the start)"
    assert lines[1].split()[:3] == ["80", "output", "tokens/s"]
    rt = line_of(lines, "rt").split()
    assert rt[:3] == ["rt", "7", "0"]
    assert "ttft 75.0 %" in line_of(lines, "rt") and "ms" in rt
    assert line_of(lines, "be").split()[3:] == ["-"] * 5
    assert "all classes: 4" in line_of(lines, "waiting")
    worker = line_of(lines, "decode-0")
    assert "ready" in worker and "█████████░░░  75 %" in worker
    assert worker.split()[2:5] == ["5", "2", "6.0"]


def test_a_live_picture_counts_from_the_reading_before() -> None:
    site = Site()
    for _ in range(50):
        site.requests.ttft_seconds("rt").observe(5.0)
    before = site.reading(100.0)
    for _ in range(4):
        site.work()
    lines = picture(site.reading(104.0), before, coloured=False)
    assert "(last 4 s)" in lines[0] and lines[1].split()[0] == "100"
    assert float(line_of(lines, "rt").split()[3]) < 300, "the slow ones came before"
    assert line_of(lines, "decode-0").split()[8:10] == ["0.0", "90.0"]


def test_what_is_down_stands_out() -> None:
    lines = picture(Site().reading(0.0, status="down", ready=False), None, coloured=True)
    assert any("\x1b[31mdown: decode-0" in line for line in lines)
    plain = picture(Site().reading(0.0, status="down", ready=False), None, coloured=False)
    assert not any("\x1b" in line for line in plain)


def test_without_a_monitor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "no monitor answers" in capsys.readouterr().err


def test_live_draws_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site, times = Site(), iter(range(200))
    monkeypatch.setattr(top, "read", lambda url: site.reading(float(next(times))))
    pauses = iter(range(100))

    def pause(seconds: float) -> None:
        site.work()
        if next(pauses) == 70:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", pause)
    monkeypatch.setattr(top.signal, "signal", lambda *_: None)
    assert main(["top"]) == 130
    out = capsys.readouterr().out
    assert out.startswith("\x1b[?1049h") and out.endswith("\x1b[?25h\x1b[?1049l")
    assert "(last 60 s)" in out and "(last 61 s)" not in out
