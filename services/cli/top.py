"""`cohort top`: a running pipeline, live in the terminal: throughput, latencies, SLOs, queues by class, every worker.

Reads the monitor alone: its state and its joint metrics. Rates, latencies and attainment are of the last minute, as far
as it has been looked at; the first picture, which is the only one with `--once`, is of all since the pipeline's start.
Plain ANSI; draws over what it drew before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohort.services.cli.scraped import Scraped, get, unreachable

DEFAULT_URL = "http://127.0.0.1:8001"
WINDOW_S = 60.0
_BAR_CELLS = 12
_CLASSES = ("rt", "be")
_OBJECTIVES = ("ttft", "tpot", "deadline")
_BOLD, _DIM, _RED, _YELLOW, _GREEN, _PLAIN = (f"\x1b[{code}m" for code in ("1", "2", "31", "33", "32", "0"))
_ENTER, _LEAVE, _HOME = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H"
_REST_OF_LINE, _REST_OF_SCREEN = "\x1b[K", "\x1b[J"

State = Mapping[str, Any]

EPILOG = """\
examples:
  cohort top                                live, until Ctrl-C
  cohort top --once                         one picture, of all since the start; for scripts and reports
  cohort top --url http://gpu-box:8001      another pipeline: its monitor's address

Columns of workers: sequences that run and wait, mean rows of an iteration, tokens computed a second (prefill, decode),
preemptions a second. Exit codes: 0, or 1 when no monitor answers."""


@dataclass(frozen=True, slots=True)
class Reading:
    at_s: float
    state: State
    metrics: Scraped


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        help="live: tokens a second, latencies, SLOs, queues and KV of a running pipeline",
        description="Show a running pipeline as it works: throughput, latencies, SLO attainment, queues, workers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="address of the global monitor (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two pictures (default: %(default).0f)"
    )


def run(options: argparse.Namespace) -> int:
    try:
        first = read(options.url)
    except (OSError, ValueError) as error:
        why = unreachable(error) if isinstance(error, OSError) else str(error)
        sys.stderr.write(f"cohort top: no monitor answers at {options.url} ({why}); --url names another\n")
        return 1
    if options.once:
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        sys.stdout.write("\n".join(picture(first, None, coloured=coloured)) + "\n")
        return 0
    return _live(options.url, max(0.1, options.interval), first)


def read(url: str) -> Reading:
    """Raises `OSError`, `ValueError`."""
    state = json.loads(get(url.rstrip("/") + "/api/state?history_s=30")[0])
    if not isinstance(state, dict) or "processes" not in state:
        raise ValueError("that is no Cohort monitor")
    return Reading(time.monotonic(), state, Scraped.of(url))


def _live(url: str, interval_s: float, first: Reading) -> int:
    readings = deque([first])
    out = sys.stdout
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the terminal is given back
    out.write(_ENTER)
    try:
        while True:
            lines = picture(readings[-1], readings[0] if len(readings) > 1 else None, coloured=True)
            _draw(lines)
            time.sleep(interval_s)
            try:
                readings.append(read(url))
            except (OSError, ValueError):
                _draw([f"{_YELLOW}the monitor at {url} does not answer; waiting for it{_PLAIN}"])
                continue
            while readings[-1].at_s - readings[1].at_s >= WINDOW_S:
                readings.popleft()
    finally:
        out.write(_LEAVE)
        out.flush()


def _draw(lines: Sequence[str]) -> None:
    """Over the picture before, at most as much as fits."""
    height = shutil.get_terminal_size().lines
    shown = f"{_REST_OF_LINE}\n".join(lines[: height - 1])
    sys.stdout.write(f"{_HOME}{shown}{_REST_OF_LINE}{_REST_OF_SCREEN}")
    sys.stdout.flush()


def picture(now: Reading, before: Reading | None, *, coloured: bool) -> list[str]:
    """Lines. `before`: the reading that rates and latencies count from; None: the start of the pipeline."""
    counted = now.metrics.since(before.metrics) if before is not None else now.metrics
    passed_s = now.at_s - before.at_s if before is not None else 0.0
    lines = [*_head(now, counted, passed_s), "", *_classes(now.metrics, counted), "", *_workers(now, counted, passed_s)]
    return lines if coloured else [_uncoloured(line) for line in lines]


def _head(now: Reading, counted: Scraped, passed_s: float) -> Iterator[str]:
    state = now.state
    up = sum(process["status"] == "up" and process["ready"] for process in state["processes"])
    down = [process["instance"] for process in state["processes"] if process["status"] == "down"]
    window = f"last {passed_s:.0f} s" if passed_s else "since the start"
    yield (
        f"{_BOLD}{state['model']}{_PLAIN}  preset {state['name']}  up {_duration(state['uptime_s'])}  "
        f"{up} of {len(state['processes'])} processes ready  {_DIM}({window}){_PLAIN}"
    )
    if down:
        yield f"{_RED}down: {', '.join(down)}{_PLAIN}"
    if passed_s:
        output, prompt, arrivals = (
            counted.total(name) / passed_s
            for name in (
                "cohort_generation_tokens_total",
                "cohort_prompt_tokens_total",
                "cohort_e2e_request_latency_seconds_count",
            )
        )
    else:
        output, prompt, arrivals = (
            _recent(state, name) for name in ("output_tokens_per_s", "prompt_tokens_per_s", "arrivals_per_s")
        )
    yield (
        f"{_BOLD}{output:8.0f}{_PLAIN} output tokens/s {prompt:8.0f} prompt tokens/s {arrivals:7.2f} requests/s   "
        f"arriving {state['arrival_rate']:.2f}/s, soon {state['arrival_rate_forecast']:.2f}/s"
    )


def _classes(now: Scraped, counted: Scraped) -> Iterator[str]:
    """Queues are of now, all else of what was counted."""
    yield (
        f"{_DIM}{'class':6}{'in flight':>10}{'waiting':>9}{'TTFT p50':>11}{'p99':>9}{'TPOT p50':>11}{'p99':>9}"
        f"   SLO attainment{_PLAIN}"
    )
    for name in _CLASSES:
        ttft = [counted.quantile("cohort_time_to_first_token_seconds", q, **{"class": name}) for q in (0.5, 0.99)]
        tpot = [
            counted.quantile("cohort_request_time_per_output_token_seconds", q, **{"class": name}) for q in (0.5, 0.99)
        ]
        yield (
            f"{name:6}"
            f"{now.total('cohort_gateway_requests_in_flight', **{'class': name}):10.0f}"
            f"{now.total('cohort_num_requests_waiting', **{'class': name}):9.0f}"
            f"{_latency(ttft[0]):>11}{_latency(ttft[1]):>9}{_latency(tpot[0]):>11}{_latency(tpot[1]):>9}"
            f"   {_attainment(counted, name)}"
        )
    unplaced = now.total("cohort_num_requests_waiting", **{"class": "all"})
    yield f"{_DIM}waiting for a worker, all classes: {unplaced:.0f}{_PLAIN}"


def _attainment(counted: Scraped, traffic_class: str) -> str:
    parts = []
    for objective in _OBJECTIVES:
        labels = {"class": traffic_class, "objective": objective}
        met = counted.total("cohort_slo_requests_total", **labels, outcome="met")
        judged = met + counted.total("cohort_slo_requests_total", **labels, outcome="missed")
        if judged:
            share = met / judged
            colour = _GREEN if share >= 0.99 else _YELLOW if share >= 0.9 else _RED
            parts.append(f"{objective} {colour}{100 * share:.1f} %{_PLAIN}")
    return "  ".join(parts) or "-"


def _workers(now: Reading, counted: Scraped, passed_s: float) -> Iterator[str]:
    yield (
        f"{_DIM}{'worker':18}{'state':11}{'run':>5}{'wait':>6}{'rows':>7}  {'KV use':{_BAR_CELLS + 7}}"
        f"{'prefill/s':>10}{'decode/s':>10}{'step':>12}{'preempt/s':>11}{_PLAIN}"
    )
    for process in now.state["processes"]:
        if not process["role"].endswith("_worker"):
            continue
        name, stats = process["instance"], process["stats"]
        steps = counted.total("cohort_step_rows_count", instance=name)
        rows = counted.total("cohort_step_rows_sum", instance=name) / steps if steps else 0.0
        rates = [
            counted.total(f"cohort_{metric}_total", instance=name) / passed_s if passed_s else None
            for metric in ("engine_prefill_tokens", "engine_decode_tokens", "num_preemptions")
        ]
        prefill, decode, preempted = ("-" if rate is None else f"{rate:.1f}" for rate in rates)
        yield (
            f"{name[:17]:18}{_state(process)}{stats.get('requests_running', 0.0):5.0f}"
            f"{stats.get('requests_waiting', 0.0):6.0f}{rows:7.1f}  {_kv(stats)}"
            f"{prefill:>10}{decode:>10}{stats.get('step_ms', 0.0):9.1f} ms{preempted:>11}"
        )


def _state(process: Mapping[str, Any]) -> str:
    match process["status"], process["ready"]:
        case "up", True:
            return f"{_GREEN}{'ready':11}{_PLAIN}"
        case "up", _:
            return f"{_YELLOW}{'not ready':11}{_PLAIN}"
        case status, _:
            return f"{_RED}{status:11}{_PLAIN}"


def _kv(stats: Mapping[str, float]) -> str:
    total = stats.get("kv_total_blocks", 0.0)
    used = 1 - stats.get("kv_free_blocks", 0.0) / total if total else 0.0
    cells = round(used * _BAR_CELLS)
    return f"{'█' * cells}{'░' * (_BAR_CELLS - cells)} {100 * used:3.0f} %"


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _recent(state: State, name: str) -> float:
    samples = state["samples"].get(name, [])[-5:]
    return sum(samples) / len(samples) if samples else 0.0


def _duration(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{int(seconds)} s" if minutes < 2 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _uncoloured(line: str) -> str:
    for code in (_BOLD, _DIM, _RED, _YELLOW, _GREEN, _PLAIN):
        line = line.replace(code, "")
    return line.rstrip()
