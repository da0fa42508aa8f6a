"""The client of a soak that uploads files, runs them as batches, reads their results and deletes all of it.

A batch outlives its gateway, so every call is made again while the gateway is away. Called by `soak`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import aiohttp

from cohort.services.bench.chaos import exchange
from cohort.services.bench.chaos.accounts import Accounts
from cohort.services.bench.chaos.catalogue import Case
from cohort.services.bench.chaos.exchange import Answered, Broken, Ending, Failed, Left, Refused, Told
from cohort.services.bench.chaos.said import Api, Said, whole
from cohort.services.bench.chaos.users import AWAY_S, Place

_LINES = 8
_DEADLINE_S = 240.0
_ENDED = ("completed", "failed", "expired", "cancelled")


class BatchUser:
    def __init__(
        self, place: Place, accounts: Accounts, cases: Sequence[Case], known: dict[str, Said], random: Random
    ) -> None:
        self._place = place
        self._accounts = accounts
        self._cases = [case for case in cases if case.api in (Api.COMPLETIONS, Api.CHAT)]
        self._known = known
        self._random = random

    async def run(self, stopping: asyncio.Event, pause_s: float) -> None:
        """Batch after batch until it is told to stop; then every file that is left is deleted."""
        async with exchange.session(self._place.keys[0], keep_alive=True) as http:
            while not stopping.is_set():
                await self.one(http)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), self._random.uniform(0, 2 * pause_s))
            await self._delete_all(http)

    async def one(self, http: aiohttp.ClientSession) -> None:
        """One batch from its upload to its end; every third is cancelled instead."""
        api = self._random.choice([Api.COMPLETIONS, Api.CHAT])
        cases = self._random.choices([case for case in self._cases if case.api is api], k=_LINES)
        lines = [
            json.dumps({"custom_id": str(place), "method": "POST", "url": str(api), "body": case.body})
            for place, case in enumerate(cases)
        ]
        file = await self._call(http, "upload", "POST", "/v1/files", form="\n".join(lines))
        if file is None:
            return
        asked = {"input_file_id": file["id"], "endpoint": str(api), "completion_window": "1h"}
        batch = await self._call(http, "create", "POST", "/v1/batches", json=asked)
        if batch is None:
            return
        begun_s = self._place.now_s()
        cancelled = self._random.randrange(3) == 0
        if cancelled:
            await asyncio.sleep(self._random.uniform(0, 0.5))
            await self._call(http, "cancel", "POST", f"/v1/batches/{batch['id']}/cancel")
        while batch["status"] not in _ENDED and self._place.now_s() - begun_s < _DEADLINE_S:
            await asyncio.sleep(0.5)
            found = await self._call(http, "look", "GET", f"/v1/batches/{batch['id']}")
            batch = found or batch
        await self._check(http, batch, cases, cancelled, begun_s)
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if batch.get(name):
                await self._call(http, "delete", "DELETE", f"/v1/files/{batch[name]}")

    async def _check(
        self, http: aiohttp.ClientSession, batch: dict[str, Any], cases: Sequence[Case], cancelled: bool, begun_s: float
    ) -> None:
        """Each line is a request of its own."""
        answers: dict[int, Ending] = {}
        if batch.get("output_file_id"):
            path = f"{self._place.url}/v1/files/{batch['output_file_id']}/content"
            for line in (await self._read(http, path)).splitlines():
                entry = json.loads(line)
                try:
                    said = whole(cases[int(entry["custom_id"])].api, entry["response"]["body"])
                    answers[int(entry["custom_id"])] = Answered(said)
                except (KeyError, TypeError) as error:
                    answers[int(entry["custom_id"])] = Failed(f"{error!r} in {line[:300]!r}")
        for place, case in enumerate(cases):
            none: Ending = Left() if cancelled else Failed(f"no result; the batch: {json.dumps(batch)[:1500]}")
            self._book("line", begun_s, answers.get(place, none), self._known[case.name])

    async def _read(self, http: aiohttp.ClientSession, url: str) -> bytes:
        while True:
            begun_s = self._place.now_s()
            ending, data = await exchange.tell(http, "GET", url)
            self._book("content", begun_s, ending, 200)
            if not isinstance(ending, Broken | Refused):
                return data
            if isinstance(ending, Refused) and ending.status not in (429, 503):
                return b""
            await asyncio.sleep(AWAY_S)

    def _book(self, what: str, begun_s: float, ending: Ending, expected: Said | int | None) -> None:
        self._accounts.book(f"batch: {what}", begun_s, self._place.now_s(), ending, expected)

    async def _call(
        self, http: aiohttp.ClientSession, what: str, method: str, path: str, *, form: str = "", **how: Any
    ) -> Any:
        """The JSON of a call, made again while the gateway is away; None where it was refused for good. What is made
        again may have been done: a second upload leaves a file, which the last act deletes; a second deletion meets
        a 404, a second cancellation a 409."""
        begun_s, tries = self._place.now_s(), 0
        while True:
            if form:
                how["data"] = aiohttp.FormData({"purpose": "batch"})
                how["data"].add_field("file", form.encode(), filename="lines.jsonl", content_type="application/jsonl")
            once_s = self._place.now_s()
            ending, _ = await exchange.tell(http, method, self._place.url + path, **how)
            tries += 1
            match ending:
                case Told(_, body):
                    self._book(what, once_s, ending, 200)
                    return body
                case Refused(status) if (status, what, tries > 1) in ((404, "delete", True), (409, "cancel", True)):
                    return None
                case Refused(status) if status == 409 and what == "cancel":  # it had ended
                    self._book(what, once_s, ending, 409)
                    return None
                case Broken() | Refused(429 | 503) if self._place.now_s() - begun_s < _DEADLINE_S:
                    self._book(what, once_s, ending, 200)
                    await asyncio.sleep(AWAY_S)
                case _:
                    self._book(what, once_s, ending, 200)
                    return None

    async def _delete_all(self, http: aiohttp.ClientSession) -> None:
        files = await self._call(http, "list", "GET", "/v1/files")
        for file in (files or {}).get("data", ()):
            await self._call(http, "delete", "DELETE", f"/v1/files/{file['id']}")
