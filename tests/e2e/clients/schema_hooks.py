"""What Schemathesis is told about this server, in its own process; loaded by `test_schema.py`.

Bodies name the served model and a file that is there, every second path a thing that is there, or nearly all requests
would be answered with 404 before anything else is looked at. Names of the wrong type stay, and headers that no server
refuses are not taken for a fault.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

_MODEL = os.environ["SERVED_MODEL"]
_IDS = {kind: os.environ[f"KEPT_{kind.upper()}"] for kind in ("files", "batches", "responses")}


@schemathesis.hook
def map_body(_: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = _MODEL
    if isinstance(body, dict) and isinstance(body.get("input_file_id"), str):
        body["input_file_id"] = _IDS["files"]
    return body


@schemathesis.hook
def map_path_parameters(context: Any, given: Any) -> Any:
    kind, method = context.operation.path.split("/")[2:3], context.operation.method.upper()
    if kind and kind[0] in _IDS and method != "DELETE" and given and len(str(given.get("id", ""))) % 2:
        return {**given, "id": _IDS[kind[0]]}
    return given


@schemathesis.hook
def filter_case(_: Any, case: Any) -> bool:
    return "x-schemathesis-unknown-property" not in (case.headers or {})
