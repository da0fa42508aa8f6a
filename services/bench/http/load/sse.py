"""Server-sent events, as far as OpenAI-style streams use them: one `data:` line is one event.

Pure. Called by `client` with the bytes of each network read. Comment lines, `event:` and `id:` lines are skipped; an
event spread over several `data:` lines does not occur in these streams and would be reported as a bad event.
"""

from __future__ import annotations

DONE = b"[DONE]"


class EventParser:
    """Bytes in, payloads of complete `data:` lines out; keeps an unfinished line for the next call."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def finish(self) -> list[bytes]:
        """A last line that the server did not end."""
        rest, self._rest = self._rest, b""
        return [rest[5:].strip()] if rest.startswith(b"data:") else []
