"""/v1/files and /v1/batches, as OpenAI documents them.

    upload ─▶ chunks to disk ─▶ file row          create batch ─▶ batch row ─▶ runner          content ◀─ disk

Called by aiohttp through `middleware.py`. Checks (`batch_objects.py`) and stores; `batch_runner.py` runs batches. Files
and batches are visible to the API key that made them alone.

Differs from OpenAI: only files of purpose `batch` are taken; `completion_window` may be any number of minutes, hours or
days ("30m", "24h", "7d"), not "24h" alone; an input file that batches still read cannot be deleted (409).
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.common.sqlite_file import disk_refuses
from cohort.services.gateway import bounds
from cohort.services.gateway.batches.batch_downloads import send_content
from cohort.services.gateway.batches.batch_files import ContentWriter
from cohort.services.gateway.batches.batch_lines import ENDPOINTS
from cohort.services.gateway.batches.batch_objects import (
    Deleted,
    Page,
    batch_decoder,
    batch_object,
    file_object,
    window_s,
)
from cohort.services.gateway.batches.batch_records import StoredBatch, StoredFile
from cohort.services.gateway.batches.batch_runner import BatchContext, BatchRunner
from cohort.services.gateway.batches.batch_store import BatchStore
from cohort.services.gateway.batches.batch_uploads import FORM_BYTES, UploadForm, too_large
from cohort.services.gateway.http.listing import known_id, limit_of, query_of
from cohort.services.gateway.http.service_headers import printable
from cohort.services.gateway.keys.middleware import HTTP_ID, OWNER, REQUEST_ID_HEADER
from cohort.services.gateway.requests.parsing import decode

PURPOSES = ("batch", "batch_output")  # of files that can be here; only the first can be uploaded
BATCH_BODY_BYTES = 1 << 17

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_encode = msgspec.json.Encoder().encode


class BatchApi:
    def __init__(self, context: BatchContext, runner: BatchRunner, config: GatewayConfig) -> None:
        self._retention_s = context.retention_s
        self._folder, self._store, self._quota = context.folder, context.store, context.quota
        self._runner = runner
        self._config = config
        self._clock, self._log = context.clock, context.log

    def routes(self) -> list[web.RouteDef]:
        guarded = self._guarded
        return [
            web.post("/v1/files", guarded(self.upload)),
            web.get("/v1/files", guarded(self.list_files)),
            web.get("/v1/files/{id}", guarded(self.get_file)),
            web.delete("/v1/files/{id}", guarded(self.delete_file)),
            web.get("/v1/files/{id}/content", guarded(self.content)),
            web.post("/v1/batches", guarded(self.create_batch)),
            web.get("/v1/batches", guarded(self.list_batches)),
            web.get("/v1/batches/{id}", guarded(self.get_batch)),
            web.post("/v1/batches/{id}/cancel", guarded(self.cancel_batch)),
        ]

    def _guarded(self, handler: Handler) -> Handler:
        """Wrap a handler: a database that the disk refuses, or that is damaged, becomes an answer and no defect."""

        @functools.wraps(handler)
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except sqlite3.Error as error:
                if not disk_refuses(error):
                    raise
                self._log.error("the batch database cannot be used", path=request.path, reason=str(error))
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                    raise RequestError("The server's disk is full.", status=507, type_="server_error") from error
                raise RequestError(
                    "Files and batches cannot be reached now.", status=503, type_="server_error", retry_after_s=60.0
                ) from error

        return answer

    async def upload(self, request: web.Request) -> web.Response:
        limit = bounds.BOUNDS.file_bytes
        if (request.content_length or 0) > limit + FORM_BYTES:
            raise too_large(limit)
        if request.content_type != "multipart/form-data":
            raise RequestError("Send the file as multipart/form-data, with the fields 'purpose' and 'file'.")
        file_id, owner = f"file-{secrets.token_hex(12)}", request[OWNER]
        announced = max(0, (request.content_length or 0) - FORM_BYTES)
        await self._store.run(lambda store: self._quota.begin_upload(store, file_id, owner, announced))
        try:
            async with asyncio.timeout(bounds.BOUNDS.upload_whole_s):
                file = await self._receive(request, file_id, owner)
        except TimeoutError as error:
            raise RequestError(f"The upload took more than {bounds.BOUNDS.upload_whole_s:g} s.", status=408) from error
        except ConnectionError:
            raise
        except OSError as error:
            raise RequestError(
                f"The file cannot be stored: {error.strerror}.", status=507, type_="server_error"
            ) from error
        finally:
            self._store.run_detached(lambda store: store.release(file_id))
        self._log.info("file stored", file_id=file_id, bytes=file.bytes)
        return _json(file_object(file))

    async def _receive(self, request: web.Request, file_id: str, owner: str) -> StoredFile:
        form = UploadForm(request, self._retention_s)
        with await asyncio.to_thread(self._folder.write, file_id) as writer:
            await form.read(functools.partial(self._keep, writer, file_id, owner))
            retention_s = form.retention_s()
            await asyncio.to_thread(writer.commit)
        created_at = int(self._clock.wall_s())
        file = StoredFile(
            0, file_id, owner, "batch", form.filename or "", writer.bytes, created_at, created_at + retention_s
        )
        try:
            return await self._store.run(lambda store: store.add_file(file))
        except sqlite3.Error:
            await asyncio.to_thread(self._folder.remove, [file_id])
            raise

    async def _keep(self, writer: ContentWriter, file_id: str, owner: str, data: bytes, total: int) -> None:
        """Reserve capacity, then write: concurrent uploads count what the others have taken."""
        await self._store.run(lambda store: self._quota.grow_upload(store, file_id, owner, total))
        await asyncio.to_thread(writer.write, data)

    async def list_files(self, request: web.Request) -> web.Response:
        query = query_of(request, "purpose", "limit", "order", "after")
        limit = limit_of(query, default=10_000, most=10_000)
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
        try:
            content, size = await asyncio.to_thread(self._folder.read, file.id)
        except FileNotFoundError as error:
            raise _unknown("file", file.id) from error
        return await send_content(
            request,
            content,
            size,
            {
                REQUEST_ID_HEADER: request[HTTP_ID],
                "Content-Type": "application/jsonl",
                "Content-Disposition": f'attachment; filename="{_header_safe(file.filename)}"',
            },
            write_timeout_s=self._config.write_timeout_s,
            log=self._log,
        )

    async def _file(self, request: web.Request) -> StoredFile:
        file_id, owner, now_s = request.match_info["id"], request[OWNER], self._clock.wall_s()
        file = await self._store.run(lambda store: store.file(known_id(file_id), owner, now_s))
        if file is None:
            raise _unknown("file", file_id)
        return file

    async def create_batch(self, request: web.Request) -> web.Response:
        body = decode(batch_decoder, await self._small_body(request), self._config)
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
            output_retention_s=int(self._retention_s) if expiry is None else expiry.seconds,
            metadata=body.metadata,
        )

        def create(store: BatchStore) -> StoredBatch:
            file = store.file(known_id(body.input_file_id), owner, now_s)
            if file is None or file.purpose != "batch":
                raise RequestError(
                    f"input_file_id: there is no file {printable(body.input_file_id)!r} of purpose 'batch'.",
                    param="input_file_id",
                )
            self._quota.begin_batch(store, owner)
            added = store.add_batch(batch)
            store.forget_oldest(owner, bounds.BOUNDS.batches)
            return added

        stored = await self._store.run(create)
        self._runner.submit(stored.id)
        self._log.info(
            "batch created", batch_id=stored.id, input_file_id=stored.input_file_id, endpoint=stored.endpoint
        )
        return _json(batch_object(stored))

    async def list_batches(self, request: web.Request) -> web.Response:
        query = query_of(request, "limit", "after")
        limit = limit_of(query, default=20, most=100)
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

    async def _small_body(self, request: web.Request) -> bytes:
        """Read a body, bounded as it arrives, after decompression, within `upload_idle_s`."""
        data = bytearray()
        try:
            async with asyncio.timeout(bounds.BOUNDS.upload_idle_s):
                while chunk := await request.content.readany():
                    data += chunk
                    if len(data) > BATCH_BODY_BYTES:
                        raise RequestError(f"The body is larger than {BATCH_BODY_BYTES} bytes.", status=413)
        except TimeoutError as error:
            raise RequestError(f"The body took more than {bounds.BOUNDS.upload_idle_s:g} s.", status=408) from error
        except web.RequestPayloadError as error:
            raise RequestError(f"The body cannot be read: {error}") from error
        return bytes(data)

    async def _batch(self, request: web.Request) -> StoredBatch:
        batch_id, owner = request.match_info["id"], request[OWNER]
        batch = await self._store.run(lambda store: store.batch(known_id(batch_id), owner))
        if batch is None:
            raise _unknown("batch", batch_id)
        return batch


def _page(found: list[Any], limit: int) -> web.Response:
    """Return a page; `found` has one more than `limit` when there are more."""
    data = found[:limit]
    return _json(Page(data, data[0].id if data else None, data[-1].id if data else None, has_more=len(found) > limit))


def _header_safe(name: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\/' else "_" for c in name)


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")


def _unknown(what: str, given: str) -> RequestError:
    return RequestError(f"There is no {what} {printable(given)!r}.", status=404, param="id")
