"""`cohort status`: the picture of a pipeline, from real expositions and a monitor's state."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from cohort.common.process.metrics import EngineMetrics, MetricFactory, RequestMetrics, SchedulerMetrics, exposition
from cohort.services.cli import status
from cohort.services.cli.__main__ import main
from cohort.services.cli.scraped import Scraped
from cohort.services.cli.status import Reading, picture

WORKER = {"requests_running": 5.0, "requests_waiting": 2.0, "kv_total_blocks": 100.0, "kv_free_blocks": 25.0}


def process(instance: str, *, ready: bool = True, **stats: float) -> dict[str, Any]:
    return {
        "instance": instance,
        "role": "bucketing_manager" if instance.startswith("manager") else "gateway",
        "status": "up",
        "ready": ready,
        "age_s": 0.1,
        "since_s": 5.0,
        "restarts": 0,
        "stats": stats,
    }


def state_of(*processes: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "cohort",
        "model": "tiny",
        "uptime_s": 400.0,
        "processes": list(processes),
        "arrival_rate": 2.0,
        "arrival_rate_forecast": 3.5,
        "samples": {"output_tokens_per_s": [0.0, 80.0, 80.0, 80.0, 80.0, 80.0]},
    }


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
        state = state_of(process("decode-0", **WORKER) | {"role": "decode_worker"} | worker)
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


def shown(now: Reading, before: Reading | None = None, *, coloured: bool = False) -> list[str]:
    console = Console(width=140, force_terminal=coloured, color_system="standard" if coloured else None)
    with console.capture() as captured:
        console.print(picture(now, before))
    return captured.get().splitlines()


def line_of(lines: list[str], word: str) -> str:
    (found,) = [line for line in lines if line.split()[:1] == [word]]
    return found


def test_one_picture_is_of_all_since_the_start() -> None:
    site = Site()
    site.work()
    site.requests.in_flight("rt").set(7)
    site.scheduler.requests_waiting("all").set(4)
    lines = shown(site.reading(10.0))
    assert lines[0] == "tiny  preset cohort  up 7 min  1 of 1 processes ready  (since the start)"
    assert lines[1].split()[:3] == ["80", "output", "tokens/s"]
    rt = line_of(lines, "rt").split()
    assert rt[:3] == ["rt", "7", "0"]
    assert "ttft 75.0 %" in line_of(lines, "rt") and "ms" in rt
    assert line_of(lines, "be").split()[3:] == ["-"] * 5
    assert "all classes: 4" in line_of(lines, "waiting")
    worker = line_of(lines, "decode-0")
    assert "ready" in worker and "████████░░  75 %" in worker
    assert worker.split()[6:9] == ["5", "2", "6.0"]


def test_a_live_picture_counts_from_the_reading_before() -> None:
    site = Site()
    for _ in range(50):
        site.requests.ttft_seconds("rt").observe(5.0)
    before = site.reading(100.0)
    for _ in range(4):
        site.work()
    lines = shown(site.reading(104.0), before)
    assert "(last 4 s)" in lines[0] and lines[1].split()[0] == "100"
    assert float(line_of(lines, "rt").split()[3]) < 300, "the slow ones came before"
    assert line_of(lines, "decode-0").split()[-4:] == ["0.0", "90.0", "0.0", "0"]


def test_what_is_down_stands_out() -> None:
    reading = Site().reading(0.0, status="down", ready=False)
    assert any("\x1b[1;31mdown: decode-0" in line for line in shown(reading, coloured=True))
    assert not any("\x1b" in line for line in shown(reading))


def test_watched_it_draws_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site, times, pauses = Site(), iter(range(200)), iter(range(100))

    def pause(seconds: float) -> None:
        site.work()
        if next(pauses) == 70:
            raise KeyboardInterrupt

    monkeypatch.setattr(status, "read", lambda url: site.reading(float(next(times))))
    monkeypatch.setattr(status, "_console", lambda: Console(width=140, force_terminal=True))
    monkeypatch.setattr(status.time, "sleep", pause)
    monkeypatch.setattr(status.signal, "signal", lambda *_: None)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["status", "--watch"]) == 130
    out = capsys.readouterr().out
    assert out.startswith("\x1b[?25l") and out.endswith("\x1b[?25h")
    assert "(last 60 s)" in out and "(last 61 s)" not in out


def test_of_several_managers_it_says_which_one_leads() -> None:
    managers = process("manager", leads=0.0), process("manager-1", ready=False, leads=1.0)
    lines = shown(Reading(0.0, state_of(process("gateway"), *managers), Scraped("")))
    assert "ready, stands by" in line_of(lines, "manager")
    assert "not ready, leads" in line_of(lines, "manager-1")
    assert "leads" not in line_of(lines, "gateway")


@pytest.mark.parametrize("leads", [0.0, 1.0])
def test_of_one_manager_nothing_is_said(leads: float) -> None:
    lines = shown(Reading(0.0, state_of(process("manager", leads=leads)), Scraped("")))
    assert not {"leads", "stands"} & set(line_of(lines, "manager").split())
