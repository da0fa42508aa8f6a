"""One HTTP request to a process on this machine: is `/ready` answered with 200?

A dozen lines of HTTP/1.0 instead of a client library: the launcher asks several processes twenty times a second while
they start, on cores they need themselves. Never raises for a process that is not there (yet).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from urllib.parse import urlsplit

from cohort.common.http.tls import unverified

_context = functools.cache(unverified)


async def answers_ok(url: str, timeout_s: float) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            encrypted = _context() if parts.scheme == "https" else None
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=encrypted)
            try:
                request = f"GET {parts.path or '/'} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n"
                writer.write(request.encode("ascii"))
                first = await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, ValueError):
        return False
    return first.split()[1:2] == [b"200"]
