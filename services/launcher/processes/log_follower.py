"""Reads what was added to the processes' logs since the last look. Called in the supervisor's refresh interval.

Logs are plain files that the processes write themselves, so that a slow terminal or a dead launcher never blocks
them; showing their warnings is a courtesy that may come a moment late.
"""

from __future__ import annotations

from pathlib import Path

_LONGEST_READ_BYTES = 256 << 10


class LogFollower:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    def new_lines(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:  # it was cut or begun anew
                    self._offset, self._partial = 0, b""
                if size - self._offset > _LONGEST_READ_BYTES:  # a flood: the newest will do
                    self._offset, self._partial = size - _LONGEST_READ_BYTES, b""
                file.seek(self._offset)
                data = self._partial + file.read()
                self._offset = file.tell()
        except FileNotFoundError:
            return []
        *lines, self._partial = data.split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]
