"""The table of `prices.yaml`: what each field of each request costs, beside the fields that there are.

A number within a range, a choice among words or a struct around other fields costs nothing by its type; integers and
flags may count something, so each is listed. A field is named by the struct that declares it (`CompletionBody.prompt`),
what lies outside of bodies by its operation (`createFile.file`, `getFile.{id}`). Used by `test_prices.py`.

    python -m tests.security.prices --write    makes the table of docs/security.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from cohort.common.engine.config.lora_checkpoint import MAX_RANK
from cohort.services.gateway.batches.batch_lines import MAX_CUSTOM_ID, _Line
from cohort.services.gateway.batches.batch_uploads import FIELD_BYTES
from cohort.services.gateway.bounds import BOUNDS
from cohort.services.gateway.http.bodies import MAX_LOGPROBS, MAX_STOP_STRINGS
from cohort.services.gateway.openapi_operations import OPERATIONS, Operation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
IN_MIB = {
    "file_mib": "file_bytes",
    "streams_mib": "streams_bytes",
    "grammar_mib": "grammar_memory_bytes",
    "grammars_passed_mib": "grammars_passed_bytes",
}
FIGURES: Mapping[str, Any] = {
    **asdict(BOUNDS),
    **{name: asdict(BOUNDS)[of] >> 20 for name, of in IN_MIB.items()},
    "scores": MAX_LOGPROBS,
    "stop_strings": MAX_STOP_STRINGS,
    "field_bytes": FIELD_BYTES,
    "custom_id": MAX_CUSTOM_ID,
    "lora_rank": MAX_RANK,
}


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    price: str
    bound: str
    beyond: str
    tested: str = ""
    fields: dict[str, str] = {}

    @property
    def bound_text(self) -> str:
        """The bound with its numbers."""
        return self.bound.format(**{name: f"{value:,}".removesuffix(".0") for name, value in FIGURES.items()})


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: list[Row]
    free: dict[str, str]
    routes: dict[str, str]


PRICES = msgspec.yaml.decode((Path(__file__).parent / "prices.yaml").read_bytes(), type=Prices)


def places(fields: Mapping[str, str]) -> list[str]:
    return [f"{struct}.{name}" for struct, names in fields.items() for name in names.split()]


def fields_of(kind: inspect.Type, seen: set[type]) -> Iterator[str]:
    """Yield the fields of all structs in a type, through lists, maps and unions, but those that are free by type."""
    match kind:
        case inspect.StructType():
            if kind.cls in seen:
                return
            seen.add(kind.cls)
            for field in kind.fields:
                if not free_by_type(field.type):
                    yield f"{_owner(kind.cls, field.name)}.{field.encode_name}"
                yield from fields_of(field.type, seen)
        case inspect.UnionType():
            for each in kind.types:
                yield from fields_of(each, seen)
        case inspect.ListType():
            yield from fields_of(kind.item_type, seen)
        case inspect.DictType():
            yield from fields_of(kind.key_type, seen)
            yield from fields_of(kind.value_type, seen)
        case inspect.Metadata():
            yield from fields_of(kind.type, seen)


def free_by_type(kind: inspect.Type) -> bool:
    match kind:
        case inspect.NoneType() | inspect.LiteralType() | inspect.StructType():
            return True
        case inspect.FloatType():
            return not (kind.ge is kind.gt is None or kind.le is kind.lt is None)
        case inspect.UnionType():
            return all(free_by_type(each) for each in kind.types)
    return False


def _owner(struct: type, name: str) -> str:
    """Return the name of the struct that declares a field, which others inherit."""
    structs = [each for each in struct.__mro__ if issubclass(each, msgspec.Struct) and each is not msgspec.Struct]
    return next(each.__name__ for each in reversed(structs) if name in each.__struct_fields__)


def outside_of_body(operation: Operation) -> Iterator[str]:
    """Yield parameters in path, query and headers, and a form's parts, but choices among words and reals."""
    names = re.findall(r"\{\w+\}", operation.path)
    for parameter in operation.parameters:
        schema: Any = parameter["schema"]
        if schema.get("type") != "number" and len(schema.get("enum", ())) < 2:
            names.append(parameter["name"])
    names += (operation.form or {}).get("properties", {})
    return (f"{operation.id}.{name}" for name in names)


def fields() -> set[str]:
    """Return all fields that must have a price or be listed as free."""
    seen: set[type] = set()
    found = {each for row in OPERATIONS if row.body for each in fields_of(inspect.type_info(row.body), seen)}
    found |= set(fields_of(inspect.type_info(_Line), seen))
    found |= {each for row in OPERATIONS for each in outside_of_body(row)}
    return found


HEAD = "| what | charged to | at most | beyond |\n|---|---|---|---|\n"


def table() -> str:
    rows = [*PRICES.rows, Row("calls", "the key's requests", "`keys.limits`", "429")]
    return HEAD + "".join(f"| {row.what} | {row.price} | {row.bound_text} | {row.beyond} |\n" for row in rows)


def on_page(page: str) -> str:
    """Return the page's own table, or "" if there is none."""
    found = re.search(re.escape(HEAD) + r"(?:\|.*\n)*", page)
    return found[0] if found else ""


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(on_page(text), table()), encoding="utf-8")
