"""`scripts/opponents measure`: starts every server, measures them in turn, prints one table and writes JSON.

Loads are those of `cohort bench`: its client sends the bodies that are made here, and its report counts the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zlib import crc32

import aiohttp
import msgspec

from cohort.common.paths import default_model_dir
from cohort.common.process.other_programs import OtherPrograms
from cohort.common.workloads.arrivals import ClosedLoop
from cohort.services.bench.http.load.client import Driver, HttpStreamClient, PreparedRequest, RunLog
from cohort.services.bench.http.load.workload import RequestPlan
from cohort.services.bench.http.results.report import SloLimits, run_duration_s, slice_figures
from cohort.services.bench.output import publish_json
from tests.benchmarks.figures import Measurement, table
from tests.benchmarks.servers import ROOT, Running, Server, ServerFailed, all_servers, started

SHORT_TOKENS, TOKEN_CHARACTERS = 50, 5  # of a question with its system's message; of a token, about
QUESTIONS = tuple(Path(__file__).with_name("questions.txt").read_text(encoding="utf-8").splitlines())
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SAMPLING: dict[str, dict[str, float]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.7, "top_p": 0.9}}
LEAST_REQUESTS = 8
REQUEST_TIMEOUT_S = 300.0
AWAKE_S = 90.0
"""Longest wait until a server answers after it was held still."""
WARM_UP_TOKENS = 16
PAUSE_S = 1.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/opponents measure",
        description="Measure Cohort beside the opponents in FOLDER. `scripts/opponents --help` has the rules.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of `scripts/opponents make`")
    parser.add_argument("--opponents", nargs="+", metavar="NAME", help="only these (default: all in FOLDER)")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N", help="default: 1 4 16 64")
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLING), default=list(SAMPLING), help="default: both")
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="default: %(default)s")
    parser.add_argument(
        "--requests-per-user", type=int, default=2, metavar="N", help=f"default: %(default)s; {LEAST_REQUESTS} in all"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=0, metavar="N", help="about so many, by other questions before the own one"
    )
    parser.add_argument("--output-tokens", type=int, default=96, metavar="N", help="at most (default: %(default)s)")
    parser.add_argument("--ignore-eos", action="store_true", help="exactly so many, also beyond an answer's end")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of an opponent")
    parser.add_argument("--port", type=int, default=9100, help="first of the hundred ports used (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=default_model_dir(), help="the one the opponents were made for")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: FOLDER/result.json")
    return parser.parse_args()


def bodies(
    model: str, sampling: str, count: int, output_tokens: int, ignore_eos: bool, key: str, prompt_tokens: int = 0
) -> list[bytes]:
    """Return `count` requests: questions from a place of the list that `key` decides. Each has a number of its own in
    the system's message, so that no server has its prompt in a cache; before the question it would change the answer.
    """
    first = crc32(key.encode())
    before = " ".join(QUESTIONS * (1 + prompt_tokens // 200))[: max(0, prompt_tokens - SHORT_TOKENS) * TOKEN_CHARACTERS]
    return [
        msgspec.json.encode(
            {
                "model": model,
                "messages": [
                    {"role": "system", "content": f"Chat {(first + 7919 * index) % 1_000_000}. {SYSTEM}"},
                    {"role": "user", "content": f"{before} {question}" if before else question},
                ],
                "max_tokens": output_tokens,
                "ignore_eos": ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True},
                **SAMPLING[sampling],
            }
        )
        for index, question in ((index, QUESTIONS[(first + index) % len(QUESTIONS)]) for index in range(count))
    ]


async def send(server: Server, requests: Sequence[bytes], users: int, output_tokens: int) -> RunLog:
    """Send all in a closed loop, each over a connection of its own: some servers close theirs unsaid."""
    prepared = [
        PreparedRequest(RequestPlan(index, None, 0, output_tokens), body, {"Content-Type": "application/json"})
        for index, body in enumerate(requests)
    ]
    connector, no_limit = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=no_limit) as session:
        client = HttpStreamClient(session, f"{server.url}/v1/chat/completions", REQUEST_TIMEOUT_S)
        return await Driver(client, prepared, ClosedLoop(users)).run()


async def measure(
    running: Running, sampling: str, users: int, number: int, attempt: int, args: argparse.Namespace
) -> Measurement:
    """Wake the server, warm it up, load it, hold it still again."""
    server, key = running.server, f"{number} {sampling} {users} {attempt}"
    running.send(signal.SIGCONT)
    try:
        await _awake(running, bodies(running.model, sampling, min(users, 4), WARM_UP_TOKENS, True, f"warm {key}"))
        requests = bodies(
            running.model,
            sampling,
            max(LEAST_REQUESTS, users * args.requests_per_user),
            args.output_tokens,
            args.ignore_eos,
            key,
            args.prompt_tokens,
        )
        others = OtherPrograms(os.getpid())
        others.share()
        log = await send(server, requests, users, args.output_tokens)
        foreign = others.share()
        running.check()
    finally:
        running.send(signal.SIGSTOP)
    duration_s = run_duration_s(log.records)
    least = args.output_tokens if args.ignore_eos else 1
    overall = slice_figures(log.records, duration_s, SloLimits())
    return Measurement(
        round=number,
        sampling=sampling,
        users=users,
        server=server.name,
        attempt=attempt,
        output_tokens_per_s=overall.output_tokens_per_s,
        ttft_p50_ms=overall.ttft_ms.p50 if overall.ttft_ms else None,
        tpot_p50_ms=overall.tpot_ms.p50 if overall.tpot_ms else None,
        sent=len(requests),
        whole=sum(r.status == "completed" and least <= r.output_tokens <= args.output_tokens for r in log.records),
        duration_s=duration_s,
        foreign=foreign or 0.0,
    )


async def _awake(running: Running, requests: list[bytes]) -> None:
    deadline_s = time.monotonic() + AWAKE_S
    while time.monotonic() < deadline_s:
        log = await send(running.server, requests, len(requests), WARM_UP_TOKENS)
        if all(record.status == "completed" for record in log.records):
            await asyncio.sleep(PAUSE_S)
            return
        running.check()
        await asyncio.sleep(PAUSE_S)
    failures = {record.error_detail for record in log.records if record.error_detail}
    raise ServerFailed(f"{running.server.name} does not answer: {'; '.join(sorted(failures))}")


def measure_all(running: Sequence[Running], args: argparse.Namespace, publish: Any) -> None:
    """Measure in every round each load on all servers in turn; every other round goes backwards."""
    loads = [(kind, users) for kind in args.sampling for users in args.users]
    total, done, began_s, found = args.rounds * len(loads) * len(running), 0, time.monotonic(), []
    for number in range(1, args.rounds + 1):
        for sampling, users in loads:
            for each in running[:: 1 if number % 2 else -1]:
                name, attempt, again = each.server.name, 0, True
                while again:
                    attempt += 1
                    one = asyncio.run(measure(each, sampling, users, number, attempt, args))
                    found.append(one)
                    again = one.repeat
                    say(
                        f"{sampling}, {users} users, {name}: {one.output_tokens_per_s:.0f} tokens/s, foreign load "
                        f"{one.foreign:.1%}{'' if one.verdict == 'keep' else ' -- ' + one.verdict}"
                    )
                done += 1
                left_s = (time.monotonic() - began_s) / done * (total - done)
                say(f"{done} of {total}, round {number}; about {left_s / 60:.0f} min left")
                publish(found)


def facts(servers: Sequence[Server], args: argparse.Namespace) -> dict[str, Any]:
    """Return what a reader must know of the machine, the versions and the settings."""
    described = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in described if line.startswith("model name")]
    commit = subprocess.run(
        ("git", "-C", str(ROOT), "describe", "--always", "--dirty"), capture_output=True, text=True, check=False
    )
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": names[0] if names else platform.machine(), "processors": os.cpu_count()}
        | {"memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "kernel": platform.release()},
        "commit": commit.stdout.strip(),
        "versions": {server.name: server.version() for server in servers},
        "commands": {server.name: [*server.command] for server in servers},
        "environment": {server.name: dict(server.environment) for server in servers if server.environment},
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "sampling": SAMPLING,
    }


def say(text: str) -> None:
    print(f"[opponents] {text}", file=sys.stderr, flush=True)


def main() -> int:
    args = arguments()
    servers = all_servers(args.folder.resolve(), args.model.resolve(), args.port, args.threads, args.prompt_tokens)
    known = [server.name for server in servers[2:]]
    if unknown := set(args.opponents or ()) - set(known):
        say(f"error: not in {args.folder}: {', '.join(sorted(unknown))}; there are {', '.join(known) or 'none'}")
        return 2
    servers = [*servers[:2], *(each for each in servers[2:] if each.name in (args.opponents or known))]
    try:
        result, target = facts(servers, args), str(args.json or args.folder / "result.json")
    except ServerFailed as error:
        say(f"error: {error}")
        return 1

    def publish(found: list[Measurement]) -> None:
        rows = [{**msgspec.structs.asdict(each), "verdict": each.verdict} for each in found]
        text = table(found, [server.name for server in servers])
        document = {**result, "table": text.splitlines(), "measurements": rows}
        publish_json(target, json.dumps(document, indent=1).encode())

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with ExitStack() as stack:
            running: list[Running] = []
            for server in servers:
                say(f"starting {server.name}")
                running.append(stack.enter_context(started(server, args.folder / f"{server.name}.log")))
            measure_all(running, args, publish)
    except ServerFailed as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        if Path(target).is_file():
            print("\n".join(json.loads(Path(target).read_text())["table"]))
            say(f"written: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
