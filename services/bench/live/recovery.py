"""`cohort bench recovery`: the longest wait for a token that clients see when a worker dies.

    cohort bench recovery --preset disaggregated --victim decode-0 --rounds 10

Starts a pipeline, and in each round some streams; once every stream has tokens, the victim is killed as by kill -9, and
the streams are read to their ends. A round's result is the longest time between two tokens of one stream from then on,
beside the longest one before. The launcher starts the victim again; the next round waits for it. Prints median and
largest over the rounds. A load of other programs on the machine shows in the column before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from cohort.common.errors import ConfigError
from cohort.services.bench.child import MeasurementFailed
from cohort.services.bench.http.load.sse import DONE, EventParser
from cohort.services.bench.live.pipelines import Served, pipeline
from cohort.services.bench.output import check_writable, publish_json
from cohort.services.bench.spread import Spread, spread

_BACK_TIMEOUT_S = 120.0
_STREAM_TIMEOUT_S = 300.0
_TOKENS_BEFORE = 8
"""Of every stream, when the victim dies."""
_POLL_S = 0.02


class Round(msgspec.Struct, frozen=True):
    """Seconds. `gap_s`: the longest between two tokens of one stream after the kill; `usual_s`: before. `back_s`: from
    the kill until the victim serves again, as the cluster's load names it. `early`: streams that went on before."""

    gap_s: float
    usual_s: float
    back_s: float
    streams: int
    early: int


class Recovery(msgspec.Struct, frozen=True):
    """The document behind `--json`."""

    preset: str
    victim: str
    gap_s: Spread
    back_s: Spread
    rounds: list[Round]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--preset", default="disaggregated")
    parser.add_argument("--victim", default="decode-0", help="the worker that is killed")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=4, help="at once")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--port", type=int, default=8200, help="of the pipeline that is started")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.OPTION=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every round and the summary")


def run(args: argparse.Namespace) -> int:
    """Everything from parsed options. Raises `CohortError`."""
    if min(args.rounds, args.streams) < 1 or args.output_len <= 2 * _TOKENS_BEFORE:
        raise ConfigError(f"--rounds and --streams must be above 0, --output-len above {2 * _TOKENS_BEFORE}")
    check_writable(args.json, "--json")
    rounds: list[Round] = []
    with pipeline(args.preset, {}, args.port, args.settings) as served:
        for number in range(args.rounds):
            rounds.append(asyncio.run(_round(args, served, number)))
            told = rounds[-1]
            sys.stderr.write(
                f"round {number + 1}: longest gap {told.gap_s:.3f} s (before the kill {told.usual_s:.3f} s), "
                f"{told.early} of {told.streams} streams went on before it was back after {told.back_s:.2f} s\n"
            )
    found = summarise(args.preset, args.victim, rounds)
    sys.stdout.write(
        f"{args.preset}, kill -9 of {args.victim} under {args.streams} streams: longest gap between two tokens "
        f"{found.gap_s.median:.3f} s (median of {args.rounds} rounds), {found.gap_s.max:.3f} s (largest)\n"
    )
    if args.json:
        publish_json(str(args.json), msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0


def summarise(preset: str, victim: str, rounds: list[Round]) -> Recovery:
    gaps, back = [each.gap_s for each in rounds], [each.back_s for each in rounds]
    return Recovery(preset, victim, spread(gaps), spread(back), rounds)


def round_of(streams: list[list[float]], killed_s: float, back_s: float) -> Round:
    """`streams`: when each one's tokens came. Raises `MeasurementFailed` if none was hit."""
    after: list[float] = []
    before: list[float] = []
    early = hit = 0
    for times in streams:
        gaps = [(later - sooner, later) for sooner, later in pairwise(times)]
        before += [gap for gap, at_s in gaps if at_s <= killed_s]
        late = [(gap, at_s) for gap, at_s in gaps if at_s > killed_s]
        after += [gap for gap, _ in late]
        if late:
            hit += 1
            early += max(late)[1] < back_s
    if not hit:
        raise MeasurementFailed("every stream had ended when the victim was killed; give them more --output-len")
    return Round(max(after), max(before, default=0.0), back_s - killed_s, hit, early)


async def _round(args: argparse.Namespace, served: Served, number: int) -> Round:
    streams: list[list[float]] = [[] for _ in range(args.streams)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_STREAM_TIMEOUT_S)) as session:
        reading = [
            asyncio.create_task(_read(session, served.url, _body(args, number, index), times))
            for index, times in enumerate(streams)
        ]
        while any(len(times) < _TOKENS_BEFORE for times in streams):
            if any(task.done() for task in reading):
                await asyncio.gather(*reading)
                raise MeasurementFailed("a stream ended before all had begun; give them more --output-len")
            await asyncio.sleep(_POLL_S)
        victim = await asyncio.to_thread(_process, served, args.victim)
        os.kill(victim["pid"], signal.SIGKILL)
        killed_s = time.perf_counter()
        back = asyncio.create_task(asyncio.to_thread(_back, served, args.victim, victim["pid"]))
        await asyncio.gather(*reading)
        return round_of(streams, killed_s, await back)


def _body(args: argparse.Namespace, number: int, index: int) -> dict[str, Any]:
    """Prompts that no cache knows: token ids of their own."""
    first = 1000 + (number * args.streams + index) * args.input_len
    return {
        "prompt": [3 + (first + 7 * position) % 40_000 for position in range(args.input_len)],
        "max_tokens": args.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def _read(session: aiohttp.ClientSession, url: str, body: dict[str, Any], times: list[float]) -> None:
    parser = EventParser()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise MeasurementFailed(f"HTTP {response.status}: {(await response.text())[:200]}")
        async for data in response.content.iter_any():
            now_s = time.perf_counter()
            for payload in parser.feed(data):
                if payload and payload != DONE:
                    event = json.loads(payload)
                    if "error" in event:
                        raise MeasurementFailed(f"a stream failed: {event['error']}")
                    if any(choice["text"] or not choice["finish_reason"] for choice in event["choices"]):
                        times.append(now_s)


def _process(served: Served, instance: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{served.monitor_url}/api/state", timeout=10) as answer:
        for process in json.loads(answer.read())["processes"]:
            if process["instance"] == instance:
                found: dict[str, Any] = process
                return found
    raise MeasurementFailed(f"no process is named {instance}")


def _back(served: Served, instance: str, dead: int) -> float:
    """When its next process was ready."""
    deadline_s = time.perf_counter() + _BACK_TIMEOUT_S
    while time.perf_counter() < deadline_s:
        process = _process(served, instance)
        if process["pid"] != dead and process["ready"]:
            return time.perf_counter()
        time.sleep(_POLL_S)
    raise MeasurementFailed(f"{instance} did not come back within {_BACK_TIMEOUT_S:.0f} s")
