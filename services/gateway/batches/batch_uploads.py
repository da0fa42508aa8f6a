"""The form of an upload, read as it arrives: which parts it may have, how large they may be, and how slow.

    socket ─▶ UploadStream (deadline, bytes beside the content) ─▶ aiohttp's form reader ─▶ UploadForm ─▶ disk

Called by `batch_api.py`, which decides where the content goes and whether there is capacity. A part is refused as soon
as its name is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
from aiohttp import BodyPartReader, MultipartReader, StreamReader, web

from cohort.common.errors import RequestError
from cohort.services.gateway import bounds
from cohort.services.gateway.batches.batch_objects import LEAST_EXPIRY_S, LONGEST_EXPIRY_S, ExpiresAfter
from cohort.services.gateway.http.service_headers import printable

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
CHUNK_BYTES = 1 << 18
STORE_AT_ONCE_BYTES = 1 << 20
FORM_BYTES = 1 << 16  # of an upload besides its content: boundaries, headers, the other fields
FIELD_BYTES = 1 << 10
LONGEST_NAME = 255


class UploadStream:
    """Input of aiohttp's form reader, which counts and hurries: while less than `upload_bytes_per_s` arrives, the time
    that is spent waiting for the client adds up; at `upload_idle_s` the upload ends with a `RequestError` 408. Time
    that the server takes to store what has arrived does not count."""

    def __init__(self, stream: StreamReader) -> None:
        self._stream = stream
        self._idle_s = self._remaining_s = bounds.BOUNDS.upload_idle_s
        self._least_bytes = max(1, int(self._idle_s * bounds.BOUNDS.upload_bytes_per_s))
        self._arrived = 0  # since `_remaining_s` was full
        self._taken = 0
        self.content_bytes = 0
        self.in_content = False

    async def read(self, n: int = -1) -> bytes:
        return await self._timely(self._stream.read(n))

    async def readline(self, **limits: int | None) -> bytes:
        return await self._timely(self._stream.readline(**limits))

    def at_eof(self) -> bool:
        return self._stream.at_eof()

    def unread_data(self, data: bytes) -> None:
        self._taken -= len(data)
        self._stream.unread_data(data)

    async def _timely(self, reading: Awaitable[bytes]) -> bytes:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(max(0.0, self._remaining_s)):
                data = await reading
        except TimeoutError as error:
            raise RequestError(
                f"Less than {self._least_bytes} bytes of the file arrived in {self._idle_s:g} s.", status=408
            ) from error
        self._remaining_s -= loop.time() - began_s
        self._arrived += len(data)
        if self._arrived >= self._least_bytes:
            self._arrived, self._remaining_s = 0, self._idle_s
        self._taken += len(data)
        if not self.in_content and self._taken - self.content_bytes > FORM_BYTES:
            raise RequestError(f"The form has more than {FORM_BYTES} bytes beside the file.", status=413)
        return data


class UploadForm:
    """One upload: `read` passes its content on and keeps the other fields."""

    def __init__(self, request: web.Request, retention_s: float) -> None:
        self._headers = request.headers
        self._retention_s = retention_s
        self._stream = UploadStream(request.content)
        self._fields: dict[str, str] = {}
        self.filename: str | None = None

    async def read(self, store: Callable[[bytes, int], Awaitable[None]]) -> None:
        """Read the form; `store` gets the content's pieces in order, with the bytes so far. Raises `RequestError`."""
        try:
            reader = MultipartReader(self._headers, cast(StreamReader, self._stream))
            async for part in reader:
                if not isinstance(part, BodyPartReader) or part.name is None:
                    raise RequestError("The form has a part that is no named field.")
                name = part.name
                if name != "file" and name not in FIELDS:
                    raise RequestError(
                        f"The form has an unknown field {printable(name)!r}; it may have file, {', '.join(FIELDS)}.",
                        param=printable(name),
                    )
                if name in self._fields or (name == "file" and self.filename is not None):
                    raise RequestError(f"{name}: given twice.", param=name)
                if name == "file":
                    self.filename = printable(part.filename or "upload", LONGEST_NAME)
                    await self._content(part, store)
                else:
                    self._fields[name] = await self._field(part, name)
        except (ValueError, web.RequestPayloadError) as error:
            raise RequestError(f"The form cannot be read: {printable(str(error))}") from error

    def retention_s(self) -> int:
        """Check the form that was read; return the seconds until the file expires. Raises `RequestError`."""
        if self.filename is None:
            raise RequestError("file is missing.", param="file")
        purpose = self._fields.get("purpose")
        if purpose != "batch":
            raise RequestError(
                "purpose is missing."
                if purpose is None
                else f"purpose: files of purpose {printable(purpose)!r} are of no use here, only 'batch'.",
                param="purpose",
            )
        anchor, seconds = self._fields.get("expires_after[anchor]"), self._fields.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return int(self._retention_s)
        try:
            return msgspec.convert({"anchor": anchor, "seconds": seconds and int(seconds)}, ExpiresAfter).seconds
        except ValueError as error:  # msgspec's own included
            raise RequestError(
                f"expires_after: anchor must be 'created_at', seconds {LEAST_EXPIRY_S} to {LONGEST_EXPIRY_S}.",
                param="expires_after",
            ) from error

    async def _field(self, part: BodyPartReader, name: str) -> str:
        data = await part.read_chunk(FIELD_BYTES + 1)
        more = await part.read_chunk(FIELD_BYTES) if data else b""
        if len(data) + len(more) > FIELD_BYTES:
            raise RequestError(f"{name}: the value has more than {FIELD_BYTES} bytes.", param=name)
        return (data + more).decode("utf-8").strip()

    async def _content(self, part: BodyPartReader, store: Callable[[bytes, int], Awaitable[None]]) -> None:
        limit, stream = bounds.BOUNDS.file_bytes, self._stream
        waiting: list[bytes] = []
        waiting_bytes = 0
        stream.in_content = True
        while True:
            chunk = await part.read_chunk(CHUNK_BYTES)
            waiting.append(chunk)
            waiting_bytes += len(chunk)
            stream.content_bytes += len(chunk)
            if stream.content_bytes > limit:
                raise too_large(limit)
            if waiting_bytes >= STORE_AT_ONCE_BYTES or not chunk:
                await store(b"".join(waiting), stream.content_bytes)
                waiting, waiting_bytes = [], 0
            if not chunk:
                stream.in_content = False
                return


def too_large(limit: int) -> RequestError:
    return RequestError(f"The file is larger than {limit} bytes.", status=413, param="file")
