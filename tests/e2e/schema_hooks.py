"""What Schemathesis is told about this server, in its own process; loaded by `test_schema.py`.

Bodies name the served model, or nearly all of them would be answered with 404 before anything else is looked at. Names
of the wrong type stay, and headers that no server refuses are not taken for a fault.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

_MODEL = os.environ["SERVED_MODEL"]


@schemathesis.hook
def map_body(_: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = _MODEL
    return body


@schemathesis.hook
def filter_case(_: Any, case: Any) -> bool:
    return "x-schemathesis-unknown-property" not in (case.headers or {})
