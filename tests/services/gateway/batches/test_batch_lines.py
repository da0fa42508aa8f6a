"""Lines of the input file, good and bad, and what stands in the output files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.errors import RequestError
from cohort.services.gateway.batches import batch_lines
from cohort.services.gateway.batches.batch_lines import InputReader, answered, not_run, read_body, refused
from cohort.services.gateway.batches.batch_records import LineError, PendingLine
from tests.examples import examples

ENDPOINT = "/v1/completions"


def line(custom_id: Any = "a", **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}, **more}


def read(
    path: Path, *, max_lines: int = 100, max_line_bytes: int = 10_000
) -> tuple[list[PendingLine], list[LineError]]:
    reader = InputReader(path, ENDPOINT, max_lines=max_lines, max_line_bytes=max_line_bytes)
    found = []
    while page := reader.next():
        found += page
    return found, reader.errors


def written(folder: Path, *lines: Any, end: str = "\n") -> Path:
    """Texts and bytes as they are, everything else as JSON."""
    path = folder / "input"
    path.write_bytes(
        b"".join((item if isinstance(item, bytes) else json.dumps(item).encode()) + end.encode() for item in lines)
    )
    return path


def codes(errors: list[LineError]) -> list[tuple[str, int | None]]:
    return [(error.code, error.line) for error in errors]


def test_good_lines_and_their_bodies(tmp_path: Path) -> None:
    body = {"prompt": "Köln 🦊 \n", "max_tokens": 3, "model": "m"}
    path = written(tmp_path, line("a"), b"", line("b", body=body, extra=1), end="\r\n")
    found, errors = read(path)
    assert errors == []
    assert [(item.number, item.custom_id) for item in found] == [(1, "a"), (3, "b")]
    assert json.loads(read_body(path, found[1])) == body


def test_the_last_line_needs_no_line_break(tmp_path: Path) -> None:
    path = written(tmp_path, line("a"))
    path.write_bytes(path.read_bytes().rstrip())
    found, errors = read(path)
    assert (len(found), errors) == (1, [])


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{no json", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b'{"custom_id": "x", "body": {"a": ' + b"[" * 5000, "invalid_json_line", None),
        (b"[1]", "invalid_request", None),
        (line(5), "invalid_request", "custom_id"),
        (line(""), "invalid_request", "custom_id"),
        (b'{"custom_id": "\\udc80", "method": "POST", "url": "/v1/completions", "body": {}}', None, None),
        (line("\n"), "invalid_request", "custom_id"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/chat/completions"), "url_mismatch", "url"),
        (line(body=[1]), "invalid_request", "body"),
        (line(body=None), "invalid_request", "body"),
        ({"custom_id": "x", "method": "POST", "url": ENDPOINT}, "invalid_request", None),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, bad: Any, code: str | None, param: str | None) -> None:
    found, errors = read(written(tmp_path, line("first"), bad, line("last")))
    assert [item.custom_id for item in found] == ["first", "last"]
    [error] = errors
    assert error.line == 2 and error.message
    if code is not None:
        assert (error.code, error.param) == (code, param)


def test_limits(tmp_path: Path) -> None:
    assert codes(read(written(tmp_path))[1]) == [("empty_file", None)]
    assert codes(read(written(tmp_path, b"", b"  "))[1]) == [("empty_file", None)]
    three = written(tmp_path, line("a"), line("b"), line("c"))
    assert read(three, max_lines=3)[1] == []
    assert codes(read(three, max_lines=2)[1]) == [("too_many_tasks", 3)]


@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 3, 50])
def test_a_line_too_long_is_skipped_as_one(tmp_path: Path, extra: int) -> None:
    limit = 200
    padding = limit + extra - len(json.dumps(line("long", body={"prompt": ""})))
    path = written(tmp_path, line("a"), line("long", body={"prompt": "x" * padding}), line("b"))
    found, errors = read(path, max_line_bytes=limit)
    kept = ["a", "long", "b"] if extra <= 0 else ["a", "b"]
    assert [item.custom_id for item in found] == kept
    assert codes(errors) == ([] if extra <= 0 else [("line_too_long", 2)])
    assert json.loads(read_body(path, found[-1])) == {"prompt": "x"}


def test_errors_are_bounded(tmp_path: Path) -> None:
    _, errors = read(written(tmp_path, *[b"?"] * 1000))
    assert len(errors) == batch_lines.MAX_ERRORS


def test_the_first_line_names_the_model(tmp_path: Path) -> None:
    for body, model in (({"model": "m"}, "m"), ({"model": 5}, None), ({}, None)):
        reader = InputReader(written(tmp_path, line(body=body)), ENDPOINT, max_lines=9, max_line_bytes=999)
        reader.next()
        assert reader.model == model
        reader.close()


@settings(max_examples=examples(0.6))
@given(
    lines=st.lists(
        st.one_of(
            st.builds(lambda text: line("id", body={"prompt": text}), st.text(max_size=30)),
            st.just(b""),
            st.just(b"?"),
            st.binary(max_size=40).filter(lambda data: b"\n" not in data),
        ),
        max_size=12,
    ),
    limit=st.integers(20, 200),
    at_once=st.integers(1, 4),
)
def test_positions_are_right_whatever_stands_between(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Any], limit: int, at_once: int
) -> None:
    """Against the plain way: split the whole file at its line breaks."""
    lines = [{**item, "custom_id": str(index)} if isinstance(item, dict) else item for index, item in enumerate(lines)]
    path = written(tmp_path_factory.mktemp("lines"), *lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_lines, "LINES_AT_ONCE", at_once)
        found, _ = read(path, max_line_bytes=limit)
    parts = path.read_bytes().split(b"\n")
    for item in found:
        part = parts[item.number - 1].rstrip(b"\r")
        assert path.read_bytes()[item.start : item.start + item.length] == part and len(part) <= limit
    good = [str(index) for index, item in enumerate(lines) if isinstance(item, dict) and len(json.dumps(item)) <= limit]
    assert [item.custom_id for item in found] == good


def test_output_lines() -> None:
    item = PendingLine(7, 0, 1, "mine")
    assert json.loads(answered("batch_x", item, "r-1", b'{"choices":[]}')) == {
        "id": "batch_req_x_7",
        "custom_id": "mine",
        "error": None,
        "response": {"status_code": 200, "request_id": "r-1", "body": {"choices": []}},
    }
    told = json.loads(refused("batch_x", item, RequestError("no", status=404, param="model")))
    assert told["response"]["status_code"] == 404 and told["error"] is None
    assert told["response"]["body"]["error"]["param"] == "model"
    left = json.loads(not_run("batch_x", item, "expired"))
    assert (left["response"], left["error"]["code"], left["custom_id"]) == (None, "batch_expired", "mine")
