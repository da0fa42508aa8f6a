"""An answer's text, read as its model's family writes it: content, reasoning and calls of tools, in their order.

    start ──▶ reasoning ──▶ content ◀──▶ call: name, arguments …        by marks around each
          └▶ header ◀──▶ body: content, reasoning or arguments          by channels (gpt-oss)

One reader for all rows of `requests/formats.py`, fed with any pieces. It takes one character at a time and never looks
back, so how a stream was cut can make no difference, and work is linear. A call is announced as soon as its name is
known and its arguments begin, and they follow as they come. A text that only began like a call is content; what is held
until that is known is bounded. White space around reasoning and calls is dropped. Called by `answering.py`; knows no
tokens and no HTTP.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import msgspec

from cohort.services.gateway.generation.answer_parts import CallDelta, Part, Reasoning, call_id
from cohort.services.gateway.generation.choice import StopAutomaton
from cohort.services.gateway.requests import formats
from cohort.services.gateway.requests.formats import AnswerFormat, Marks, Tags

END = ""
"""Input of a reader after the last character."""
_HEAD_CHARACTERS = 512
"""Characters within which arguments must begin; later ones are read when the call is whole."""
_HELD_CHARACTERS = 1 << 16
"""Characters of a call that are held while it is not known to be one; a longer text is content."""
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]{1,256})")

_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
    str: "string",
}
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Words of Python that models write for JSON's."""

_Kind = type[str] | type[Reasoning] | type[CallDelta]
Reading = Generator[None, str, None]
Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of arguments by function, whose types say how a tagged value is read."""


class AnswerReader:
    def __init__(
        self,
        format_: AnswerFormat,
        *,
        calls: bool,
        parallel: bool = True,
        ids: str = "",
        in_reasoning: bool = False,
        schemas: Schemas | None = None,
    ) -> None:
        """`calls`: whether calls are read; `parallel` False ends with the first. `ids`: source of the calls' ids; "" =
        random. `in_reasoning`: whether the prompt ends with the mark that begins reasoning."""
        self._format = format_
        self._ids = ids or secrets.token_hex(16)
        self._reads_calls = calls and format_.reads_calls
        self._parallel = parallel
        self._schemas = schemas or {}
        self._parts: list[Part] = []
        self._kind: _Kind = str
        self._pieces: list[str] = []
        """Text of the last part, of `_kind`, that no part has yet."""
        self._white = ""
        self._again = ""
        """Characters that the next stage reads before the stream's own."""
        self.calls = 0
        """Calls that have begun."""
        self.in_reasoning = in_reasoning
        self.is_plain = False
        """Whether all that follows is content."""
        self.ended = False
        """Whether the rest is ignored."""
        self._reading = self._channels() if format_.body == "channels" else self._marked()
        next(self._reading)

    def feed(self, text: str) -> list[Part]:
        """Return what the text adds, neighbours of one kind joined."""
        self.write(text)
        return self.found()

    def write(self, text: str) -> None:
        for character in text:
            if self.ended:
                break
            self._send(character)

    def finish(self) -> list[Part]:
        """End the answer: text held back is content after all."""
        if not self.ended:
            self._send(END)
            self.ended = True
        return self.found()

    def _send(self, character: str) -> None:
        try:
            self._reading.send(character)
        except StopIteration:
            self.ended = True

    def found(self) -> list[Part]:
        """Return what was added since this was called last."""
        self._end_part()
        found, self._parts = self._parts, []
        return found

    def _emit_text(self, text: str) -> None:
        self._put(str, text)

    def _emit_reasoning(self, text: str) -> None:
        self._put(Reasoning, text)

    def _emit_arguments(self, text: str) -> None:
        self._put(CallDelta, text)

    def _put(self, kind: _Kind, text: str) -> None:
        if text:
            if kind is not self._kind:
                self._end_part()
                self._kind = kind
            self._pieces.append(text)

    def _end_part(self) -> None:
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._kind is CallDelta:
            last = self._parts[-1] if self._parts else None
            if isinstance(last, CallDelta) and not last.arguments:
                last.arguments = text  # with the call's name
            else:
                self._parts.append(CallDelta(self.calls - 1, arguments=text))
        else:
            self._parts.append(text if self._kind is str else Reasoning(text))

    def _emit_call(self, name: str, id_: str = "") -> None:
        self._white = ""
        self._end_part()
        self._parts.append(CallDelta(self.calls, id_ or call_id(self._format, self._ids, self.calls), name))
        self.calls += 1

    def _reject(self, text: str) -> None:
        """Return text that only began like a call to the content."""
        self._emit_text(self._white + text)
        self._white = ""

    # -- Content and reasoning -----------------------------------------------------------------------------------

    def _marked(self) -> Reading:
        format_ = self._format
        reasoning = next(iter(format_.reasoning), Marks())
        if reasoning.begin and (self.in_reasoning or (yield from self._begins_with(reasoning.begin))):
            self.in_reasoning = True
            ends = [reasoning.end, format_.section.begin if self._reads_calls else ""]
            end = yield from self._text_until(_marks(*ends), self._emit_reasoning, strip=True)
            self.in_reasoning = False
            if end == reasoning.end:
                yield from self._skip_white()
            else:
                self._again = end  # a model that forgets to end its reasoning
        if self._reads_calls and format_.bare:
            yield from self._bare()
        elif self._reads_calls:
            yield from self._content_and_calls()
        else:
            while (yield from self._text_until(_marks(*format_.dropped), self._emit_text)):
                pass

    def _begins_with(self, mark: str) -> Generator[None, str, bool]:
        """Return whether the answer begins with the mark, white space before it aside; if not, it is read again."""
        while (character := (yield)) != END:
            self._again += character
            if (begun := self._again.lstrip()) == mark:
                self._again = ""
                return True
            if not mark.startswith(begun) or len(self._again) > _HEAD_CHARACTERS:
                return False
        self._emit_text(self._taken(all_=True))
        return False

    def _taken(self, *, all_: bool = False) -> str:
        """Return what is to be read again, or its first character."""
        length = len(self._again) if all_ else 1
        taken, self._again = self._again[:length], self._again[length:]
        return taken

    def _skip_white(self) -> Reading:
        while (character := (yield)) != END:
            if not character.isspace():
                self._again = character
                return

    def _text_until(
        self, marks: StopAutomaton, emit: Callable[[str], None], *, strip: bool = False
    ) -> Generator[None, str, str]:
        """Read text; return the mark that ends it, "" at the answer's end. White space is held until it is known that
        no mark follows, which drops it; `strip` drops it at both ends of the text. Without marks the text is plain."""
        white: list[str] = []  # held before `tail`, which is the beginning of a mark
        tail, state, begun = "", 0, False
        self.is_plain = not len(marks)
        while (character := (self._taken() if self._again else (yield))) != END:
            if self.is_plain:
                emit(character)
                continue
            state = marks.after(state, character)
            tail += character
            if length := marks.match[state]:
                self._white = "".join(white)
                return tail[-length:]
            settled, tail = tail[: len(tail) - marks.depth[state]], tail[len(tail) - marks.depth[state] :]
            if strip and not begun:
                settled = settled.lstrip()
            if content := settled.rstrip():
                emit("".join(white) + content)
                white, begun = [], True
            if len(content) < len(settled):
                white.append(settled[len(content) :])
        if tail or not (strip or self.calls):
            emit("".join(white) + tail)
        return ""

    # -- Calls ---------------------------------------------------------------------------------------------------

    def _content_and_calls(self) -> Reading:
        format_ = self._format
        begin = format_.call.begin
        marks = _marks(begin, format_.section.begin, format_.section.end, *format_.dropped)
        while mark := (yield from self._text_until(marks, self._emit_text)):
            before = self.calls
            if mark == begin:
                yield from self._call(mark) if format_.tags is None else self._tagged_call(format_.tags)
            if self.calls > before and not self._parallel:
                return

    def _call(self, mark: str) -> Reading:
        """Read what follows the mark of a call: an object, a list of them, or a name before its arguments."""
        end, head, raw = self._format.call.end, self._format.head, ""
        while (character := (yield)) != END:
            raw += character
            if character == "[" and not raw[:-1].strip():
                yield from self._list(mark + raw)
                return
            if character == "{":
                if head and (named := re.fullmatch(head, raw[:-1])):
                    self._emit_named(named)
                    yield from self._arguments()
                    yield from self._skip_past(end)
                    return
                text = "{" if raw[:-1].strip() else (yield from self._object(end))
                self._reject(mark + raw[:-1] + text if text else "")
                return
            if end and raw.endswith(end):
                if head and (named := re.fullmatch(head, raw[: -len(end)])):
                    self._emit_named(named)
                    self._emit_arguments("{}")
                    return
                break
            if len(raw) > _HEAD_CHARACTERS or not (head or character.isspace()):
                break
        self._reject(mark + raw)

    def _emit_named(self, named: re.Match[str]) -> None:
        self._emit_call(named["name"], named.groupdict().get("id") or "")

    def _list(self, before: str) -> Reading:
        while (character := (yield)) != END:
            if character == "{":
                if text := (yield from self._object("")):
                    self._reject(before + text)
                    return
                before = ""
                if not self._parallel:
                    return
            elif character == "]" or not (character == "," or character.isspace()):
                if character != "]" or before:
                    self._reject(before + character)
                else:
                    yield from self._skip_next(self._format.call.end)
                return
        self._reject(before)

    def _bare(self) -> Reading:
        """Read calls at the beginning, or the whole answer as text."""
        begin, end = self._format.call.begin, self._format.call.end
        fences = (begin, end, *self._format.fences)
        lead: list[str] = []  # white space included
        begun = ""  # of a fence
        while (character := (self._taken() if self._again else (yield))) != END:
            if character == "{":
                if text := (yield from self._object("")):
                    self._again = "".join(lead) + text
                    break
                lead, begun = [], ""
                if not self._parallel:
                    return
                continue
            lead.append(character)
            if character.isspace() or (character == ";" and self.calls and not begun):
                if begun and begun not in fences:
                    self._again = "".join(lead)
                    break
                begun = ""
                if self.calls:
                    lead = []
            else:
                begun += character
                if begun == begin and not end:
                    lead, begun = [], ""
                elif not any(fence.startswith(begun) for fence in fences):
                    self._again = "".join(lead)
                    break
        else:
            self._emit_text("".join(lead) if not self.calls or begun not in ("", end) else "")
            return
        self._emit_text(self._taken(all_=True))
        yield from self._text_until(_marks(), self._emit_text)

    def _object(self, end: str) -> Generator[None, str, str]:
        """Read a call after its first brace. Return "" if it is one, which is read to `end`, or to its own last brace;
        else its text."""
        raw, depth = ["{"], 1
        in_string = escaped = False
        while (character := (yield)) != END:
            raw.append(character)
            if len(raw) > _HELD_CHARACTERS or (end and character == end[-1] and "".join(raw[-len(end) :]) == end):
                break
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
                continue
            in_string = character == '"'
            if character == "{":
                depth += 1
                if depth == 2 and (head := _head(raw)):
                    self._emit_call(_text(head))
                    yield from self._arguments()
                    yield from self._skip_past(end) if end else self._balanced(lambda _: None)
                    return ""
            elif character == "}":
                depth -= 1
                if not depth:
                    if not self._whole_call(text := "".join(raw)):
                        return text
                    yield from self._skip_past(end)
                    return ""
        return "".join(raw)

    def _whole_call(self, text: str) -> bool:
        """Read a call with its keys in another order, or its arguments as a string; return whether it is one."""
        try:
            call = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False
        if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
            return False
        arguments = call.get("arguments", call.get("parameters"))
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict | str):
            return False
        self._emit_call(name)
        self._emit_arguments(arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())
        return True

    def _arguments(self) -> Reading:
        """Read to the brace that closes the one that was read."""
        self._emit_arguments("{")
        yield from self._balanced(self._emit_arguments)

    def _balanced(self, emit: Callable[[str], None]) -> Reading:
        depth = 1
        in_string = escaped = False
        while depth and (character := (yield)) != END:
            emit(character)
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1

    def _skip_past(self, end: str) -> Reading:
        last = ""
        while not last.endswith(end) and (character := (yield)) != END:
            last = (last + character)[-len(end) :]

    def _skip_next(self, mark: str) -> Reading:
        """Skip the mark if it comes next; else what comes is content."""
        read = ""
        while mark and read.strip() != mark and (character := (yield)) != END:
            read += character
            if not mark.startswith(read.strip()) or len(read) > _HEAD_CHARACTERS:
                self._again = read
                return

    # -- Calls with tags -----------------------------------------------------------------------------------------

    def _tagged_call(self, tags: Tags) -> Reading:
        begin, end, raw = tags.name.begin.strip(), tags.name.end.strip(), ""
        stops = (end,) if end else (tags.key.begin, self._format.call.end, "\n")
        while (character := (yield)) != END:
            raw += character
            stop = next((stop for stop in stops if raw.endswith(stop) and raw.strip()), "")
            name = raw.removesuffix(stop).strip()
            if stop and name.startswith(begin) and re.fullmatch(formats.NAME, name := name[len(begin) :]):
                self._emit_call(name)
                yield from self._tagged_arguments(name, tags, stop)
                return
            if stop or len(raw) > _HEAD_CHARACTERS or not begin.startswith(name[: len(begin)]):
                break
        self._reject(self._format.call.begin + raw)

    def _tagged_arguments(self, name: str, tags: Tags, mark: str) -> Reading:
        """Read arguments to the call's end; `mark` was read last."""
        last = tags.end.strip() or self._format.call.end
        marks, schemas, before = _marks(last, tags.key.begin), self._schemas.get(name, {}), "{"
        while mark != last:
            if mark != tags.key.begin:
                if not (mark := (yield from self._text_until(marks, lambda _: None))):
                    return
                continue
            key, is_whole = yield from self._raw_until(tags.key.end.strip())
            if is_whole and tags.value.begin:
                _, is_whole = yield from self._raw_until(tags.value.begin)
            if not is_whole:
                return
            self._emit_arguments(f"{before}{json.dumps(key.strip(), ensure_ascii=False)}: ")
            before, mark = ", ", ""
            yield from self._tagged_value(tags.value, schemas.get(key.strip()))
        self._emit_arguments("{}" if before == "{" else "}")
        if tags.end:
            yield from self._skip_past(self._format.call.end)

    def _tagged_value(self, around: Marks, schema: Any) -> Reading:
        """Read a value: a text as it comes, all else when it is whole, as JSON if it is."""
        is_text, begun = isinstance(schema, Mapping) and schema.get("type") == "string", ""
        if not is_text:
            begun, is_whole = yield from self._raw_until(around.end.strip())
            if is_whole:
                self._emit_arguments(_json_of(begun if around.begin else _unwrapped(begun), schema))
                return
        self._emit_arguments(f'"{_escaped(begun)}')
        marks, tail, state = _marks(around.end, around.end.strip()), "", 0
        at_newline = is_text and not around.begin  # one before the text is not its own
        while (character := (yield)) != END:
            if at_newline:
                at_newline = False
                if character == "\n":
                    continue
            state = marks.after(state, character)
            tail += character
            if length := marks.match[state]:
                self._emit_arguments(f'{_escaped(tail[:-length])}"')
                return
            self._emit_arguments(_escaped(tail[: len(tail) - marks.depth[state]]))
            tail = tail[len(tail) - marks.depth[state] :]
        self._emit_arguments(_escaped(tail))

    def _raw_until(self, end: str) -> Generator[None, str, tuple[str, bool]]:
        """Return the text before `end`, or all of it and False where it is too long or the answer ends."""
        raw: list[str] = []
        while len(raw) <= _HELD_CHARACTERS and (character := (yield)) != END:
            raw.append(character)
            if character == end[-1] and "".join(raw[-len(end) :]) == end:
                return "".join(raw[: -len(end)]), True
        return "".join(raw), False

    # -- Channels ------------------------------------------------------------------------------------------------

    def _channels(self) -> Reading:
        ends = _marks(formats.END, formats.CALL, formats.RETURN, formats.START, formats.CHANNEL)
        written, header = set[_Kind](), ""
        while True:
            while not header.endswith(formats.MESSAGE):
                if (character := (yield)) == END:
                    return
                header += character
                begun = header.lstrip()
                if not ("to=".startswith(begun[:3]) or begun[0] == "<") or len(header) > _HEAD_CHARACTERS:  # no Harmony
                    self._emit_text(header)
                    yield from self._text_until(_marks(), self._emit_text)
                    return
            kind, emit = self._body(header)
            if kind in written:
                emit("\n")
            written |= {kind} - {CallDelta}
            self.in_reasoning = kind is Reasoning
            mark = yield from self._text_until(ends, emit)
            emit(self._white)
            self._white, self.in_reasoning = "", False
            if kind is CallDelta and not self._parallel:
                return
            header = mark if mark in (formats.START, formats.CHANNEL) else ""

    def _body(self, header: str) -> tuple[_Kind, Callable[[str], None]]:
        """Return the kind of the body that follows a header, and what takes its text."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and self._reads_calls:
            self._emit_call(recipient[1])
            return CallDelta, self._emit_arguments
        if channel is not None and channel[1] == "analysis":
            return Reasoning, self._emit_reasoning
        return str, self._emit_text


@functools.cache
def _automaton(texts: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(texts)


def _marks(*texts: str) -> StopAutomaton:
    return _automaton(tuple(text for text in texts if text))


def _head(raw: Sequence[str]) -> str:
    """Return the name of a call whose arguments begin with the last character, in quotes; "" if none do, or late."""
    head = _HEAD.fullmatch("".join(raw)) if len(raw) <= _HEAD_CHARACTERS else None
    return "" if head is None else head[1]


def _text(quoted: str) -> str:
    """Decode a JSON string, or take off its quotes if it is not valid."""
    try:
        return str(msgspec.json.decode(quoted))
    except (msgspec.DecodeError, UnicodeError):
        return quoted[1:-1]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unwrapped(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _json_of(text: str, schema: Any) -> str:
    """Return a tagged value's JSON: its text if that is JSON, unless the schema has strings and not this type; else a
    string."""
    word = _WORDS.get(text.strip(), text.strip())
    try:
        kind = _TYPES[type(msgspec.json.decode(word))]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kinds = _kinds(schema)
    is_meant = kind in kinds or (kind == "integer" and "number" in kinds)
    return word if is_meant or "string" not in kinds else json.dumps(text, ensure_ascii=False)


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema names, its alternatives included."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if isinstance(part, Mapping) and isinstance(part.get("type"), str):
            kinds.add(part["type"])
    return kinds
