"""`cohort bench links`: the KV links between two processes of this machine, beside UCX's own measure.

For a person deciding on `transfer.links`, or looking for a link that fell back to TCP. Gigabytes per second by message
size for each link, and beside them what UCX's own `ucx_perftest` reaches in the same rounds, if the libucx wheel
brought it: all run in turn, so that other load on the machine hits all alike. The command starts this module as the
measuring process, where the links are, which starts the sending one.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.common.devices.cores import usable_cores
from cohort.common.errors import ConfigError, TransferError
from cohort.common.transport.kv_link import KvLink
from cohort.common.transport.security import generate_keys, load_keys
from cohort.common.transport.ucx_devices import UcxChoice
from cohort.services.bench.child import run_child, shown_on
from cohort.services.bench.engine.command import LINK_OVER_PERFTEST, Target, targets
from cohort.services.bench.output import add_output_arguments, check_output, output_console, plain_table, publish_json

MB = 1 << 20
SIZES_MB = (1, 4, 16, 64)
ROUNDS = 5
TOTAL_MB = 512
PERFTEST = "ucx_perftest"
LINKS = ("ucx", "ucx-tcp", "zmq", "zmq-curve")
"""Links: as UCX chooses, or over TCP alone; ZeroMQ in clear, or with a key."""
PIPELINED = 16  # messages under way at once, as the transfer agent has runs
TIMEOUT_S = 60.0
_LISTENING_S = 0.5  # ucx_perftest does not say when it listens


class LinkRates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second of one contender at one message size, a figure per round."""

    name: str
    size_mb: int
    rates: list[float]

    @property
    def median(self) -> float:
        return median(self.rates)


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """`missing`: contenders that could not run here, and why. `load_1m`: load average before and after."""

    rounds: int
    total_mb: int
    cores: int
    load_1m: list[float]
    rates: list[LinkRates]
    missing: dict[str, str]

    def of(self, name: str, size_mb: int) -> LinkRates | None:
        return next((found for found in self.rates if found.name == name and found.size_mb == size_mb), None)

    def ratio(self, name: str, other: str, size_mb: int) -> float | None:
        """Return `name` over `other`, median of the rounds' own ratios; None where one of them did not run."""
        ours, theirs = self.of(name, size_mb), self.of(other, size_mb)
        if ours is None or theirs is None:
            return None
        return median(a / b for a, b in zip(ours.rates, theirs.rates, strict=True))


Contender = Callable[[int], Awaitable[float]]
"""Moves a measurement's worth of messages of this many megabytes and returns bytes a second."""


class Memory:
    """Memory of the bytes that are sent and arrive: the host's, here."""

    def make(self, size: int, value: int) -> Any:
        return np.full(size, value, np.uint8)

    def fill(self, memory: Any, value: int) -> None:
        memory.fill(value)


@dataclass(frozen=True, slots=True)
class Ends:
    """Places of the two processes. `host`: the address at which ZeroMQ listens here. `through`: a command that runs the
    other process, as `ip netns exec …`. `keys_file`: of a cluster's key, made for this measurement. `net_devices`:
    UCX's. `memory`: of this process. `sender`: the other process's module, and its own first words."""

    host: str = "127.0.0.1"
    through: tuple[str, ...] = ()
    keys_file: str = ""
    net_devices: str = ""
    memory: Memory = field(default_factory=Memory)
    sender: tuple[str, ...] = ("cohort.services.bench.links",)


async def measure(
    links: Sequence[str],
    sizes_mb: Sequence[int],
    rounds: int,
    total_mb: int,
    progress: Callable[[int, int, str], None],
    ends: Ends | None = None,
) -> LinkReport:
    """Run all contenders in turn, round after round; the first round of every size only warms up."""
    ends = ends or Ends()
    load_before = os.getloadavg()[0]
    contenders: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    pairs: list[LinkPair] = []
    rates: list[LinkRates] = []
    try:
        for name in links:
            try:
                pairs.append(await LinkPair.open(name, ends))
                contenders[name] = partial(_link_rate, pairs[-1], total_mb)
            except (TransferError, ConfigError) as error:
                missing[name] = str(error)
        tool = None if ends.through else find_perftest()
        if ends.through:
            missing[PERFTEST] = "it is measured between processes of this host alone"
        elif tool is None:
            missing[PERFTEST] = "this installation has no libucx wheel with bin/ucx_perftest"
        else:
            contenders[PERFTEST] = partial(_perftest_rate, tool, total_mb)
        for done, size_mb in enumerate(sizes_mb):
            progress(done, len(sizes_mb), f"{size_mb} MB")
            found: dict[str, list[float]] = {name: [] for name in contenders}
            for round_index in range(rounds + 1):
                for name in list(contenders):
                    try:
                        rate = await contenders[name](size_mb)
                    except TransferError as error:
                        missing[name] = str(error)
                        del contenders[name], found[name]
                        continue
                    if round_index > 0:
                        found[name].append(rate)
            rates += [LinkRates(name=name, size_mb=size_mb, rates=each) for name, each in found.items()]
    finally:
        for pair in pairs:
            await pair.close()
    cores = usable_cores()
    return LinkReport(
        rounds=rounds,
        total_mb=total_mb,
        cores=cores,
        load_1m=[load_before, os.getloadavg()[0]],
        rates=rates,
        missing=missing,
    )


class LinkPair:
    """The receiving side here, with the clock; the sending side is a child process, told what to send on its stdin."""

    def __init__(self, name: str, link: KvLink, child: asyncio.subprocess.Process, memory: Memory) -> None:
        self.name = name
        self._link = link
        self._memory = memory
        self._child = child
        self._tag = 0
        self._buffers: dict[int, list[Any]] = {}

    @classmethod
    async def open(cls, name: str, ends: Ends, link: KvLink | None = None) -> LinkPair:
        """Open both sides; `link`: this side's, if it is open. Raises `TransferError` where it cannot be had."""
        link = link or open_link(name, ends)
        child = await asyncio.create_subprocess_exec(
            *ends.through,
            sys.executable,
            "-P",
            "-m",
            *ends.sender,
            "--sender",
            name,
            link.address().hex(),
            ends.keys_file,
            ends.net_devices,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdout is not None
        try:
            address = await asyncio.wait_for(child.stdout.readline(), TIMEOUT_S)
        except TimeoutError:
            address = b""
        if not address:
            child.kill()
            await child.wait()
            await link.close()
            raise TransferError(f"{name}: the sending process did not start")
        return cls(name, link, child, ends.memory)

    async def rate(self, size_mb: int, count: int) -> float:
        """Return bytes a second of `count` messages, a few under way at once."""
        assert self._child.stdin is not None
        buffers = self._buffers.get(size_mb)
        if buffers is None:
            buffers = self._buffers[size_mb] = [self._memory.make(size_mb * MB, 0) for _ in range(PIPELINED)]
        for buffer in buffers:
            self._memory.fill(buffer, 2)  # its pages exist before the clock starts
        first, self._tag = self._tag, self._tag + count + 1
        self._child.stdin.write(f"{first} {size_mb} {count}\n".encode())
        started_s = time.perf_counter()
        await _pipelined(
            [self._link.receive(first + 1 + i, buffers[i % PIPELINED], timeout_s=TIMEOUT_S) for i in range(count)]
        )
        taken_s = time.perf_counter() - started_s
        if any(buffer.min() != 1 or buffer.max() != 1 for buffer in buffers):
            raise TransferError(f"{self.name}: wrong bytes arrived")
        return count * size_mb * MB / taken_s

    async def close(self) -> None:
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            await asyncio.wait_for(self._child.wait(), TIMEOUT_S)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        await self._link.close()


async def run_sender(name: str, receiver: bytes, ends: Ends) -> None:
    """Run the child: a line names the first tag, megabytes and count; the end of stdin is the end."""
    link = open_link(name, ends)
    print(link.address().hex(), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    buffers: dict[int, Any] = {}
    while line := await lines.readline():
        first, size_mb, count = map(int, line.split())
        buffer = buffers.get(size_mb)
        if buffer is None:
            buffer = buffers[size_mb] = ends.memory.make(size_mb * MB, 1)
        await _pipelined([link.send(receiver, first + 1 + i, buffer, timeout_s=TIMEOUT_S) for i in range(count)])
    await link.close()


async def _pipelined(transfers: Sequence[Awaitable[object]]) -> None:
    waiting = iter(transfers)

    async def lane() -> None:
        for transfer in waiting:
            await transfer

    async with asyncio.TaskGroup() as tasks:
        for _ in range(PIPELINED):
            tasks.create_task(lane())


async def _link_rate(pair: LinkPair, total_mb: int, size_mb: int) -> float:
    try:
        return await pair.rate(size_mb, _count(size_mb, total_mb))
    except ExceptionGroup as group:
        raise TransferError(f"{pair.name}: {group.exceptions[0]}") from group


async def _perftest_rate(tool: Path, total_mb: int, size_mb: int) -> float:
    return await asyncio.to_thread(perftest_rate, tool, size_mb, _count(size_mb, total_mb))


def find_perftest() -> Path | None:
    """Find UCX's own tool as the libucx wheel brings it; None where there is none."""
    package = importlib.util.find_spec("libucx")
    tool = Path(package.origin).parent / "bin" / PERFTEST if package is not None and package.origin else None
    return tool if tool is not None and os.access(tool, os.X_OK) else None


def perftest_rate(tool: Path, size_mb: int, count: int) -> float:
    """Return bytes a second by UCX's own measure, tag matching as we use it. Raises `TransferError`."""
    library = tool.parent.parent / "lib"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    port = 20_000 + os.getpid() % 20_000
    command = [str(tool), "-p", str(port), "-t", "tag_bw", "-s", str(size_mb * MB), "-n", str(count), "-w", "2"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(_LISTENING_S)
        shown = subprocess.run(
            [*command, "127.0.0.1"], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise TransferError(f"{PERFTEST} did not end within {TIMEOUT_S:.0f} s") from None
    finally:
        server.kill()
        server.wait()
    rate = perftest_result(shown.stdout) if shown.returncode == 0 else None
    if rate is None:
        last = (shown.stderr or shown.stdout).strip().splitlines()[-1:]
        raise TransferError(f"{PERFTEST} failed: {' '.join(last)}")
    return rate


def perftest_result(shown: str) -> float | None:
    """Return the overall bytes a second in the tool's last line; None where it has none."""
    final = re.search(r"^Final:\s+(.*)$", shown, re.MULTILINE)
    # columns: iterations, three latencies, bandwidth average and overall (MB/s), two message rates
    columns = final.group(1).split() if final is not None else []
    return float(columns[5]) * MB if len(columns) > 5 else None


def _count(size_mb: int, total_mb: int) -> int:
    return max(PIPELINED, total_mb // size_mb)


def open_link(name: str, ends: Ends) -> KvLink:
    kind, _, how = name.partition("-")
    choice = UcxChoice("tcp" if how == "tcp" else "", ends.net_devices)
    match kind:
        case "ucx":
            from cohort.common.transport.ucx_link import UcxLink

            return UcxLink(choice)
        case _:
            from cohort.common.transport.zmq_link import ZmqLink

            keys = load_keys(ends.keys_file) if how == "curve" else None
            return ZmqLink(f"tcp://{ends.host}:0", keys)


_CHILD = "cohort.services.bench.links"
_QUICK_TOTAL_MB = 16
NAMES = {
    "ucx": "UCX link",
    "ucx-tcp": "UCX, TCP",
    "zmq": "ZeroMQ link",
    "zmq-curve": "ZeroMQ, CURVE",
    PERFTEST: PERFTEST,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--links", nargs="+", choices=LINKS, default=LINKS, help="default: all")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="MB", help="message sizes in 2^20 bytes (1 4 16 64)")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"all run in turn (default {ROUNDS})")
    parser.add_argument("--total-mb", type=int, metavar="MB", help=f"moved in one measurement (default {TOTAL_MB})")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs")
    parser.add_argument("--through", default="", metavar="COMMAND", help="runs the other process: 'ip netns exec NAME'")
    parser.add_argument("--host", default="127.0.0.1", help="address at which ZeroMQ listens (default: %(default)s)")
    parser.add_argument("--net-devices", default="", metavar="LIST", help="of UCX, as UCX_NET_DEVICES")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed options; return 1 where no link could be measured. Raises `CohortError`."""
    sizes = args.sizes or (SIZES_MB[:1] if args.quick else SIZES_MB)
    rounds = args.rounds if args.rounds is not None else 1 if args.quick else ROUNDS
    total_mb = args.total_mb if args.total_mb is not None else _QUICK_TOTAL_MB if args.quick else TOTAL_MB
    for option, value in (("--sizes", min(sizes)), ("--rounds", rounds), ("--total-mb", total_mb)):
        if value < 1:
            raise ConfigError(f"{option} must be above 0")
    check_output(args)
    quiet = args.quiet or args.json == "-"
    report_to = shown_on(Console(stderr=True, quiet=quiet))
    wanted = {"through": args.through, "host": args.host, "net_devices": args.net_devices}
    amounts = {"links": args.links, "sizes_mb": sizes, "rounds": rounds, "total_mb": total_mb}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "links.json"
        run_child(_CHILD, [json.dumps({**wanted, "amounts": amounts, "output": str(output)})], report_to)
        report = msgspec.json.decode(output.read_bytes(), type=LinkReport)
    if not quiet:
        print_links(report, output_console())
    publish_json(args.json, msgspec.json.format(encode(report), indent=2) + b"\n")
    return 0 if any(found.name in LINKS for found in report.rates) else 1


def encode(report: LinkReport) -> bytes:
    """Encode as JSON, with medians, ratios and the target, which the report leaves to be derived."""
    document: dict[str, Any] = {"schema_version": 1, "mode": "kv_link", **msgspec.to_builtins(report)}
    for entry, found in zip(document["rates"], report.rates, strict=True):
        entry["median"] = found.median
        entry["over_perftest"] = report.ratio(found.name, PERFTEST, found.size_mb)
    document["targets"] = [{**msgspec.to_builtins(each), "met": each.met} for each in link_targets(report)]
    return msgspec.json.encode(document)


def link_targets(report: LinkReport) -> Iterator[Target]:
    """Yield one target for each size at which both ran."""
    for size_mb in sizes_of(report):
        ratio = report.ratio("ucx", PERFTEST, size_mb)
        if ratio is not None:
            name = f"UCX link / {PERFTEST}, {size_mb} MB"
            yield Target(name=name, wanted=LINK_OVER_PERFTEST, found=ratio, at_most=False)


def sizes_of(report: LinkReport) -> list[int]:
    return sorted({found.size_mb for found in report.rates})


def print_links(report: LinkReport, console: Console) -> None:
    loads = " to ".join(f"{load:.1f}" for load in report.load_1m)
    console.print(
        f"{report.rounds} rounds of {report.total_mb} MB, all in turn; two processes on {report.cores} cores, load "
        f"average {loads}",
        highlight=False,
    )
    console.print(_rates(report))
    every = list(link_targets(report))
    if every:
        console.print(targets(every))
    for name, why in report.missing.items():
        console.print(f"[yellow]note:[/yellow] {NAMES[name]} was not measured: {escape(why)}", soft_wrap=True)


def _rates(report: LinkReport) -> Table:
    """Return a row for each contender, then one for each ratio; a column for each size."""
    names = [name for name in NAMES if any(found.name == name for found in report.rates)]
    sizes = sizes_of(report)
    table = plain_table("GB/s, median (min–max)", *(f"{size_mb} MB" for size_mb in sizes))
    for name in names:
        found = [report.of(name, size_mb) for size_mb in sizes]
        table.add_row(
            NAMES[name],
            *(
                "–"
                if each is None
                else f"{each.median / 1e9:.2f} ({min(each.rates) / 1e9:.2f}–{max(each.rates) / 1e9:.2f})"
                for each in found
            ),
        )
    for name in names:
        if PERFTEST in names and name != PERFTEST:
            ratios = [report.ratio(name, PERFTEST, size_mb) for size_mb in sizes]
            cells = ("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            table.add_row(f"{NAMES[name]} / {PERFTEST}", *cells)
    return table


def _print_progress(done: int, total: int, what: str) -> None:
    sys.stderr.write(f"progress {done} {total} {what}\n")
    sys.stderr.flush()


def main() -> None:
    """Run the other process (`--sender LINK ADDRESS KEYS DEVICES`), or report by the keywords of `_report` in JSON."""
    if sys.argv[1] == "--sender":
        link, address, keys_file, net_devices = sys.argv[2:]
        ends = Ends(keys_file=keys_file, net_devices=net_devices)
        asyncio.run(run_sender(link, bytes.fromhex(address), ends))
        return
    _report(**json.loads(sys.argv[1]))


def _report(amounts: dict[str, Any], output: str, through: str, host: str, net_devices: str) -> None:
    """Measure with `amounts` (links, sizes_mb, rounds, total_mb) and write the report."""
    with tempfile.TemporaryDirectory() as folder:
        generate_keys(Path(folder) / "keys")
        ends = Ends(host, tuple(shlex.split(through)), str(Path(folder) / "keys"), net_devices)
        report = asyncio.run(measure(progress=_print_progress, ends=ends, **amounts))
    Path(output).write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main()
