"""`cohort status`: the picture of a pipeline, from a monitor's own state."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from cohort.common.messages import Heartbeat
from cohort.services.cli import status
from cohort.services.cli.__main__ import main
from cohort.services.cli.scraped import Scraped
from cohort.services.cli.status import Reading, picture
from cohort.services.global_monitor.aggregate import Cluster
from cohort.services.global_monitor.page import state

METRICS = """\
cohort_gateway_requests_in_flight{class="rt"} 7
cohort_num_requests_waiting{class="all"} 4
"""
WORKER = {"running": 5.0, "waiting": 2.0, "kv_total_blocks": 100.0, "kv_used_blocks": 75.0, "kv_free_blocks": 5.0}


def process(instance: str, *, ready: bool = True, warnings: tuple[str, ...] = (), **stats: float) -> Heartbeat:
    kinds = {"manager": "bucketing_manager", "decode": "decode_worker", "prefill": "prefill_worker"}
    role = kinds.get(instance.partition("-")[0], "gateway")
    counts = {"steps": [0.0, 0.0, 0.0]} if role.endswith("worker") else {}
    return Heartbeat(instance, role, 1, 1, ready, "", stats, {}, list(warnings), counts=counts)


class Site:
    """A monitor's cluster and a clock."""

    def __init__(self, *processes: Heartbeat) -> None:
        self.cluster, self.now_s = Cluster(silence_s=3.0), 0.0
        self.worked: tuple[Heartbeat, ...] = ()
        self.beat(*processes)

    def beat(self, *processes: Heartbeat) -> None:
        for each in processes:
            self.cluster.on_heartbeat(self.now_s, each)
        self.cluster.tick(self.now_s)

    def work(self) -> None:
        """Half a minute: 60 requests, 240 tokens of 3 a step and 10 ms; three of four objectives are met."""
        self.now_s += 30.0
        ttft = [0.0] * 25
        ttft[10] = 60.0  # up to 0.5 s
        counts = {"ttft rt": ttft, "slo rt ttft": [3.0, 1.0], "refused queue_full": [2.0]}
        gateway = process("gateway", requests_total=60.0, generation_tokens_total=240.0, failed_total=1.0)
        worker = process("decode-0", **WORKER, decode_tokens_total=240.0)
        self.worked = (
            msgspec.structs.replace(gateway, counts=counts),
            msgspec.structs.replace(worker, counts={"steps": [80.0, 0.8, 240.0]}),
        )
        self.beat(*self.worked)

    def reading(self) -> Reading:
        now = state(self.cluster, self.now_s, name="cohort", model="tiny", uptime_s=400.0, history_s=10.0)
        return Reading(msgspec.to_builtins(now), Scraped(METRICS))


def shown(now: Reading, *, coloured: bool = False) -> list[str]:
    console = Console(width=140, force_terminal=coloured, color_system="standard" if coloured else None)
    with console.capture() as captured:
        console.print(picture(now))
    return captured.get().splitlines()


def line_of(lines: list[str], word: str) -> str:
    (found,) = [line for line in lines if line.split()[:1] == [word]]
    return found


def test_a_picture_is_of_the_last_minute() -> None:
    site = Site(process("gateway"), process("decode-0", **WORKER), process("prefill-0"))
    site.work()
    lines = shown(site.reading())
    assert lines[0] == "tiny  preset cohort  up 7 min  2 of 3 processes ready  (last 30 s)"
    assert lines[1] == "down: prefill-0"
    assert lines[2].split("  ")[:3] == [
        "8 output tokens/s",
        "0 prompt tokens/s",
        "2.00 requests/s arrive, 0.00/s finish",
    ]
    assert "failed: 1" in lines[2] and "refused: 2 queue_full" in lines[2]
    assert line_of(lines, "rt").split() == [*["rt", "7", "0", "375", "ms", "498", "ms", "-", "-", "ttft", "75.0", "%"]]
    assert line_of(lines, "be").split()[3:] == ["-"] * 5
    assert "all classes: 4" in line_of(lines, "waiting")
    worker = line_of(lines, "decode-0")
    assert worker.split()[4:12] == ["5", "2", "3.0", "10.0", "ms", "0.0", "8.0", "0.0"]
    assert "████████░░  75 %" in worker, "cached blocks are no use"
    site.now_s += 90.0
    site.beat(*site.worked)
    lines = shown(site.reading())
    assert "(last 60 s)" in lines[0] and line_of(lines, "rt").split()[3:] == ["-"] * 5
    assert "idle" in line_of(lines, "decode-0")


def test_what_is_down_or_warns_stands_out() -> None:
    site = Site(process("gateway", warnings=("iterations take 4 times their usual time",)), process("decode-0"))
    site.now_s = 9.0
    site.beat(process("gateway", warnings=("iterations take 4 times their usual time",)))
    assert any("\x1b[1;31mdown: decode-0" in line for line in shown(site.reading(), coloured=True))
    assert not any("\x1b" in line for line in shown(site.reading()))
    assert "gateway: iterations take 4 times their usual time" in shown(site.reading())


def test_watched_it_draws_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site, pauses = Site(process("gateway"), process("decode-0")), iter(range(100))

    def pause(seconds: float) -> None:
        site.work()
        if next(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status, "read", lambda url: site.reading())
    monkeypatch.setattr(status, "_console", lambda: Console(width=140, force_terminal=True))
    monkeypatch.setattr(status.time, "sleep", pause)
    monkeypatch.setattr(status.signal, "signal", lambda *_: None)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["status", "--watch"]) == 130
    out = capsys.readouterr().out
    assert out.startswith("\x1b[?25l") and out.endswith("\x1b[?25h")
    assert "(last 30 s)" in out and "(last 60 s)" in out


def test_of_several_managers_it_says_which_one_leads() -> None:
    managers = process("manager", leads=0.0), process("manager-1", ready=False, leads=1.0)
    lines = shown(Site(process("gateway"), *managers).reading())
    assert "ready, stands by" in line_of(lines, "manager")
    assert "not ready, leads" in line_of(lines, "manager-1")
    assert "leads" not in line_of(lines, "gateway")


@pytest.mark.parametrize("leads", [0.0, 1.0])
def test_of_one_manager_nothing_is_said(leads: float) -> None:
    lines = shown(Site(process("manager", leads=leads)).reading())
    assert not {"leads", "stands"} & set(line_of(lines, "manager").split())
