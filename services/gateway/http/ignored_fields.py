"""Fields that a request is answered without: unknown ones, and known ones that change nothing here.

    decode, chat_of ─▶ note ─▶ the names of the request in work ─▶ a header, and the log once for each name

A field of another server comes with every request of some clients. It is left out before the strict decoder, which
refuses what it does not know, so that a body without any costs nothing. Called by `parsing.decode`, by what reads a
body, and as a middleware.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from msgspec import inspect

from cohort.services.gateway.http.bodies import CohortOptions

IGNORED_HEADER = "x-cohort-ignored-fields"
NAMES = web.RequestKey("ignored_fields", dict[str, str])
"""Ignored fields of a request, each with the field that was meant, or ""."""
MOST_NAMES = 16
"""Names in one header."""
_MOST_CHARACTERS = 64
MOST_LOGGED = 256
"""Names in the log of one process: a client can invent any number."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_CLOSE = 0.85
"""Likeness of a slip: `max_tokenz` and `temprature`, but not another server's `top_a`."""

_noted: ContextVar[dict[str, str] | None] = ContextVar("ignored fields", default=None)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


def note(name: str, meant: str = "") -> None:
    """Name a field that the request in work is answered without. No effect outside of `IgnoredFields.noted`."""
    names = _noted.get()
    if names is not None and len(names) < MOST_NAMES:
        names.setdefault(_UNSAFE.sub("?", name[:_MOST_CHARACTERS]), meant)


class IgnoredFields:
    """Reporter of ignored fields: in each answer's header, and in the log once for each name."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log
        self._logged: set[str] = set()

    @contextmanager
    def noted(self) -> Iterator[dict[str, str]]:
        """Yield the names noted in this block, its tasks and threads; log them at its end."""
        names: dict[str, str] = {}
        token = _noted.set(names)
        try:
            yield names
        finally:
            _noted.reset(token)
            for name, meant in names.items():
                if name not in self._logged and len(self._logged) < MOST_LOGGED:
                    self._logged.add(name)
                    hint = {"meant": meant} if meant else {}
                    self._log.warning("a field of requests is ignored; said once", field=name, **hint)

    def middleware(self) -> Middleware:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            with self.noted() as request[NAMES]:
                return await handler(request)

        return middleware

    async def name(self, request: web.Request, response: web.StreamResponse) -> None:
        """Name the request's ignored fields in its answer's header, as aiohttp's signal `on_response_prepare`."""
        if names := request.get(NAMES):
            response.headers[IGNORED_HEADER] = ", ".join(_shown(name, meant) for name, meant in names.items())


def _shown(name: str, meant: str) -> str:
    return f"{name};meant={meant}" if meant else name


def close_to(name: str, known: Collection[str]) -> str:
    """Return the known field that a client may have meant, or ""."""
    return next(iter(difflib.get_close_matches(name[:_MOST_CHARACTERS], known, 1, _CLOSE)), "")


Structs = tuple[type[msgspec.Struct], ...]


@functools.cache
def _fields(structs: Structs) -> Mapping[str, Structs]:
    """Return the fields of structs, one of which a value is, each with the structs that its own value, or the items of
    it, may be."""
    found: dict[str, Structs] = {}
    for struct in structs:
        kind = inspect.type_info(struct)
        assert isinstance(kind, inspect.StructType), struct
        if kind.tag_field is not None:
            found[kind.tag_field] = ()
        for field in kind.fields:
            inner = tuple(_structs_in(field.type))
            found[field.encode_name] = () if CohortOptions in inner else inner
    return found


def _structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    match kind:
        case inspect.StructType():
            yield kind.cls
        case inspect.ListType():
            yield from _structs_in(kind.item_type)
        case inspect.Metadata():
            yield from _structs_in(kind.type)
        case inspect.UnionType():
            for each in kind.types:
                yield from _structs_in(each)


def without_unknown(data: bytes, struct: type[msgspec.Struct], unknown: dict[str, str]) -> bytes:
    """Return the JSON of a struct without unknown fields, which are added to `unknown` with what was meant. Values that
    hold no struct stay as they are, undecoded. What is no object is left to the decoder, and so is `cohort`, which no
    other server has: an unknown field in there is a mistake."""
    return bytes(_pruned(msgspec.Raw(data), (struct,), "", unknown))


def _pruned(data: msgspec.Raw, structs: Structs, where: str, unknown: dict[str, str]) -> msgspec.Raw:
    match bytes(memoryview(data)[:64]).lstrip()[:1]:
        case b"[":
            items = [_pruned(item, structs, where, unknown) for item in _list.decode(data)]
            return msgspec.Raw(_encode(items))
        case b"{":
            known, kept = _fields(structs), dict[str, msgspec.Raw]()
            for name, value in _object.decode(data).items():
                path = f"{where}{name}"
                if name not in known:
                    few = len(unknown) < MOST_NAMES
                    unknown[path] = close_to(name, known) if few else ""
                elif inner := known[name]:
                    kept[name] = _pruned(value, inner, f"{path}.", unknown)
                else:
                    kept[name] = value
            return msgspec.Raw(_encode(kept))
    return data
