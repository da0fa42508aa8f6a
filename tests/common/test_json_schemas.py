"""Schemas made to end, against the words of clients and against a validator of schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.json_schemas import FRACTION, MOST_NAMES, WHOLE, ending
from tests.examples import examples

WORD = {"type": "string"}
NUMBER = {"type": "integer", "minimum": -WHOLE, "maximum": WHOLE}


def open_object(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, WORD), **more}


def closed_object(*names: str, **more: Any) -> dict[str, Any]:
    return {**open_object(*names, **more), "additionalProperties": False}


def allows(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def test_an_object_that_names_properties_is_closed() -> None:
    pydantic = {
        "$defs": {"Pet": open_object("name", title="Pet")},
        "type": "object",
        "properties": {"pets": {"type": "array", "items": {"$ref": "#/$defs/Pet"}}, "best": open_object("name")},
        "required": ["pets"],
    }
    assert ending(pydantic) == {
        "$defs": {"Pet": closed_object("name", title="Pet")},
        "type": "object",
        "properties": {"pets": {"type": "array", "items": {"$ref": "#/$defs/Pet"}}, "best": closed_object("name")},
        "required": ["pets"],
        "additionalProperties": False,
    }
    assert ending(pydantic, closes=False) == pydantic  # strict: false


@pytest.mark.parametrize(
    "schema",
    [
        open_object("a", additionalProperties=True),
        open_object("a", additionalProperties={"type": "boolean"}),
        open_object("a", patternProperties={"^x": WORD}),
        open_object("a", unevaluatedProperties=False),
        {"type": "object"},
        open_object("a", required=["b"]),  # closed, no object would keep to it
        {"enum": [open_object("a")], "default": open_object("b")},
        {"allOf": [open_object("a"), {"additionalProperties": WORD}]},
        {"allOf": [open_object("a"), {"$ref": "#/elsewhere"}]},
    ],
)
def test_what_says_a_word_on_others_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert ending(schema) == schema


def test_each_part_of_a_choice_is_closed() -> None:
    for keyword in ("anyOf", "oneOf"):
        assert ending({keyword: [open_object("a"), open_object("b"), {"type": "null"}]}) == {
            keyword: [closed_object("a"), closed_object("b"), {"type": "null"}]
        }
    assert ending({"allOf": [open_object("a")], "default": {}}) == {"allOf": [closed_object("a")], "default": {}}


def test_parts_of_one_object_close_together() -> None:
    """Closed one by one, no object would keep to both."""
    schema = {
        "$defs": {"Base": open_object("id")},
        "allOf": [{"$ref": "#/$defs/Base"}, open_object("name", required=["name"])],
        "properties": {"of": {"$ref": "#/$defs/Base"}},
    }
    made = ending(schema)
    assert made["$defs"] == {"Base": closed_object("id"), "Base-open": open_object("id")}
    assert made["allOf"] == [{"$ref": "#/$defs/Base-open"}, open_object("name", required=["name"])]
    assert list(made["properties"]) == ["of", "id", "name"] and made["additionalProperties"] is False
    assert allows(made, {"id": "1", "name": "x", "of": {"id": "2"}})
    assert not allows(made, {"id": "1", "name": "x", "more": 1})
    assert not allows(made, {"id": "1", "name": "x", "of": {"id": "2", "more": 1}})


def test_a_definition_that_refers_to_itself() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a~1b"}, "v": WORD}}
    schema = {"$defs": {"a/b": {"allOf": [tree, {"$ref": "#/$defs/a~1b"}]}}, "$ref": "#/$defs/a~1b"}
    made = ending(schema)
    assert made["$defs"]["a/b"]["additionalProperties"] is False
    assert made["$defs"]["a/b"]["allOf"][1] == {"$ref": "#/$defs/a~1b-open"}
    assert made["$defs"]["a/b-open"]["allOf"][1] == {"$ref": "#/$defs/a~1b-open"}


def test_numbers_and_times_get_bounds_where_they_have_none() -> None:
    assert ending({"type": "integer"}) == NUMBER
    assert ending({"type": ["integer", "null"], "minimum": 0}) == {
        "type": ["integer", "null"],
        "minimum": 0,
        "maximum": WHOLE,
    }
    assert ending({"type": "number", "exclusiveMaximum": 1}) == {
        "type": "number",
        "exclusiveMaximum": 1,
        "minimum": -WHOLE,
        "multipleOf": FRACTION,
    }
    assert ending({"type": "number", "maximum": 1e-12}) == {"type": "number", "maximum": 1e-12, "minimum": -WHOLE}
    for kept in ({"type": "integer", "minimum": 2**60}, {"type": "integer", "enum": [2**60]}, {"const": 7}):
        assert ending(kept) == kept
    assert ending({"type": "string", "format": "date-time"})["maxLength"] == len("2024-01-01T00:00:00.123456789+00:00")
    assert ending({"type": "string", "format": "time", "maxLength": 8})["maxLength"] == 8
    assert ending({"type": "string", "format": "uuid"}) == {"type": "string", "format": "uuid"}


def test_values_of_one_kind_are_one_definition() -> None:
    """A lexer of a thousand numbers, each with its bounds, would be larger than its limit."""
    properties = {f"p{each}": {"type": "integer", "title": f"P{each}"} for each in range(3)}
    made = ending({"type": "object", "properties": properties, "$defs": {"bounded": {}}})
    assert made["properties"] == {
        "p0": {**NUMBER, "title": "P0"},
        "p1": {"$ref": "#/$defs/bounded-", "title": "P1"},
        "p2": {"$ref": "#/$defs/bounded-", "title": "P2"},
    }
    assert made["$defs"] == {"bounded": {}, "bounded-": NUMBER}


def test_unique_items_are_left_out() -> None:
    schema = {"type": "object", "properties": {"uniqueItems": {"type": "array", "items": WORD, "uniqueItems": True}}}
    assert ending(schema)["properties"] == {"uniqueItems": {"type": "array", "items": WORD}}


@pytest.mark.parametrize(
    "odd",
    [
        {"properties": 3, "required": [{}], "type": [{}], "format": [], "items": 7, "allOf": 1},
        {"allOf": [True, 3, None], "properties": {"a": None}, "$ref": 5, "$defs": []},
        {"$ref": "#/$defs/a", "properties": {}, "$defs": {"a": 1}},
    ],
)
def test_what_is_no_schema_is_left_to_the_compiler(odd: dict[str, Any]) -> None:
    assert isinstance(ending(odd), dict)


def test_work_is_linear() -> None:
    """Definitions that are each made of the one before name ever more properties: they stay open beyond a bound."""
    count = 3000
    chain: dict[str, Any] = {
        f"d{each}": {"allOf": [{"$ref": f"#/$defs/d{each - 1}"}, open_object(f"p{each}")]} for each in range(1, count)
    }
    schema = {"$defs": {"d0": open_object("p0"), **chain}, "$ref": f"#/$defs/d{count - 1}"}
    made = ending(schema)
    size = len(json.dumps(made))
    assert size < 4 * len(json.dumps(schema)) + 40 * MOST_NAMES
    assert made["$defs"]["d3"]["additionalProperties"] is False


names = st.sampled_from(["a", "b", "c"])
references = st.sampled_from([{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/Y"}])
leaves = st.sampled_from([{}, True, {"type": "integer"}, {"type": "string"}, {"enum": [0, "x"]}, {"type": "object"}])


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    made = st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(names, inner, max_size=2),
            "required": st.lists(names, max_size=1),
            "additionalProperties": st.booleans() | inner,
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
        },
    )
    return made | st.fixed_dictionaries({"type": st.just("array"), "items": inner})


schemas = st.recursive(leaves | references, _objects, max_leaves=6)
values = st.recursive(
    st.sampled_from([0, 7, "x"]),
    lambda inner: st.dictionaries(st.sampled_from("abcz"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=examples(10))
@given(root=_objects(schemas), x=_objects(leaves | references), y=_objects(leaves), value=values)
def test_what_ends_keeps_to_the_clients_schema(root: Any, x: Any, y: Any, value: Any) -> None:
    """The other way round only others' properties are lost: an object of named ones is allowed by both or neither."""
    if '"$ref": "#/$defs/X"' in json.dumps(x):  # of itself alone: endless for the validator
        return
    schema = {**root, "$defs": {"X": x, "Y": y}}
    made = ending(schema)
    if allows(made, value) and '"oneOf"' not in json.dumps(schema):  # closed, fewer of its branches may fit
        assert allows(schema, value)
    assert ending(schema, closes=False) == schema or '"integer"' in json.dumps(schema)
