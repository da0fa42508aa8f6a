"""A client's JSON schema, made to end: objects close, numbers and times get bounds.

A schema of Pydantic, zod or a hand says which properties an object has, and nothing of others. It would allow any, and
a small model adds some until its tokens are used up; so an object that names properties is closed unless it says a word
about others. Numbers are bounded to those that every JSON parser keeps, times to nanoseconds. Called by `grammar.py`
and for tools before their schemas become a grammar. Pure; linear in the schema.

    {"properties": {"a": …}}                         a and no other
    {"allOf": [{"$ref": …}, {"properties": …}]}      all that its parts name, and no other: the parts themselves stay
                                                     open, a definition among them by an open copy
    {"anyOf": [{"properties": …}, …]}                each part closed
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_NAMES = 10_000
"""Properties that are gathered for all objects of parts together; beyond, such an object stays open."""
WHOLE = 2**53 - 1
"""Largest integer that every JSON parser keeps; the bound of numbers without one."""
FRACTION = 1e-9
"""Step of numbers without one: nine digits behind the point."""
_LENGTHS = {"date-time": 35, "time": 24, "duration": 64}
"""Characters of formats that have any number of digits; to the nanosecond, with an offset."""
_OTHERS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_PARTS = ("allOf", "anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")
_OF_VALUES = {
    *("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "format", "minLength", "maxLength", "pattern"),
}
_ANNOTATIONS = {"title", "description", "default", "examples"}
_OF_SCHEMAS = ("properties", "patternProperties", *_DEFINITIONS)


def ending(schema: dict[str, Any], *, closes: bool = True) -> dict[str, Any]:
    """Return the schema with bounds, and its objects closed if `closes`. `uniqueItems` is left out: no grammar counts
    the values before."""
    work = _Work(schema, closes)
    made: dict[str, Any] = work.whole(schema)
    for container, added in work.added.items():
        there = made.get(container)
        made[container] = {**there, **added} if isinstance(there, dict) else added
    return made


class _Work:
    def __init__(self, root: Mapping[str, Any], closes: bool) -> None:
        self._root = root
        self._closes = closes
        self._names_left = MOST_NAMES
        self._copied: dict[str, str] = {}
        """References to definitions, each with the one to its open copy."""
        self._shared: dict[str, str] = {}
        """References to bounded values that came before, or "" for the first of a kind, by their JSON."""
        self.added: dict[str, dict[str, Any]] = {}
        """Definitions to add, by their container."""

    def whole(self, schema: Any) -> Any:
        """Return a schema that stands alone."""
        if not isinstance(schema, dict):
            return schema
        parts = list(_parts(schema))
        own = "properties" in schema
        if not parts and not ("$ref" in schema and own):
            made = self._inner(schema)
            if own and self._closes and not _says_others(schema) and _requires(schema) <= _properties(schema).keys():
                made["additionalProperties"] = False
            return self._share(_bounded(made))
        each_alone = len(parts) == 1 and (parts[0][0] != "allOf" or len(parts[0][1]) == 1)
        if each_alone and not (own or "$ref" in schema or _requires(schema) or _says_others(schema)):
            [(keyword, branches)] = parts
            return {**self._inner(schema), keyword: [self.whole(branch) for branch in branches]}
        return self._together(schema)

    def _together(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return an object that several parts describe: closed at its own level if each of them can be read."""
        made: dict[str, Any] = self._part(schema)
        names: dict[str, None] = {}
        required: set[str] = set()
        if self._closes and self._gather(schema, names, required, set()) and names and required <= names.keys():
            properties = made.get("properties", {})
            made["properties"] = {name: properties.get(name, True) for name in names}
            made["additionalProperties"] = False
        return made

    def _part(self, schema: Any) -> Any:
        """Return a part of an object, open at its own level."""
        if not isinstance(schema, dict):
            return schema
        made = self._inner(schema)
        for keyword, branches in _parts(schema):
            made[keyword] = [self._part(branch) for branch in branches]
        if self._closes and isinstance(reference := schema.get("$ref"), str):
            made["$ref"] = self._open_copy(reference)
        return made

    def _open_copy(self, reference: str) -> str:
        """Return a reference to an open copy of a definition, which stands alone elsewhere."""
        if (known := self._copied.get(reference)) is not None:
            return known
        container, name, definition = self._definition(reference)
        if definition is None:
            return reference
        added, copy = self._new_name(container, f"{name}-open")
        added[copy] = {}  # it may refer to itself
        self._copied[reference] = f"#/{container}/{copy.replace('~', '~0').replace('/', '~1')}"
        added[copy] = self._part(definition)
        return self._copied[reference]

    def _new_name(self, container: str, name: str) -> tuple[dict[str, Any], str]:
        """Return the definitions to add to a container, and a name that none has."""
        added = self.added.setdefault(container, {})
        taken = self._root.get(container)
        while name in added or (isinstance(taken, dict) and name in taken):
            name += "-"
        return added, name

    def _share(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a reference in place of a bounded value that came before: a grammar's lexer grows with each."""
        value = {key: schema[key] for key in sorted(_OF_VALUES & schema.keys())}
        if not value.keys() & {"maximum", "maxLength"} or not schema.keys() <= _OF_VALUES | _ANNOTATIONS:
            return schema
        kind = json.dumps(value)
        if kind not in self._shared:
            self._shared[kind] = ""
            return schema
        if not self._shared[kind]:
            added, name = self._new_name("$defs", "bounded")
            added[name], self._shared[kind] = value, f"#/$defs/{name}"
        return {"$ref": self._shared[kind], **{key: schema[key] for key in schema if key in _ANNOTATIONS}}

    def _definition(self, reference: str) -> tuple[str, str, Any]:
        """Return a definition's container, name and schema; None for what is referred to in another way."""
        _, _, path = reference.partition("#/")
        container, _, name = path.partition("/")
        name = name.replace("~1", "/").replace("~0", "~")
        found = self._root.get(container) if container in _DEFINITIONS else None
        return container, name, found.get(name) if isinstance(found, dict) else None

    def _gather(self, schema: Any, names: dict[str, None], required: set[str], seen: set[str]) -> bool:
        """Add the properties that a part and its own parts name. Return False if they do not name all."""
        if not isinstance(schema, dict):
            return True
        own = _properties(schema)
        self._names_left -= len(own) + 1
        if _says_others(schema) or self._names_left < 0:
            return False
        names.update(dict.fromkeys(own))
        required |= _requires(schema)
        if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
            seen.add(reference)
            definition = self._definition(reference)[2]
            if definition is None or not self._gather(definition, names, required, seen):
                return False
        branches = (branch for _, each in _parts(schema) for branch in each)
        return all(self._gather(branch, names, required, seen) for branch in branches)

    def _inner(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema with what lies in it made to end, its parts left aside."""
        made = {key: value for key, value in schema.items() if key != "uniqueItems"}
        for key in _OF_SCHEMAS:
            if isinstance(named := made.get(key), dict):
                made[key] = {name: self.whole(value) for name, value in named.items()}
        for key in ("items", "additionalProperties"):
            if isinstance(made.get(key), dict):
                made[key] = self.whole(made[key])
        for key in ("prefixItems", "items"):
            if isinstance(listed := made.get(key), list):
                made[key] = [self.whole(value) for value in listed]
        return made


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    for keyword in _PARTS:
        if isinstance(branches := schema.get(keyword), list):
            yield keyword, branches


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _requires(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def _says_others(schema: Mapping[str, Any]) -> bool:
    return any(key in schema for key in _OTHERS)


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Add bounds where a value has none and could go on for ever."""
    if "enum" in schema or "const" in schema:
        return schema
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" in kinds or "number" in kinds:
        _bound_number(schema, whole="number" not in kinds)
    most = _LENGTHS.get(str(schema.get("format")))
    if most is not None and "string" in kinds and "maxLength" not in schema:
        schema["maxLength"] = most
    return schema


def _bound_number(schema: dict[str, Any], *, whole: bool) -> None:
    low, high = (
        [schema[key] for key in keys if isinstance(schema.get(key), int | float)]
        for keys in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    )
    if not high and all(value < WHOLE for value in low):
        schema["maximum"] = WHOLE
    if not low and all(value > -WHOLE for value in high):
        schema["minimum"] = -WHOLE
    if not whole and "multipleOf" not in schema and all(abs(each) >= FRACTION for each in (*low, *high) if each):
        schema["multipleOf"] = FRACTION
