"""`cohort bench neighbours`: a polite client beside the heaviest legal requests, as ratios to a run without them.

Each attack is repeated for as long as the polite client has answers to come; of its figures the longest count. What a
request may be at most stands in docs/security.md; `heaviest` has a request at each of these bounds, for tests too.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
import msgspec

from cohort.common.config import GatewayConfig
from cohort.services.bench.child import MeasurementFailed
from cohort.services.bench.http.load.client import HttpStreamClient, PreparedRequest, RequestRecord, now_s
from cohort.services.bench.http.load.target import Target, discover
from cohort.services.bench.http.load.workload import RequestPlan
from cohort.services.bench.output import add_output_arguments, check_output, output_console, plain_table, publish_json

COMPLETIONS = "/v1/completions"
CHOICES = 128
_SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(300)}}
_PROMPT_TOKENS, _OUTPUT_TOKENS = 12, 24
_FIRST_ID, _IDS = 100, 200
"""Token ids that every vocabulary has."""
_LEAD_S = 0.5
"""Time from an attack's begin to the polite client's first request."""
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Heavy:
    """`at_once` clients that send `body` to `path` again and again."""

    path: str
    body: dict[str, Any]
    at_once: int = 1


def ids(random: Random, count: int) -> list[int]:
    return [_FIRST_ID + random.randrange(_IDS) for _ in range(count)]


def heaviest(context: int, random: Random) -> dict[str, Heavy]:
    """Return requests at the bounds of what one may have under default options, by what they have most of."""
    work = GatewayConfig().max_request_work
    answer = min(context - 16, work // CHOICES - 512)
    long = ids(random, context - 8)
    many = {"prompt": ids(random, 3), "n": CHOICES, "max_tokens": answer, "ignore_eos": True}
    return {
        "choices": Heavy(COMPLETIONS, many),
        "prompts": Heavy(COMPLETIONS, {"prompt": long, "max_tokens": 8}, at_once=4),
        "scores": Heavy(COMPLETIONS, {"prompt": long, "max_tokens": 1, "echo": True, "logprobs": 20}),
        "masks": Heavy(COMPLETIONS, {**many, "max_tokens": answer // 2, "ignore_eos": False, "guided_json": _SCHEMA}),
        "texts": Heavy("/tokenize", {"prompt": "sea " * 3 * context, "return_token_strs": True}, at_once=8),
    }


@dataclass(slots=True)
class Beside:
    """The polite client's longest figures, seconds, and what the heavy requests were answered."""

    first_s: float
    gap_s: float
    whole_s: float
    answers: dict[str, int] = field(default_factory=dict)


class Neighbours:
    def __init__(self, session: aiohttp.ClientSession, target: Target, requests: int, headers: dict[str, str]) -> None:
        self._session = session
        self._target = target
        self._requests = requests
        self._headers = {**headers, "Content-Type": "application/json"}
        self._random = Random()  # no prefix cache of an earlier run knows its prompts

    async def run(self, name: str) -> Beside:
        """Measure beside the attack `name`, or beside none. Raises `MeasurementFailed`."""
        heavy = heaviest(self._target.max_model_len or 2048, self._random).get(name)
        answers = Counter[str]()
        attacks = list[asyncio.Task[None]]()
        if heavy is not None:
            attacks += [asyncio.create_task(self._attack(heavy, answers)) for _ in range(heavy.at_once)]
        try:
            await asyncio.sleep(_LEAD_S if heavy else 0.0)
            records = [await self._ask_politely() for _ in range(self._requests)]
        finally:
            for attack in attacks:
                attack.cancel()
            await asyncio.gather(*attacks, return_exceptions=True)
        first_s = max(record.ttft_s or 0.0 for record in records)
        gap_s = max(max(record.itl_s, default=0.0) for record in records)
        return Beside(first_s, gap_s, max(record.e2e_s for record in records), dict(answers))

    async def _attack(self, heavy: Heavy, answers: Counter[str]) -> None:
        body = {**heavy.body, "model": self._target.model}
        while True:
            if isinstance(prompt := body["prompt"], list):
                body["prompt"] = ids(self._random, len(prompt))  # nothing of it is cached
            with suppress(aiohttp.ClientError):
                url = self._target.base_url + heavy.path
                async with self._session.post(url, json=body, headers=self._headers) as response:
                    answers[str(response.status)] += 1
                    await response.read()
                    if response.status >= 400:
                        await asyncio.sleep(float(response.headers.get("Retry-After", 1)))

    async def _ask_politely(self) -> RequestRecord:
        plan = RequestPlan(index=0, due_s=None, prompt_tokens=_PROMPT_TOKENS, output_tokens=_OUTPUT_TOKENS)
        body = {"model": self._target.model, "prompt": ids(self._random, _PROMPT_TOKENS), "stream": True}
        body |= {"max_tokens": _OUTPUT_TOKENS, "ignore_eos": True}
        client = HttpStreamClient(self._session, self._target.base_url + COMPLETIONS, _TIMEOUT_S)
        record = RequestRecord(plan)
        await client.stream(PreparedRequest(plan, msgspec.json.encode(body), self._headers), record, now_s())
        if record.status != "completed":
            raise MeasurementFailed(f"the polite client's request failed: {record.error_kind} {record.error_detail}")
        return record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    names = list(heaviest(2048, Random(0)))
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="base URL (default %(default)s)")
    parser.add_argument("--model", help="model id; needed only where a server has several")
    parser.add_argument("--api-key", help="bearer key")
    parser.add_argument("--beside", nargs="+", default=names, choices=names, help="default: each, one after the other")
    parser.add_argument("--requests", type=int, default=20, metavar="N", help="of the polite client (default 20)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed options. Raises `CohortError`."""
    check_output(args)
    found = asyncio.run(measure(args))
    publish_json(args.json, msgspec.json.encode(found))
    if not args.quiet and args.json != "-":
        alone = found["nothing"]
        table = plain_table("beside", "first, s", "ratio", "gap, s", "ratio", "all, s", "ratio", "answers")
        for name, each in found.items():
            pairs = ((each.first_s, alone.first_s), (each.gap_s, alone.gap_s), (each.whole_s, alone.whole_s))
            cells = [cell for value, before in pairs for cell in (f"{value:.2f}", f"{value / max(before, 1e-9):.1f}")]
            table.add_row(name, *cells, " ".join(f"{count} x {status}" for status, count in each.answers.items()))
        output_console().print(table)
    return 0


async def measure(args: argparse.Namespace) -> dict[str, Beside]:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        target = await discover(session, "server", args.url, args.model, 10.0, api_key=args.api_key)
        neighbours = Neighbours(session, target, args.requests, headers)
        return {name: await neighbours.run(name) for name in ("nothing", *args.beside)}
