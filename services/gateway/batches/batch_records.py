"""The rows stored of files and batches: one struct each, as the store returns it and the API shows it.

Used by everything named `batch_*.py`. Has names and types alone; `batch_store.py` decides which change is allowed when.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"]
UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")


class StoredFile(msgspec.Struct, frozen=True):
    """A row of `files`. Times are Unix seconds."""

    seq: int
    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int


class LineError(msgspec.Struct, frozen=True):
    """Reason why an input file cannot be a batch. `line` counts from 1; None for the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(msgspec.Struct, frozen=True):
    """A row of `batches`. Times are Unix seconds; `output_retention_s` counts from the output files' creation."""

    seq: int
    id: str
    owner: str
    status: Status
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_retention_s: int
    metadata: dict[str, str] | None = None
    model: str | None = None
    errors: list[LineError] | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def unfinished(self) -> bool:
        return self.status in UNFINISHED


class PendingLine(msgspec.Struct, frozen=True):
    """Line without a result: its place in the input file, in bytes, without its line break."""

    number: int
    start: int
    length: int
    custom_id: str


class FinishedLine(msgspec.Struct, frozen=True):
    """A line of the output file (`succeeded`) or of the error file, and its cost."""

    number: int
    succeeded: bool
    result: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
