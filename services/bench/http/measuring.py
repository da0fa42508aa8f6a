"""`cohort bench` against a server: read options, measure, print and write the result.

Servers are compared round by round: A B B A …, the same requests for all within a round. Every other round goes
backwards: which server comes first in a round is worth some percent on a shared machine. Rounds repeat lengths and
arrivals but not words, so that spread is the servers' and no round meets a warm prefix cache.

Exit status: 0 something completed, 1 nothing did, 2 wrong options or no usable server, 130 Ctrl-C (the partial report
is printed and written all the same).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

import aiohttp
from rich.console import Console

from cohort.services.bench.http import options as options_
from cohort.services.bench.http.harness import Harness, Interrupted, derive_salt
from cohort.services.bench.http.options import BenchOptions
from cohort.services.bench.http.results.figures import BenchResult, compare, to_json
from cohort.services.bench.http.results.render import print_result
from cohort.services.bench.http.results.report import RunReport
from cohort.services.bench.output import output_console, publish_json

EXIT_NOTHING_COMPLETED = 1
EXIT_INTERRUPTED = 130
IDLE_CONNECTION_S = 3.0
"""Shorter than servers keep an idle connection (5 s is common): a request must not meet one that is just being
closed."""
READ_BUFFER_BYTES = 1 << 18


def measure(args: argparse.Namespace) -> int:
    """Everything from parsed options; the exit status. Raises `CohortError`."""
    errors = Console(stderr=True)
    options = options_.from_args(args)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            result, interrupted = runner.run(_measure(options))
        _publish(options, result, errors)
    except (Interrupted, KeyboardInterrupt, asyncio.CancelledError):
        errors.print("interrupted before anything was measured")
        return EXIT_INTERRUPTED
    if interrupted:
        return EXIT_INTERRUPTED
    return 0 if any(run.overall.completed for run in result.runs) else EXIT_NOTHING_COMPLETED


async def _measure(options: BenchOptions) -> tuple[BenchResult, bool]:
    stop = asyncio.Event()
    connector = (
        aiohttp.TCPConnector(limit=0, force_close=True)
        if options.new_connections
        else aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
    )
    # No limits here: the deadline is the request's own, and a queue in the client would hide the server's.
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BUFFER_BYTES) as session:
        harness = Harness(options, session, stop)
        with _ctrl_c_sets(stop):
            await harness.connect()
            result = await _runs(harness)
    return result, stop.is_set()


async def _runs(harness: Harness) -> BenchResult:
    options = harness.options
    if len(harness.servers) > 1:
        return await _in_turn(harness)
    report = await harness.measure(harness.servers[0], label="run", salt=options.prompt_salt)
    return BenchResult(mode="single", settings=options.settings, runs=[report])


async def _in_turn(harness: Harness) -> BenchResult:
    options = harness.options
    found: list[RunReport] = []
    by_name: dict[str, list[RunReport]] = {server.target.name: [] for server in harness.servers}
    try:
        for number in range(1, options.rounds + 1):
            label = f"round {number}"
            for server in harness.servers[:: 1 if number % 2 else -1]:
                if harness.stop.is_set():
                    raise Interrupted
                report = await harness.measure(server, label=label, salt=derive_salt(options.prompt_salt, label))
                found.append(report)
                if not report.interrupted:
                    by_name[server.target.name].append(report)
    except Interrupted:
        if not found:
            raise
    # After Ctrl-C the last round may lack a server: only whole rounds are compared.
    whole = min(len(reports) for reports in by_name.values())
    compared = compare({name: reports[:whole] for name, reports in by_name.items()}) if whole else []
    return BenchResult(mode="compare", settings=options.settings, runs=found, comparison=compared)


def _publish(options: BenchOptions, result: BenchResult, errors: Console) -> None:
    if not options.quiet:
        print_result(result, output_console())
    publish_json(options.json, to_json(result))
    if options.json not in (None, "-") and not options.quiet:
        errors.print(f"written: {options.json}", highlight=False)


@contextlib.contextmanager
def _ctrl_c_sets(stop: asyncio.Event) -> Iterator[None]:
    """First signal: end the run and report. Second: give up."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    installed = []
    for number in signals:
        # Only the main thread may, and not every platform can; Ctrl-C then ends the program without a report.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, on_signal)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one: it halves the client's own work per chunk."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
