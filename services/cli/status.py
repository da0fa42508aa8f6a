"""`cohort status`: the pipeline's processes in a terminal, as the global monitor knows them.

Reads the monitor's `/api/state`; knows nothing of the processes themselves. Exit code 0 when every process is up, 1
when the monitor does not answer or a process is down: usable in scripts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cohort.common.errors import CohortError

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_URL = "http://127.0.0.1:8001"
_ANSWER_DEADLINE_S = 3.0
_WATCH_EVERY_S = 1.0
_BAR_CELLS = 10

State = Mapping[str, Any]


class NothingThere(CohortError):
    """No monitor answers at the address."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status",
        help="what is running: processes, queues, KV use",
        description="Show the processes of a running pipeline: state, queues, KV cache use, step time, restarts.",
        epilog="""\
examples:
  cohort status                                   once
  cohort status --watch                           again every second, until Ctrl-C
  cohort status --json | jq '.processes[].instance'
  cohort status --url http://gpu-box:8001         another pipeline: its monitor's address (monitor.host, monitor.port)

Exit codes: 0 all processes up, 1 a process is down or no monitor answers.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="address of the global monitor (default: %(default)s)")
    parser.add_argument("--watch", action="store_true", help="keep showing, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print the state as JSON, one line per reading")


def run(options: argparse.Namespace) -> int:
    try:
        if options.watch and not options.json:
            return _watch(options.url)
        while True:
            state = fetch(options.url)
            if options.json:
                print(json.dumps(state), flush=True)
            else:
                _console().print(render(state))
            if not options.watch:
                return 0 if healthy(state) else 1
            time.sleep(_WATCH_EVERY_S)
    except NothingThere as error:
        print(f"cohort status: {error}", file=sys.stderr)
        return 1


def fetch(url: str) -> State:
    """The monitor's state. Raises `NothingThere` with what to do about it."""
    address = url.rstrip("/") + "/api/state?history_s=10"
    # Straight to the monitor: a proxy from the environment has no business with a local address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=_ANSWER_DEADLINE_S) as answer:
            state = json.load(answer)
    except urllib.error.HTTPError as error:
        raise NothingThere(f"{url} answers with HTTP {error.code}: that is no Cohort monitor") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise NothingThere(
            f"no monitor answers at {url} ({reason}). Is the pipeline running? `cohort serve` starts one; "
            "--url names another monitor"
        ) from error
    except ValueError as error:
        raise NothingThere(f"{url} does not answer as a Cohort monitor does ({error})") from error
    if not isinstance(state, dict) or "processes" not in state:
        raise NothingThere(f"{url} does not answer as a Cohort monitor does")
    return state


def healthy(state: State) -> bool:
    return all(process["status"] != "down" for process in state["processes"])


def render(state: State) -> RenderableType:
    """The table and a line above it."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("process", no_wrap=True)
    table.add_column("role", style="dim", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("since", "running", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV use", no_wrap=True)
    for name in ("step", "memory", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    several = sum(process["role"] == "bucketing_manager" for process in state["processes"]) > 1
    for process in state["processes"]:
        stats = process["stats"]
        restarts = process["restarts"]
        table.add_row(
            process["instance"],
            process["role"].replace("_", " "),
            _state(process, _part(process) if several else ""),
            _duration(process["since_s"]),
            _count(stats, "requests_running", "running"),
            _count(stats, "requests_waiting", "waiting"),
            _kv_bar(stats),
            f"{stats['step_ms']:.1f} ms" if "step_ms" in stats else "",
            f"{stats['rss_bytes'] / 2**20:.0f} MiB" if "rss_bytes" in stats else "",
            Text(str(restarts), style="yellow") if restarts else "0",
        )
    return Group(_headline(state), table)


def _headline(state: State) -> RenderableType:
    from rich.text import Text

    samples = state["samples"].get("output_tokens_per_s", [])[-5:]
    tokens_per_s = sum(samples) / len(samples) if samples else 0.0
    line = Text.assemble((state["model"], "bold"), f"  preset {state['name']}", style="")
    line.append(
        f"  {tokens_per_s:.0f} output tokens/s  {state['arrival_rate']:.1f} requests/s"
        f"  (forecast {state['arrival_rate_forecast']:.1f})",
        style="dim",
    )
    down = [process["instance"] for process in state["processes"] if process["status"] == "down"]
    if down:
        line.append(f"\ndown: {', '.join(down)}", style="bold red")
    return line


def _part(process: Mapping[str, Any]) -> str:
    """Which of several managers leads."""
    if process["role"] != "bucketing_manager":
        return ""
    return ", leads" if process["stats"].get("leads") else ", stands by"


def _state(process: Mapping[str, Any], part: str) -> RenderableType:
    from rich.text import Text

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


def _watch(url: str) -> int:
    """Redraw in place; a monitor that goes away is waited for, once it has been seen."""
    from rich.live import Live
    from rich.text import Text

    state = fetch(url)
    with Live(render(state), console=_console(), auto_refresh=False, screen=False) as live:
        while True:
            try:
                live.update(render(fetch(url)), refresh=True)
            except NothingThere:
                live.update(Text(f"the monitor at {url} does not answer; waiting for it", "yellow"), refresh=True)
            time.sleep(_WATCH_EVERY_S)


def _console() -> Any:
    from rich.console import Console

    # Not on a terminal rich assumes 80 columns and would cut the table.
    return Console() if sys.stdout.isatty() else Console(width=140)
