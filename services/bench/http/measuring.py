"""`cohort bench` against a server: read options, measure, print and write the result.

One measurement: workload → prepared requests → warm-up → run → report. Prompts are drawn before the clock starts, and
the garbage collector is kept out of the run.

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
import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b

import aiohttp
from rich.console import Console

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import ClosedLoop
from cohort.services.bench.http import options as options_
from cohort.services.bench.http.load import prompts as prompts_
from cohort.services.bench.http.load import target as target_
from cohort.services.bench.http.load import workload as workload_
from cohort.services.bench.http.load.client import Driver, HttpStreamClient, PreparedRequest, RunLog
from cohort.services.bench.http.load.prompts import PromptFactory, Vocabulary
from cohort.services.bench.http.load.target import Dialect, Preferences, RequestBuilder, Target
from cohort.services.bench.http.load.workload import Workload
from cohort.services.bench.http.options import BenchOptions
from cohort.services.bench.http.results import report as report_
from cohort.services.bench.http.results.figures import BenchResult, compare, to_json
from cohort.services.bench.http.results.render import print_result
from cohort.services.bench.http.results.report import RunReport
from cohort.services.bench.output import output_console, publish_json

DISCOVER_TIMEOUT_S = 10.0
WARMUP_CONCURRENCY = 4
WARMUP_MAX_OUTPUT_TOKENS = 32
MAX_PROMPT_TOKENS_PREPARED = 300_000_000
"""Prompts are drawn before the run; this many tokens take about 2 GB."""
_YIELD_EVERY = 64


class Interrupted(Exception):
    """Ctrl-C before there was anything to report."""


@dataclass(frozen=True, slots=True)
class Server:
    target: Target
    dialect: Dialect


class Harness:
    """`stop` ends the run in progress early; its partial report is still made."""

    def __init__(self, options: BenchOptions, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        self.options = options
        self.stop = stop
        self.servers: tuple[Server, ...] = ()
        self._session = session
        self._builder = RequestBuilder(options.temperature, options.extra_body, options.api_key)
        self._vocabulary: Vocabulary | None = None
        self._warm: set[str] = set()

    async def connect(self) -> None:
        """Find model, context and dialect of every server. Servers that are compared get prompts in one common form."""
        options = self.options
        targets = [
            await target_.discover(self._session, name, url, options.model, DISCOVER_TIMEOUT_S, api_key=options.api_key)
            for name, url in options.servers
        ]
        self._vocabulary = self._choose_vocabulary(targets)
        dialects = [await self._negotiate(target, options.prompt_format) for target in targets]
        if len({dialect.prompt_format for dialect in dialects}) > 1:
            dialects = [await self._negotiate(target, "text") for target in targets]
        self.servers = tuple(Server(t, d) for t, d in zip(targets, dialects, strict=True))

    async def measure(self, server: Server, *, label: str, salt: int) -> RunReport:
        """Return one run. An equal salt means equal requests, byte for byte but for the model's name."""
        planned = workload_.build(self.options.workload)
        if not planned.plans:
            raise ConfigError("the workload has no request; raise --duration-s, --rate or --num-requests")
        target_.check_context(server.target, planned.plans)
        await self._warm_up(server, salt)
        requests = await self._prepare(server, planned, salt, label)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        log = await self._drive(server, planned, requests)
        return report_.summarise(
            log,
            planned.facts,
            server.target,
            server.dialect,
            self.options.slo,
            prompt_salt=salt,
            started_at=started_at,
            ignore_eos_wanted=self.options.ignore_eos,
        )

    async def _negotiate(self, target: Target, prompt_format: target_.PromptFormat | None) -> Dialect:
        assert self._vocabulary is not None
        options = self.options
        preferences = Preferences(
            options.endpoint, prompt_format, options.ignore_eos, text_possible=bool(self._vocabulary.words)
        )
        return await target_.negotiate(
            self._session,
            target,
            preferences,
            self._prompts(derive_salt(options.prompt_salt, "probe")),
            self._builder,
            options.request_timeout_s,
        )

    def _choose_vocabulary(self, targets: list[Target]) -> Vocabulary:
        options = self.options
        folder = options.tokenizer or next((t.local_tokenizer for t in targets if t.local_tokenizer), None)
        found = prompts_.from_tokenizer(folder) if folder is not None else None
        if options.token_range is not None:
            ranged = prompts_.from_range(*options.token_range)
            return replace(found, token_ids=ranged.token_ids, origin=ranged.origin) if found else ranged
        return found or prompts_.from_range(*prompts_.DEFAULT_TOKEN_RANGE)

    def _prompts(self, salt: int) -> PromptFactory:
        assert self._vocabulary is not None
        return PromptFactory(
            self._vocabulary, seed=self.options.workload.seed, salt=salt, hash_block_tokens=self.options.hash_block
        )

    async def _warm_up(self, server: Server, salt: int) -> None:
        """Warm up once per server; drawn from the workload's own lengths but with other words, and forgotten."""
        if server.target.name in self._warm or not self.options.warmup:
            return
        self._warm.add(server.target.name)
        spec, short = self.options.workload, WARMUP_MAX_OUTPUT_TOKENS
        planned = workload_.build(
            replace(
                spec,
                num_requests=self.options.warmup,
                duration_s=None,
                arrivals=ClosedLoop(WARMUP_CONCURRENCY),
                max_output_tokens=min(spec.max_output_tokens or short, short),
            )
        )
        requests = await self._prepare(server, planned, derive_salt(salt, "warm-up"), "warm-up")
        await self._drive(server, planned, requests)

    async def _prepare(self, server: Server, planned: Workload, salt: int, label: str) -> list[PreparedRequest]:
        if planned.facts.prompt_tokens > MAX_PROMPT_TOKENS_PREPARED:
            raise ConfigError(
                f"the workload's prompts have {planned.facts.prompt_tokens} tokens in all, at most "
                f"{MAX_PROMPT_TOKENS_PREPARED} can be prepared; use --limit or --num-requests"
            )
        prompts = self._prompts(salt)
        requests = []
        run_label = f"{label.replace(' ', '-')}-{salt:x}"
        for index, plan in enumerate(planned.plans):
            if index % _YIELD_EVERY == 0:
                await asyncio.sleep(0)  # lets Ctrl-C through
                if self.stop.is_set():
                    raise Interrupted
            requests.append(self._builder.build(server.target, server.dialect, prompts, plan, run_label))
        return requests

    async def _drive(self, server: Server, planned: Workload, requests: list[PreparedRequest]) -> RunLog:
        client = HttpStreamClient(
            self._session, server.target.base_url + server.dialect.path, self.options.request_timeout_s
        )
        driver = Driver(client, requests, planned.arrivals, duration_s=self.options.workload.duration_s, stop=self.stop)
        with _garbage_collector_idle():
            return await driver.run()


def derive_salt(salt: int, label: str) -> int:
    """Derive the salt of a part of a benchmark: same label, same prompts; other label, no common prefix."""
    return int.from_bytes(blake2b(f"{salt}/{label}".encode(), digest_size=4).digest(), "big")


@contextmanager
def _garbage_collector_idle() -> Iterator[None]:
    """Freeze prepared bodies, so that no collection walks over them during the run. What had been frozen stays so."""
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()


EXIT_NOTHING_COMPLETED = 1
EXIT_INTERRUPTED = 130
IDLE_CONNECTION_S = 3.0
"""Time below servers' limit for idle connections (often 5 s): no request may meet one that is just being closed."""
READ_BUFFER_BYTES = 1 << 18


def measure(args: argparse.Namespace) -> int:
    """Run the command with parsed options; return the exit status. Raises `CohortError`."""
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
    """Handle signals. First: end the run and report. Second: give up."""
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
    """Return uvloop where there is one: it halves the client's own work per chunk."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
