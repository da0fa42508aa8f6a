"""`cohort replay`: recordings of live processes, replayed and compared, or stepped through call by call.

The comparison is `common/machines/replayer.py`'s; here it becomes lines to read. Called by `__main__.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cohort.common.errors import ConfigError
from cohort.common.machines.recorder import Call
from cohort.common.machines.replayer import Replay, Replayed, Step

_SHOWN = 6
"""Number of items of a list that are shown; the rest is only counted."""
_LONGEST = 600
"""Maximum length of an effect that is no JSON, in characters."""


def summary(found: Replayed) -> str:
    verdict = found.difference or "all equal"
    steps = f"{found.plans} steps with {found.rows} rows, " if found.machine == "worker" else ""
    return f"{found.machine} {found.instance}: {found.calls} calls, {steps}{found.effects} effects: {verdict}"


def show(path: Path, line: int, around: int) -> Iterator[str]:
    """Print events and effects of the calls from `around` before a line of the recording to as many after it. A call
    whose replay differs shows both. Raises `ConfigError` for a line that is no call."""
    replayed = Replay(path)
    began_s, last = None, 1
    for step in replayed.steps():
        last = step.line
        began_s = step.call.now_s if began_s is None else began_s
        if step.line > line + around:
            return
        if step.line >= line - around:
            yield from _step(step, began_s)
    if not 2 <= line <= last:
        raise ConfigError(f"--show {line}: the calls of {path} are lines 2 to {last}")


def _step(step: Step, began_s: float) -> Iterator[str]:
    yield f"line {step.line}, {step.call.now_s - began_s:+.6f} s"
    for event in msgspec.json.decode(step.call.events):
        yield f"    told     {_event(event)}"
    for name, call in (
        [("answered", step.call)] if step.equal else [("recorded", step.call), ("replayed", step.replayed)]
    ):
        yield from (f"    {name} {text}" for text in _answers(call))


def _answers(call: Call) -> list[str]:
    return [f"raised {call.raised}"] if call.raised else [_effect(effect) for effect in call.effects]


def _event(event: dict[str, Any]) -> str:
    """Format an event as `Received Submit from gateway: …`, not as the JSON it is."""
    fields = dict(event)
    name = str(fields.pop("event"))
    message = fields.pop("message", None)
    if message is None:
        return f"{name} {_short(fields)}" if fields else name
    fields_of = dict(message)
    kind = fields_of.pop("type", "")
    peer = f"from {fields['sender']}" if "sender" in fields else f"for {fields.get('peer')}"
    return f"{name} {kind} {peer}: {_short(fields_of)}"


def _effect(effect: str) -> str:
    name, _, rest = effect.partition(" ")
    try:
        fields = msgspec.json.decode(rest)
    except msgspec.DecodeError:
        return effect if len(effect) <= _LONGEST else f"{effect[:_LONGEST]} … ({len(effect)} characters)"
    if name != "Send":
        return f"{name} {_short(fields)}"
    message = dict(fields["message"])
    return f"Send {message.pop('type', '')} to {fields['peer']}: {_short(message)}"


def _short(value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{key}={_nested(item)}" for key, item in value.items())
        case list():
            shown = [_nested(item) for item in itertools.islice(value, _SHOWN)]
            return ", ".join([*shown, f"… {len(value)} in all"] if len(value) > _SHOWN else shown)
        case _:
            return repr(value) if isinstance(value, str) and (not value or " " in value) else str(value)


def _nested(value: Any) -> str:
    text = _short(value)
    return f"{{{text}}}" if isinstance(value, dict) else f"[{text}]" if isinstance(value, list) else text
