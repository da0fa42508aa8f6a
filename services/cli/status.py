"""`cohort status`: a running pipeline in a terminal: throughput, latencies and SLOs by class, every process.

Reads the monitor alone: its state and its joint metrics. A single picture, and the first one of `--watch`, is of all
since the pipeline's start; later ones are of the last minute, as far as it has been looked at. Exit code 0 when every
process is up, 1 when the monitor does not answer or a process is down: usable in scripts.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import urllib.error
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cohort.common.errors import CohortError
from cohort.services.cli.scraped import Scraped, get, unreachable

DEFAULT_URL = "http://127.0.0.1:8001"
WINDOW_S = 60.0
_WATCH_EVERY_S = 1.0
_BAR_CELLS = 10
_CLASSES = ("rt", "be")
_OBJECTIVES = ("ttft", "tpot", "deadline")
_RATES = {
    "output_tokens_per_s": "cohort_generation_tokens_total",
    "prompt_tokens_per_s": "cohort_prompt_tokens_total",
    "arrivals_per_s": "cohort_e2e_request_latency_seconds_count",
}
"""Samples of the monitor, and the counters that they are rates of."""

State = Mapping[str, Any]


class NoMonitor(CohortError):
    """No monitor answers at the address."""


@dataclass(frozen=True, slots=True)
class Reading:
    at_s: float
    state: State
    metrics: Scraped


DESCRIPTION = (
    "Show a running pipeline: throughput, latencies, SLO attainment, and its processes with their state, queues, KV "
    "cache use, step time and restarts."
)

EPILOG = """\
examples:
  cohort status                                   once, latencies and SLOs of all since the start
  cohort status --watch                           again every second, of the last minute, until Ctrl-C
  cohort status --json | jq '.processes[].instance'
  cohort status --url http://gpu-box:8001         another pipeline: its monitor's address (monitor.host, monitor.port)

Of a worker: sequences that run and wait, mean rows of an iteration; with --watch also tokens computed a second
(prefill, decode) and preemptions a second.
Exit codes: 0 all processes up, 1 a process is down or no monitor answers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="address of the global monitor (default: %(default)s)")
    parser.add_argument("--watch", action="store_true", help="keep showing, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print the state as JSON, one line per reading")


def run(options: argparse.Namespace) -> int:
    try:
        if options.watch and not options.json:
            return _watch(options.url)
        while True:
            if options.json:
                state = fetch(options.url)
                print(json.dumps(state), flush=True)
            else:
                reading = read(options.url)
                state = reading.state
                _console().print(picture(reading))
            if not options.watch:
                return 0 if healthy(state) else 1
            time.sleep(_WATCH_EVERY_S)
    except NoMonitor as error:
        print(f"cohort status: {error}", file=sys.stderr)
        return 1


def _watch(url: str) -> int:
    """Redraw in place; a monitor that goes away is waited for, once it has been seen."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the terminal is given back
    readings = deque([read(url)])
    with Live(picture(readings[0]), console=_console(), auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_EVERY_S)
            try:
                readings.append(read(url))
            except NoMonitor:
                live.update(Text(f"the monitor at {url} does not answer; waiting for it", "yellow"), refresh=True)
                continue
            while readings[-1].at_s - readings[1].at_s >= WINDOW_S:
                readings.popleft()
            live.update(picture(readings[-1], readings[0]), refresh=True)


def _console() -> Console:
    # Not on a terminal rich assumes 80 columns and would cut the table.
    return Console() if sys.stdout.isatty() else Console(width=140)


def read(url: str) -> Reading:
    """Read state and metrics. Raises `NoMonitor`."""
    state, now_s = fetch(url), time.monotonic()
    try:
        return Reading(now_s, state, Scraped.of(url))
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
            "--url names another monitor"
        ) from error
    except ValueError as error:
        raise NoMonitor(f"{url} does not answer as a Cohort monitor does ({error})") from error
    if not isinstance(state, dict) or "processes" not in state:
        raise NoMonitor(f"{url} does not answer as a Cohort monitor does")
    return state


def healthy(state: State) -> bool:
    return all(process["status"] != "down" for process in state["processes"])


def picture(now: Reading, before: Reading | None = None) -> Group:
    """Draw a reading. `before`: the reading that rates, latencies and attainment count from; None: the start."""
    counted = now.metrics.since(before.metrics) if before is not None else now.metrics
    passed_s = now.at_s - before.at_s if before is not None else 0.0
    return Group(
        _headline(now.state, counted, passed_s),
        _classes(now.metrics, counted),
        _processes(now.state["processes"], counted, passed_s),
    )


def _headline(state: State, counted: Scraped, passed_s: float) -> Text:
    processes = state["processes"]
    ready = sum(process["status"] == "up" and process["ready"] for process in processes)
    line = Text.assemble(
        (state["model"], "bold"),
        f"  preset {state['name']}  up {_duration(state['uptime_s'])}  {ready} of {len(processes)} processes ready  ",
        (f"(last {passed_s:.0f} s)" if passed_s else "(since the start)", "dim"),
    )
    if down := [process["instance"] for process in processes if process["status"] == "down"]:
        line.append(f"\ndown: {', '.join(down)}", "bold red")
    output, prompt, arrivals = (
        counted.total(counter) / passed_s if passed_s else _recent(state, sample) for sample, counter in _RATES.items()
    )
    line.append(f"\n{output:.0f} output tokens/s  {prompt:.0f} prompt tokens/s  {arrivals:.2f} requests/s")
    line.append(f"  arriving {state['arrival_rate']:.2f}/s, soon {state['arrival_rate_forecast']:.2f}/s")
    return line


def _classes(now: Scraped, counted: Scraped) -> Table:
    """Draw the classes: queues of now, all else of what was counted."""
    unplaced = now.total("cohort_num_requests_waiting", **{"class": "all"})
    table = _table(caption=f"waiting for a worker, all classes: {unplaced:.0f}", caption_justify="left")
    table.add_column("class")
    for name in ("in flight", "waiting", "TTFT p50", "p99", "TPOT p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("SLO attainment", no_wrap=True)
    for name in _CLASSES:
        labels = {"class": name}
        latencies = [
            counted.quantile(histogram, share, **labels)
            for histogram in ("cohort_time_to_first_token_seconds", "cohort_request_time_per_output_token_seconds")
            for share in (0.5, 0.99)
        ]
        table.add_row(
            name,
            f"{now.total('cohort_gateway_requests_in_flight', **labels):.0f}",
            f"{now.total('cohort_num_requests_waiting', **labels):.0f}",
            *map(_latency, latencies),
            _attainment(counted, name),
        )
    return table


def _attainment(counted: Scraped, traffic_class: str) -> Text:
    line = Text()
    for objective in _OBJECTIVES:
        labels = {"class": traffic_class, "objective": objective}
        met = counted.total("cohort_slo_requests_total", **labels, outcome="met")
        judged = met + counted.total("cohort_slo_requests_total", **labels, outcome="missed")
        if judged:
            share = met / judged
            colour = "green" if share >= 0.99 else "yellow" if share >= 0.9 else "red"
            line.append(f"{objective} ").append(f"{100 * share:.1f} %  ", colour)
    return line or Text("-")


def _processes(processes: list[dict[str, Any]], counted: Scraped, passed_s: float) -> Table:
    """Draw the processes. Role and memory hardly change: a picture with an earlier reading shows rates instead."""
    table = _table()
    table.add_column("process", no_wrap=True)
    if not passed_s:
        table.add_column("role", style="dim", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("since", "running", "waiting", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV use", no_wrap=True)
    for name in ("step", *(("prefill/s", "decode/s", "preempt/s") if passed_s else ("memory",)), "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    several = sum(process["role"] == "bucketing_manager" for process in processes) > 1
    for process in processes:
        stats, restarts = process["stats"], process["restarts"]
        rows, *rates = _work(process, counted, passed_s)
        table.add_row(
            process["instance"],
            *(() if passed_s else (process["role"].replace("_", " "),)),
            _state(process, _part(process) if several else ""),
            _duration(process["since_s"]),
            _count(stats, "requests_running", "running"),
            _count(stats, "requests_waiting", "waiting"),
            rows,
            _kv_bar(stats),
            f"{stats['step_ms']:.1f} ms" if "step_ms" in stats else "",
            *(rates or (f"{stats['rss_bytes'] / 2**20:.0f} MiB" if "rss_bytes" in stats else "",)),
            Text(str(restarts), style="yellow") if restarts else "0",
        )
    return table


def _work(process: Mapping[str, Any], counted: Scraped, passed_s: float) -> list[str]:
    """Return a worker's mean rows of an iteration; with `passed_s` also its prefill, decode and preemption rates."""
    name = process["instance"]
    if not process["role"].endswith("_worker"):
        return [""] * (4 if passed_s else 1)
    steps = counted.total("cohort_step_rows_count", instance=name)
    rows = counted.total("cohort_step_rows_sum", instance=name) / steps if steps else 0.0
    counters = ("engine_prefill_tokens", "engine_decode_tokens", "num_preemptions") if passed_s else ()
    rates = [counted.total(f"cohort_{counter}_total", instance=name) / passed_s for counter in counters]
    return [f"{number:.1f}" for number in (rows, *rates)]


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
    used = 1 - stats.get("kv_free_blocks", 0.0) / total
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


def _recent(state: State, name: str) -> float:
    samples = state["samples"].get(name, [])[-5:]
    return sum(samples) / len(samples) if samples else 0.0
