"""A file's content to its client: a piece at a time from disk, each within a deadline.

Called by `batch_api.py`. A client must take every piece within `gateway.write_timeout_s`, or it would hold a descriptor
and a connection. Ranges are served, so that a download can go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import BinaryIO

import structlog
from aiohttp import web

from cohort.common.errors import RequestError

READ_BYTES = 1 << 20  # from disk, by a thread
PIECE_BYTES = 1 << 17  # to the client within the deadline; more than aiohttp buffers before it waits (64 KiB)
POLL_S = 0.05  # between two polls for the last piece having been taken


async def send_content(
    request: web.Request,
    file: BinaryIO,
    size: int,
    headers: Mapping[str, str],
    *,
    write_timeout_s: float,
    log: structlog.stdlib.BoundLogger,
) -> web.StreamResponse:
    """Send `size` bytes of `file` and close it; threads read it. Raises `RequestError` 416, `ConnectionError` when the
    client is gone."""
    try:
        begin, end = _span(request, size)
        whole = end - begin == size
        response = web.StreamResponse(status=200 if whole else 206, headers={**headers, "Accept-Ranges": "bytes"})
        response.content_length = end - begin
        if not whole:
            response.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        try:
            async with asyncio.timeout(write_timeout_s):
                await response.prepare(request)
            if request.method != "HEAD":
                await asyncio.to_thread(file.seek, begin)
                await _send(response, file, end - begin, write_timeout_s)
                await _taken(request, write_timeout_s)
        except TimeoutError:
            log.warning("client does not read its download", write_timeout_s=write_timeout_s, path=request.path)
            if request.transport is not None:
                request.transport.abort()
        return response
    finally:
        await asyncio.shield(asyncio.to_thread(file.close))


async def _send(response: web.StreamResponse, file: BinaryIO, remaining: int, write_timeout_s: float) -> None:
    while remaining:
        data = memoryview(await asyncio.to_thread(file.read, min(READ_BYTES, remaining)))
        if not data:
            raise ConnectionError("the content is shorter than its file says")  # contents never change; cut it off
        remaining -= len(data)
        for start in range(0, len(data), PIECE_BYTES):
            async with asyncio.timeout(write_timeout_s):
                await response.write(data[start : start + PIECE_BYTES])


async def _taken(request: web.Request, write_timeout_s: float) -> None:
    """Wait until the kernel has all bytes: bytes in our own buffer would keep the connection, even a closed one."""
    async with asyncio.timeout(write_timeout_s):
        while request.transport is not None and request.transport.get_write_buffer_size():  # noqa: ASYNC110 -- no event
            await asyncio.sleep(POLL_S)


def _span(request: web.Request, size: int) -> tuple[int, int]:
    """Return the first byte and the end (exclusive). A condition on the range is ignored: files have no versions."""
    if "If-Range" in request.headers:
        return 0, size
    try:
        span = request.http_range
    except ValueError:
        span = slice(size, None)
    if span.start is None:
        return 0, size
    begin, end, _ = span.indices(size)
    if begin >= end:
        raise RequestError(f"Range: the file has {size} bytes.", status=416)
    return begin, end
