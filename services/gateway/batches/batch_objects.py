"""OpenAI's objects of files and batches: the fields that a client may send, and those it is shown.

Called by `batch_api.py`. Decides fields, limits and errors; knows neither HTTP nor where anything is stored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from cohort.common.errors import RequestError
from cohort.services.gateway.batches.batch_records import LineError, StoredBatch, StoredFile
from cohort.services.gateway.http.service_headers import printable

LEAST_EXPIRY_S, LONGEST_EXPIRY_S = 3600, 2_592_000
LONGEST_WINDOW_S = 30 * 86_400

_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_WINDOW_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Key = Annotated[str, msgspec.Meta(max_length=64)]
Value = Annotated[str, msgspec.Meta(max_length=512)]
ExpirySeconds = Annotated[int, msgspec.Meta(ge=LEAST_EXPIRY_S, le=LONGEST_EXPIRY_S)]


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class BatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Key, Value], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


batch_decoder = msgspec.json.Decoder(BatchBody)


class FileObject(msgspec.Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    object: str = "file"
    status: str = "processed"
    status_details: None = None


class Counts(msgspec.Struct, frozen=True):
    total: int
    completed: int
    failed: int


class InputTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class Errors(msgspec.Struct, frozen=True):
    data: list[LineError]
    object: str = "list"


class BatchObject(msgspec.Struct, frozen=True):
    id: str
    endpoint: str
    model: str | None
    errors: Errors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    usage: BatchUsage
    metadata: dict[str, str] | None
    object: str = "batch"


_SAME = [name for name in BatchObject.__struct_fields__ if name in StoredBatch.__struct_fields__ and name != "errors"]
"""Fields shown as they are stored."""


class Page(msgspec.Struct, frozen=True):
    data: list[FileObject] | list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Deleted(msgspec.Struct, frozen=True):
    id: str
    object: str = "file"
    deleted: bool = True


def window_s(text: str) -> int:
    """Parse a `completion_window` such as "30m" to seconds. Raises `RequestError`."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _WINDOW_UNIT_S[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_WINDOW_S:
        raise RequestError(
            f"completion_window: {printable(text)!r} is no time such as '24h' (at most {LONGEST_WINDOW_S // 86_400} "
            "days).",
            param="completion_window",
        )
    return seconds


def file_object(file: StoredFile) -> FileObject:
    return FileObject(file.id, file.bytes, file.created_at, file.filename, file.purpose, file.expires_at)


def batch_object(batch: StoredBatch) -> BatchObject:
    same: dict[str, Any] = {name: getattr(batch, name) for name in _SAME}
    return BatchObject(
        **same,
        errors=None if batch.errors is None else Errors(batch.errors),
        request_counts=Counts(batch.total, batch.completed, batch.failed),
        usage=BatchUsage(
            batch.input_tokens,
            InputTokens(batch.cached_tokens),
            batch.output_tokens,
            OutputTokens(),
            batch.input_tokens + batch.output_tokens,
        ),
    )
