"""Text files, plain or gzip, whose every failure names the file. Used by all readers of workloads and prompts."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from cohort.common.errors import ConfigError


def open_text(path: Path) -> TextIO:
    """Open the file as UTF-8 text; gzip is recognised by its first bytes, not by its name. Raises `ConfigError`."""
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        if packed:
            return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", newline="")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error


@contextmanager
def reading(path: Path) -> Iterator[TextIO]:
    """Open a text; an error while reading becomes a `ConfigError`, too."""
    with open_text(path) as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text ({error.reason})") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ConfigError(f"{path}: damaged gzip file ({error})") from error
        except csv.Error as error:
            raise ConfigError(f"{path}: not a CSV file ({error})") from error
