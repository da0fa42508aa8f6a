"""`cohort status`: a running pipeline in a terminal: throughput, latencies and SLOs by class, every process.

Reads the monitor alone. Figures are of the last minute, the same as on the live page; requests in flight and waiting by
class, which it has not, are read from its joint metrics. Exit code 0 when every process is up, 1 when the monitor does
not answer or a process is down: usable in scripts.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cohort.common.errors import CohortError
from cohort.services.cli.ports import add_port, monitor_at
from cohort.services.cli.scraped import Scraped, get, unreachable

_WATCH_EVERY_S = 1.0
_BAR_CELLS = 10
_OBJECTIVES = ("ttft", "tpot", "deadline")
State = Mapping[str, Any]


class NoMonitor(CohortError):
    """No monitor answers at the address."""


@dataclass(frozen=True, slots=True)
class Reading:
    state: State
    metrics: Scraped


DESCRIPTION = (
    "Show a running pipeline: throughput, latencies and SLO attainment of the last minute, and its processes with "
    "state, queues, iterations, KV cache use and restarts."
)

EPILOG = """\
examples:
  cohort status                                   once
  cohort status --watch                           again every second, until Ctrl-C
  cohort status --json | jq '.processes[].instance'
  cohort status --port 9000                       another pipeline of this machine
  cohort status --url http://gpu-box:8001         one elsewhere: its monitor's address (monitor.host, monitor.port)

Of a worker, in the last minute: mean rows and length of an iteration, tokens computed (prefill, decode) and
preemptions a second. KV use: blocks that sequences refer to, without cached ones.
Exit codes: 0 all processes up, 1 a process is down or no monitor answers, 2 a wrong option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_port(parser)
    parser.add_argument("--url", metavar="URL", help="the pipeline whose monitor answers here, instead of --port")
    parser.add_argument("--watch", action="store_true", help="keep showing, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print the state as JSON, one line per reading")


def run(options: argparse.Namespace) -> int:
    url = options.url or monitor_at(options.port)
    try:
        if options.watch and not options.json:
            return _watch(url)
        while True:
            state = fetch(url)
            if options.json:
                print(json.dumps(state), flush=True)
            else:
                _console().print(picture(read(url)))
            if not options.watch:
                return 0 if healthy(state) else 1
            time.sleep(_WATCH_EVERY_S)
    except NoMonitor as error:
        print(f"cohort status: {error}", file=sys.stderr)
        return 1


def _watch(url: str) -> int:
    """Redraw in place; a monitor that goes away is waited for, once it has been seen."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the terminal is given back
    with Live(picture(read(url)), console=_console(), auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_EVERY_S)
            try:
                live.update(picture(read(url)), refresh=True)
            except NoMonitor:
                live.update(Text(f"the monitor at {url} does not answer; waiting for it", "yellow"), refresh=True)


def _console() -> Console:
    # Not on a terminal rich assumes 80 columns and would cut the table.
    return Console() if sys.stdout.isatty() else Console(width=140)


def read(url: str) -> Reading:
    """Read state and metrics. Raises `NoMonitor`."""
    state = fetch(url)
    try:
        return Reading(state, Scraped.of(url))
    except (OSError, ValueError) as error:
        raise NoMonitor(f"{url} does not answer as a Cohort monitor does (/metrics: {error})") from error


def fetch(url: str) -> State:
    """Return the monitor's state. Raises `NoMonitor` with what to do about it."""
    try:
        state = json.loads(get(url.rstrip("/") + "/api/state?history_s=10")[0])
    except urllib.error.HTTPError as error:
        raise NoMonitor(f"{url} answers with HTTP {error.code}: that is no Cohort monitor") from error
    except OSError as error:
        raise NoMonitor(
            f"no monitor answers at {url} ({unreachable(error)}). Is the pipeline running? `cohort serve` starts one; "
            "--port or --url names another one"
        ) from error
    except ValueError as error:
        raise NoMonitor(f"{url} does not answer as a Cohort monitor does ({error})") from error
    if not isinstance(state, dict) or not {"processes", "last_minute"} <= state.keys():
        raise NoMonitor(f"{url} does not answer as a Cohort monitor does")
    return state


def healthy(state: State) -> bool:
    return all(process["status"] != "down" for process in state["processes"])


def picture(now: Reading) -> Group:
    """Draw a reading."""
    return Group(_headline(now.state), _classes(now), _processes(now.state["processes"]))


def _headline(state: State) -> Text:
    processes, figures = state["processes"], state["last_minute"]
    ready = sum(process["status"] == "up" and process["ready"] for process in processes)
    line = Text.assemble(
        (state["model"], "bold"),
        f"  preset {state['name']}  up {_duration(state['uptime_s'])}  {ready} of {len(processes)} processes ready  ",
        (f"(last {figures['seconds']:.0f} s)", "dim"),
    )
    if down := [process["instance"] for process in processes if process["status"] == "down"]:
        line.append(f"\ndown: {', '.join(down)}", "bold red")
    for process in processes:
        for warning in process.get("warnings", ()):
            line.append(f"\n{process['instance']}: {warning}", "yellow")
    line.append(
        f"\n{figures['output_tokens_per_s']:.0f} output tokens/s  {figures['prompt_tokens_per_s']:.0f} prompt tokens/s"
        f"  {figures['arrivals_per_s']:.2f} requests/s arrive, {figures['finished_per_s']:.2f}/s finish"
    )
    if figures["failed"]:
        line.append(f"  failed: {figures['failed']}", "red")
    if refused := ", ".join(f"{count} {reason}" for reason, count in figures["refused"].items()):
        line.append(f"  refused: {refused}", "yellow")
    return line


def _classes(now: Reading) -> Table:
    """Draw the classes: queues of now, all else of the last minute."""
    unplaced = now.metrics.total("cohort_num_requests_waiting", **{"class": "all"})
    table = _table(caption=f"waiting for a worker, all classes: {unplaced:.0f}", caption_justify="left")
    table.add_column("class")
    for name in ("in flight", "waiting", "TTFT p50", "p99", "TPOT p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("SLO attainment", no_wrap=True)
    for name, figures in now.state["last_minute"]["classes"].items():
        labels = {"class": name}
        table.add_row(
            name,
            f"{now.metrics.total('cohort_gateway_requests_in_flight', **labels):.0f}",
            f"{now.metrics.total('cohort_num_requests_waiting', **labels):.0f}",
            *(_latency(figures[which][share]) for which in ("ttft", "tpot") for share in ("p50_s", "p99_s")),
            _attainment(figures["slo"]),
        )
    return table


def _attainment(judged: Mapping[str, tuple[int, int]]) -> Text:
    line = Text()
    for objective in _OBJECTIVES:
        if objective in judged:
            met, missed = judged[objective]
            share = met / (met + missed)
            colour = "green" if share >= 0.99 else "yellow" if share >= 0.9 else "red"
            line.append(f"{objective} ").append(f"{100 * share:.1f} %  ", colour)
    return line or Text("-")


def _processes(processes: list[dict[str, Any]]) -> Table:
    table = _table()
    for name in ("process", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("since", "running", "waiting", "rows", "step", "prefill/s", "decode/s", "preempt/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV use", no_wrap=True)
    table.add_column("restarts", justify="right", no_wrap=True)
    several = sum(process["role"] == "bucketing_manager" for process in processes) > 1
    for process in processes:
        stats, restarts = process["stats"], process["restarts"]
        table.add_row(
            process["instance"],
            _state(process, _part(process) if several else ""),
            _duration(process["since_s"]),
            _count(stats, "requests_running", "running"),
            _count(stats, "requests_waiting", "waiting"),
            *_work(process),
            _kv_bar(stats),
            Text(str(restarts), style="yellow") if restarts else "0",
        )
    return table


def _work(process: Mapping[str, Any]) -> list[str]:
    """Return a worker's mean rows and length of an iteration, its prefill, decode and preemption rates."""
    work, rates = process.get("work"), process.get("rates", {})
    if not work:
        return [""] * 5
    shown = [rates.get(f"{name}_total", 0.0) for name in ("prefill_tokens", "decode_tokens", "preemptions")]
    step = f"{work['step_ms']:.1f} ms" if work["step_ms"] else "idle" if process["ready"] else "-"
    return [f"{work['rows']:.1f}", step, *(f"{rate:.1f}" for rate in shown)]


def _table(**options: Any) -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, **options)


def _part(process: Mapping[str, Any]) -> str:
    """Return whether this manager leads, of several."""
    if process["role"] != "bucketing_manager":
        return ""
    return ", leads" if process["stats"].get("leads") else ", stands by"


def _state(process: Mapping[str, Any], part: str) -> Text:
    match process["status"]:
        case "up":
            return Text(f"ready{part}", "green") if process["ready"] else Text(f"not ready{part}", "yellow")
        case "down":
            return Text(f"down, silent {_duration(process['age_s'])}", "bold red")
        case other:
            return Text(str(other), "dim")


def _count(stats: Mapping[str, float], *names: str) -> str:
    return next((f"{stats[name]:.0f}" for name in names if name in stats), "")


def _kv_bar(stats: Mapping[str, float]) -> str:
    total = stats.get("kv_total_blocks", 0.0)
    if not total:
        return ""
    used = stats.get("kv_used_blocks", 0.0) / total
    cells = round(used * _BAR_CELLS)
    return f"{'█' * cells}{'░' * (_BAR_CELLS - cells)} {100 * used:3.0f} %"


def _duration(seconds: float) -> str:
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
