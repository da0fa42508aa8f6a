"""/v1/files and /v1/batches, as OpenAI documents them.

    upload ─▶ chunks to disk ─▶ file row          create batch ─▶ batch row ─▶ runner          content ◀─ disk

Called by aiohttp through `middleware.py`; whoever's API key made a file or a batch sees it, nobody else. Checks what a
client says (`batch_objects.py`) and stores it; what happens to a batch then is `batch_runner.py`'s business.

Differs from OpenAI: only files of purpose `batch` are taken; `completion_window` may be any number of minutes, hours or
days ("30m", "24h", "7d"), not "24h" alone; an input file that batches still read cannot be deleted (409).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
from aiohttp import BodyPartReader, web

from cohort.common.clock import Clock
from cohort.common.config import BatchConfig
from cohort.common.errors import RequestError
from cohort.services.gateway.batch_files import BatchFolder, ContentWriter
from cohort.services.gateway.batch_lines import ENDPOINTS
from cohort.services.gateway.batch_objects import (
    LEAST_EXPIRY_S,
    LONGEST_EXPIRY_S,
    Deleted,
    ExpiresAfter,
    Page,
    batch_object,
    decode_batch,
    file_object,
    window_s,
)
from cohort.services.gateway.batch_runner import BatchRunner
from cohort.services.gateway.batch_store import BatchStore, StoredBatch, StoredFile, StoreThread
from cohort.services.gateway.middleware import OWNER
from cohort.services.gateway.parsing import printable

PURPOSES = ("batch", "batch_output")  # of files that can be here; only the first can be uploaded
CHUNK_BYTES = 1 << 18
WRITE_AT_ONCE_BYTES = 1 << 20
FORM_BYTES = 1 << 16  # of an upload besides its content: boundaries, headers, the other fields
FIELD_BYTES = 1 << 10
LONGEST_NAME = 255
BATCH_BODY_BYTES = 1 << 17

_encode = msgspec.json.Encoder().encode


class BatchApi:
    def __init__(
        self,
        *,
        config: BatchConfig,
        folder: BatchFolder,
        store: StoreThread,
        runner: BatchRunner,
        clock: Clock,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._config = config
        self._folder = folder
        self._store = store
        self._runner = runner
        self._clock = clock
        self._log = log
        self._uploading: dict[str, int] = {}  # bytes that arrived, of uploads that are no files yet

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/files", self.upload),
            web.get("/v1/files", self.list_files),
            web.get("/v1/files/{id}", self.get_file),
            web.delete("/v1/files/{id}", self.delete_file),
            web.get("/v1/files/{id}/content", self.content),
            web.post("/v1/batches", self.create_batch),
            web.get("/v1/batches", self.list_batches),
            web.get("/v1/batches/{id}", self.get_batch),
            web.post("/v1/batches/{id}/cancel", self.cancel_batch),
        ]

    # -- Files -----------------------------------------------------------------------------------------------------

    async def upload(self, request: web.Request) -> web.Response:
        limit = self._config.max_file_bytes
        if (request.content_length or 0) > limit + FORM_BYTES:
            raise _too_large(limit)
        if request.content_type != "multipart/form-data":
            raise RequestError("Send the file as multipart/form-data, with the fields 'purpose' and 'file'.")
        stored = await self._store.run(lambda store: store.stored_bytes())
        file_id = f"file-{secrets.token_hex(12)}"
        try:
            with await asyncio.to_thread(self._folder.write, file_id) as writer:
                fields, filename = await self._read_form(request, writer, file_id, stored)
                retention_s = _upload_fields(fields, filename, int(self._config.retention_s))
                await asyncio.to_thread(writer.keep)
        except TimeoutError as error:
            raise RequestError(
                f"Nothing of the file arrived for {self._config.upload_idle_s:g} s.", status=408
            ) from error
        except ConnectionError:
            raise
        except OSError as error:
            raise RequestError(
                f"The file cannot be stored: {error.strerror}.", status=507, type_="server_error"
            ) from error
        finally:
            self._uploading.pop(file_id, None)
        created_at = int(self._clock.wall_s())
        owner, size = request[OWNER], writer.bytes
        file = await self._store.run(
            lambda store: store.add_file(
                StoredFile(0, file_id, owner, "batch", filename or "", size, created_at, created_at + retention_s)
            )
        )
        self._log.info("file stored", file_id=file_id, bytes=file.bytes)
        return _json(file_object(file))

    async def _read_form(
        self, request: web.Request, writer: ContentWriter, file_id: str, stored: int
    ) -> tuple[dict[str, str], str | None]:
        """Fields by name, and the file's name; its content goes to `writer`."""
        fields: dict[str, str] = {}
        filename: str | None = None
        try:
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader) or part.name is None:
                    raise RequestError("The form has a part that is no named field.")
                if part.name != "file":
                    fields[part.name] = await self._field(part)
                elif filename is not None:
                    raise RequestError("file: one file at a time.", param="file")
                else:
                    filename = printable(part.filename or "upload", LONGEST_NAME)
                    await self._receive(part, writer, file_id, stored)
        except (ValueError, web.RequestPayloadError) as error:
            raise RequestError(f"The form cannot be read: {printable(str(error))}") from error
        return fields, filename

    async def _field(self, part: BodyPartReader) -> str:
        async with asyncio.timeout(self._config.upload_idle_s):
            data = await part.read_chunk(FIELD_BYTES + 1)
            more = await part.read_chunk(FIELD_BYTES) if data else b""
        if len(data) + len(more) > FIELD_BYTES:
            raise RequestError(f"{printable(part.name or '')}: the value is too long.", param=part.name)
        return (data + more).decode("utf-8").strip()

    async def _receive(self, part: BodyPartReader, writer: ContentWriter, file_id: str, stored: int) -> None:
        waiting: list[bytes] = []
        waiting_bytes = total = 0
        while True:
            async with asyncio.timeout(self._config.upload_idle_s):
                chunk = await part.read_chunk(CHUNK_BYTES)
            waiting.append(chunk)
            waiting_bytes += len(chunk)
            total += len(chunk)
            self._uploading[file_id] = total
            if total > self._config.max_file_bytes:
                raise _too_large(self._config.max_file_bytes)
            if stored + sum(self._uploading.values()) > self._config.storage_bytes:
                raise RequestError(
                    f"Files here may have {self._config.storage_bytes} bytes together; delete some first.", status=413
                )
            if waiting_bytes >= WRITE_AT_ONCE_BYTES or not chunk:
                await asyncio.to_thread(writer.write, b"".join(waiting))
                waiting, waiting_bytes = [], 0
            if not chunk:
                return

    async def list_files(self, request: web.Request) -> web.Response:
        query = _query(request, "purpose", "limit", "order", "after")
        limit = _limit(query, default=10_000, most=10_000)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be 'asc' or 'desc'.", param="order")
        owner, now_s = request[OWNER], self._clock.wall_s()
        files = await self._store.run(
            lambda store: store.files(
                owner,
                now_s,
                purpose=query.get("purpose"),
                after=query.get("after"),
                limit=limit + 1,
                newest_first=order == "desc",
            )
        )
        return _page([file_object(file) for file in files], limit)

    async def get_file(self, request: web.Request) -> web.Response:
        return _json(file_object(await self._file(request)))

    async def delete_file(self, request: web.Request) -> web.Response:
        file = await self._file(request)

        def delete(store: BatchStore) -> bool:
            in_use = store.file_in_use(file.id)
            if not in_use:
                store.delete_file(file.id)
            return not in_use

        if not await self._store.run(delete):
            raise RequestError(f"{file.id} is the input of a batch that has not ended; cancel that first.", status=409)
        await asyncio.to_thread(self._folder.remove, [file.id])
        self._log.info("file deleted", file_id=file.id)
        return _json(Deleted(file.id))

    async def content(self, request: web.Request) -> web.StreamResponse:
        file = await self._file(request)
        path = self._folder.content(file.id)
        if not await asyncio.to_thread(Path.is_file, path):
            raise _unknown("file", file.id)
        # Read and sent a piece at a time by aiohttp, off the loop.
        return web.FileResponse(
            path,
            headers={
                "Content-Type": "application/jsonl",
                "Content-Disposition": f'attachment; filename="{_header_safe(file.filename)}"',
            },
        )

    async def _file(self, request: web.Request) -> StoredFile:
        file_id, owner, now_s = request.match_info["id"], request[OWNER], self._clock.wall_s()
        file = await self._store.run(lambda store: store.file(_known_id(file_id), owner, now_s))
        if file is None:
            raise _unknown("file", file_id)
        return file

    # -- Batches ---------------------------------------------------------------------------------------------------

    async def create_batch(self, request: web.Request) -> web.Response:
        body = decode_batch(await _small_body(request))
        if body.endpoint not in ENDPOINTS:
            raise RequestError(
                f"endpoint: {printable(body.endpoint)!r} cannot be used in a batch, only {' and '.join(ENDPOINTS)}.",
                param="endpoint",
            )
        expires_in_s = window_s(body.completion_window)
        owner, now_s = request[OWNER], self._clock.wall_s()
        expiry = body.output_expires_after
        batch = StoredBatch(
            seq=0,
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            status="validating",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=int(now_s),
            expires_at=int(now_s) + expires_in_s,
            output_retention_s=int(self._config.retention_s) if expiry is None else expiry.seconds,
            metadata=body.metadata,
        )

        def create(store: BatchStore) -> StoredBatch:
            file = store.file(_known_id(body.input_file_id), owner, now_s)
            if file is None or file.purpose != "batch":
                raise RequestError(
                    f"input_file_id: there is no file {printable(body.input_file_id)!r} of purpose 'batch'.",
                    param="input_file_id",
                )
            if len(store.unfinished()) >= self._config.max_unfinished:
                raise RequestError(
                    f"{self._config.max_unfinished} batches have not ended yet; retry when one has.",
                    status=429,
                    type_="rate_limit_error",
                    retry_after_s=60.0,
                )
            return store.add_batch(batch)

        stored = await self._store.run(create)
        self._runner.submit(stored.id)
        self._log.info(
            "batch created", batch_id=stored.id, input_file_id=stored.input_file_id, endpoint=stored.endpoint
        )
        return _json(batch_object(stored))

    async def list_batches(self, request: web.Request) -> web.Response:
        query = _query(request, "limit", "after")
        limit = _limit(query, default=20, most=100)
        owner = request[OWNER]
        batches = await self._store.run(lambda store: store.batches(owner, after=query.get("after"), limit=limit + 1))
        return _page([batch_object(batch) for batch in batches], limit)

    async def get_batch(self, request: web.Request) -> web.Response:
        return _json(batch_object(await self._batch(request)))

    async def cancel_batch(self, request: web.Request) -> web.Response:
        batch = await self._batch(request)
        now_s = self._clock.wall_s()
        if await self._store.run(lambda store: store.cancel(batch.id, now_s)):
            self._runner.cancel(batch.id)
            self._log.info("batch cancelled", batch_id=batch.id)
        batch = await self._batch(request)
        if batch.status not in ("cancelling", "cancelled"):
            raise RequestError(f"A batch whose status is '{batch.status}' cannot be cancelled.", status=409)
        return _json(batch_object(batch))

    async def _batch(self, request: web.Request) -> StoredBatch:
        batch_id, owner = request.match_info["id"], request[OWNER]
        batch = await self._store.run(lambda store: store.batch(_known_id(batch_id), owner))
        if batch is None:
            raise _unknown("batch", batch_id)
        return batch


def _upload_fields(fields: Mapping[str, str], filename: str | None, retention_s: int) -> int:
    """Checks an upload's form; seconds until the file expires."""
    known = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
    if unknown := next((name for name in fields if name not in known), None):
        raise RequestError(f"The form has an unknown field {printable(unknown)!r}.", param=printable(unknown))
    if filename is None:
        raise RequestError("file is missing.", param="file")
    purpose = fields.get("purpose")
    if purpose != "batch":
        raise RequestError(
            "purpose is missing."
            if purpose is None
            else f"purpose: files of purpose {printable(purpose)!r} are of no use here, only 'batch'.",
            param="purpose",
        )
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return retention_s
    try:
        return msgspec.convert({"anchor": anchor, "seconds": seconds and int(seconds)}, ExpiresAfter).seconds
    except ValueError as error:  # msgspec's own included
        raise RequestError(
            f"expires_after: anchor must be 'created_at', seconds {LEAST_EXPIRY_S} to {LONGEST_EXPIRY_S}.",
            param="expires_after",
        ) from error


async def _small_body(request: web.Request) -> bytes:
    if (request.content_length or 0) > BATCH_BODY_BYTES:
        raise RequestError(f"The body is larger than {BATCH_BODY_BYTES} bytes.", status=413)
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise RequestError(f"The body cannot be read: {error}") from error


def _query(request: web.Request, *known: str) -> dict[str, str]:
    query = dict(request.query)
    if unknown := next((name for name in query if name not in known), None):
        raise RequestError(f"There is no parameter {printable(unknown)!r}.", param=printable(unknown))
    if "after" in query:
        query["after"] = _known_id(query["after"])
    return query


def _limit(query: Mapping[str, str], *, default: int, most: int) -> int:
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
    if not 1 <= limit <= most:
        raise RequestError(f"limit must be a number from 1 to {most}.", param="limit")
    return limit


def _known_id(text: str) -> str:
    """An id as it may be looked up: half characters, which a URL can carry, are in no id."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _page(found: list[Any], limit: int) -> web.Response:
    """`found` has one more than `limit` when there are more."""
    data = found[:limit]
    return _json(Page(data, data[0].id if data else None, data[-1].id if data else None, has_more=len(found) > limit))


def _header_safe(name: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\/' else "_" for c in name)


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")


def _unknown(what: str, given: str) -> RequestError:
    return RequestError(f"There is no {what} {printable(given)!r}.", status=404, param="id")


def _too_large(limit: int) -> RequestError:
    return RequestError(f"The file is larger than {limit} bytes.", status=413, param="file")
