"""Lines of a batch: the form of the input file, and the contents of the output and error files.

    in   {"custom_id", "method": "POST", "url": endpoint, "body": {…}}
    out  {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}

Called by `batch_runner.py`, the reader on threads. All envelopes are checked before any line runs: a bad one fails the
batch, as at OpenAI; a bad body fails its own line only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec

from cohort.common.errors import RequestError
from cohort.services.gateway.batches.batch_records import LineError, PendingLine
from cohort.services.gateway.generation.delta import Caller
from cohort.services.gateway.generation.openai_shapes import Usage
from cohort.services.gateway.http.error_shapes import error_body
from cohort.services.gateway.http.service_headers import printable

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_CUSTOM_ID = 512
MAX_ERRORS = 100  # named in a failed batch; a file of the wrong kind has as many as lines
LINES_AT_ONCE = 500

CHECK_EVERY = 1000  # lines read between two checks that reading is still wanted; blank ones yield nothing to return
MAX_RESULT_BYTES = 1 << 28
"""Size limit of one answer, which the database takes with ease; larger ones have many scored choices."""

NotRun = Literal["expired", "cancelled", "failed"]

CustomId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID)]


class _Line(msgspec.Struct, frozen=True):
    custom_id: CustomId
    method: str
    url: str
    body: dict[str, msgspec.Raw]


class _Body(msgspec.Struct, frozen=True):
    body: msgspec.Raw


class _Model(msgspec.Struct, frozen=True):
    model: Any = None


class _LineModel(msgspec.Struct, frozen=True):
    body: _Model


_line_decoder = msgspec.json.Decoder(_Line)
_body_decoder = msgspec.json.Decoder(_Body)
_model_decoder = msgspec.json.Decoder(_LineModel)
_encode = msgspec.json.Encoder().encode


class InputReader:
    """Reads an input file once, a portion at a time, and checks every line's envelope. Use it from one thread at a
    time; it holds the file open until the end, an error or `close`.

    `errors` grows while reading; with any, the file is no batch. Blank lines are skipped but counted.
    """

    def __init__(
        self,
        path: Path,
        endpoint: str,
        *,
        max_lines: int,
        max_line_bytes: int,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """`wanted` is called now and then, in the thread that reads: reading ends when it returns False."""
        self._wanted = wanted
        self._file = path.open("rb")
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._start = 0
        self._number = 0
        self._seen: set[str] = set()
        self._done = False
        self.errors: list[LineError] = []
        self.model: str | None = None
        """Model of the first line."""

    def next(self) -> list[PendingLine]:
        """Return the next good lines; empty at the end of the file, or when there are too many errors to list."""
        found: list[PendingLine] = []
        while len(found) < LINES_AT_ONCE and not self._done:
            # One byte more than a line may have: a longer one is noticed without being read into memory.
            data = self._file.readline(self._max_line_bytes + 2)
            if not data:
                self._end()
                break
            self._number += 1
            if self._number % CHECK_EVERY == 0 and not self._wanted():
                self.close()
                break
            start, self._start = self._start, self._start + len(data)
            text = data.rstrip(b"\r\n")
            if len(text) > self._max_line_bytes:
                self.errors.append(
                    LineError("line_too_long", f"This line has more than {self._max_line_bytes} bytes.", self._number)
                )
                if not data.endswith(b"\n"):
                    self._skip_line()
            elif text.strip():
                match self._check(text, start):
                    case PendingLine() as line:
                        found.append(line)
                    case LineError() as error:
                        self.errors.append(error)
            if len(self.errors) >= MAX_ERRORS or len(self._seen) > self._max_lines:
                self.close()
        return found

    def close(self) -> None:
        self._done = True
        self._file.close()

    def _end(self) -> None:
        if not self._seen and not self.errors:
            self.errors.append(LineError("empty_file", "The input file has no requests."))
        self.close()

    def _skip_line(self) -> None:
        while (data := self._file.readline(1 << 20)) and not data.endswith(b"\n"):
            self._start += len(data)
        self._start += len(data)

    def _check(self, text: bytes, start: int) -> PendingLine | LineError:
        try:
            line = _line_decoder.decode(text)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$")
            return self._error("invalid_request", f"{what.replace('`', '')}.", where.rstrip("`").lstrip(".") or None)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return self._error("invalid_json_line", "This line is not parseable as valid JSON.")
        if not line.custom_id.isprintable():
            return self._error("invalid_request", "custom_id has characters that cannot be shown.", "custom_id")
        if line.method.upper() != "POST":
            return self._error("invalid_method", f"method is {printable(line.method)!r}, it must be 'POST'.", "method")
        if line.url != self._endpoint:
            shown = printable(line.url)
            return self._error("url_mismatch", f"url is {shown!r}, the batch's endpoint {self._endpoint!r}.", "url")
        if line.custom_id in self._seen:
            shown = printable(line.custom_id)
            return self._error("duplicate_custom_id", f"An earlier line has the custom_id {shown!r}.", "custom_id")
        if not self._seen:
            self.model = _model(text)
        self._seen.add(line.custom_id)
        if len(self._seen) > self._max_lines:
            return self._error("too_many_tasks", f"A batch may have {self._max_lines} requests.")
        return PendingLine(self._number, start, len(text), line.custom_id)

    def _error(self, code: str, message: str, param: str | None = None) -> LineError:
        return LineError(code, message, self._number, param)


def _model(text: bytes) -> str | None:
    """Return an accepted line's model, or None if unreadable: a bad body is refused when the line runs."""
    try:
        model = _model_decoder.decode(text).body.model
    except (ValueError, RecursionError):  # of msgspec too, as is broken UTF-8
        return None
    return printable(model, MAX_CUSTOM_ID) if isinstance(model, str) else None


def read_body(path: Path, line: PendingLine) -> bytes:
    """Read an accepted line's body. Raises `RequestError` if the line has changed, `OSError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(line.start)
            return bytes(_body_decoder.decode(file.read(line.length)).body)
    except FileNotFoundError as error:
        raise RequestError("The content of the input file is gone.", status=500, type_="server_error") from error
    except (ValueError, RecursionError) as error:
        raise RequestError("This line cannot be read.") from error


_WHY_NOT_RUN: dict[NotRun, str] = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed because the batch was cancelled.",
    "failed": "This request was not executed because the batch failed.",
}


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Failure(msgspec.Struct, frozen=True):
    code: str
    message: str


class _OutputLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _Failure | None


def line_id(batch_id: str, number: int) -> str:
    """Return the id of a line: for answers, logs and the ids of its requests on workers."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def answered(batch_id: str, line: PendingLine, request_id: str, body: bytes) -> bytes:
    """Encode a line of the output file; `body` is the JSON of a whole answer."""
    response = _Response(200, request_id, msgspec.Raw(body))
    return _encode(_OutputLine(line_id(batch_id, line.number), line.custom_id, response, None))


def refused(batch_id: str, line: PendingLine, error: RequestError) -> bytes:
    """Encode a line of the error file: the answer that a posted body would get."""
    name = line_id(batch_id, line.number)
    response = _Response(error.status, name, msgspec.Raw(_encode(error_body(error))))
    return _encode(_OutputLine(name, line.custom_id, response, None))


def not_run(batch_id: str, line: PendingLine, reason: NotRun) -> bytes:
    """Encode a line of the error file for one that did not run before its batch ended."""
    failure = _Failure(f"batch_{reason}", _WHY_NOT_RUN[reason])
    return _encode(_OutputLine(line_id(batch_id, line.number), line.custom_id, None, failure))


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """A complete answer to a line of a batch: its JSON, our id of the request, what it used."""

    body: bytes
    request_id: str
    usage: Usage


class AnswerLine(Protocol):
    async def __call__(self, data: bytes, caller: Caller, *, chat: bool) -> LineAnswer: ...
