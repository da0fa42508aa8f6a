"""The requests of a soak: those whose answer a quiet run tells, those that must be refused, and ever new ones.

Deterministic in the seed. Nothing here knows the model: what its answers are is asked before anything is broken.
Called by `users` and `kill_table`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from cohort.services.bench.chaos.answer_content import Api

_WORDS = (
    *("harbour", "ship", "night", "clock", "river", "stone", "bread", "seven", "letter", "window", "garden", "winter"),
    *("music", "paper", "train", "glass", "mountain", "story", "candle", "bridge", "silver", "island", "number"),
)
SERVED = "soak"
"""The model's name at the pipeline of a soak; the messages API requires one."""
_SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "colour": {"enum": ["red", "green", "blue"]},
        "tall": {"type": "boolean"},
    },
    "required": ["age", "colour", "tall"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "paint", "description": "Paints a thing.", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _FUNCTION}


@dataclass(frozen=True, slots=True)
class Case:
    """A request whose answer is the same each time; `body` without `stream`."""

    name: str
    api: Api
    body: dict[str, Any]

    @property
    def resumable(self) -> bool:
        return self.api in (Api.COMPLETIONS, Api.CHAT) and "prompt_logprobs" not in self.body


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that must be refused with this status and an error that says why."""

    name: str
    path: str
    status: int
    data: bytes
    headers: dict[str, str]


def words(random: Random, count: int) -> str:
    return " ".join(random.choice(_WORDS) for _ in range(count))


def catalogue(seed: int) -> list[Case]:
    """Return requests to all APIs: greedy, seeded, with forms, tools, choices, stop strings and log-probabilities."""
    random = Random(seed)
    cases = [*_completions(random), *_chats(random), *_responses(random), *_messages(random)]
    assert len({case.name for case in cases}) == len(cases)
    return cases


def _seeded(random: Random) -> dict[str, Any]:
    return {
        "temperature": random.choice([0.5, 0.8, 1.0]),
        "top_p": random.choice([0.9, 0.95, 1.0]),
        "seed": random.randrange(1 << 30),
        "max_tokens": random.randint(8, 48),
    }


def _completions(random: Random) -> Iterator[Case]:
    def case(name: str, prompt: Any, **body: Any) -> Case:
        return Case(f"completion: {name}", Api.COMPLETIONS, {"prompt": prompt, "temperature": 0, **body})

    preamble = words(random, 60)
    for number, length in enumerate((1, 5, 20, 80)):
        yield case(f"greedy {number}", words(random, length), max_tokens=random.randint(4, 40))
        yield case(f"seeded {number}", words(random, length), **_seeded(random))
        yield case(f"shared prefix {number}", f"{preamble} {words(random, 4)}", max_tokens=12)
    yield case("long", words(random, 12), max_tokens=200, ignore_eos=True)
    yield case("top-k", words(random, 9), **_seeded(random), top_k=20, min_p=0.05)
    yield case("penalties", words(random, 9), **_seeded(random), presence_penalty=0.5, repetition_penalty=1.1)
    yield case("n", words(random, 9), **_seeded(random), n=3)
    yield case("prompts", [words(random, 6), words(random, 30)], max_tokens=10)
    yield case("stop", words(random, 9), max_tokens=60, stop=["a", "1", "}"])
    yield case("log-probabilities", words(random, 9), max_tokens=16, logprobs=3)
    yield case("bias", words(random, 9), max_tokens=16, logit_bias={"70": 5, "80": -100})
    yield case("regex", words(random, 9), **_seeded(random), guided_regex="[a-f]{4,20}")
    yield case("choice", words(random, 9), max_tokens=30, guided_choice=["yes", "no", "perhaps"])
    yield case("best effort", words(random, 30), max_tokens=30, cohort={"class": "be"})
    yield case("tokens", [random.randrange(20, 250) for _ in range(48)], max_tokens=16)
    yield case("scored prompt", words(random, 9), max_tokens=4, prompt_logprobs=2)


def _chats(random: Random) -> Iterator[Case]:
    def case(name: str, **body: Any) -> Case:
        messages = [{"role": "user", "content": words(random, random.randint(2, 30))}]
        if random.random() < 0.5:
            messages.insert(0, {"role": "system", "content": words(random, 8)})
        return Case(f"chat: {name}", Api.CHAT, {"messages": messages, "temperature": 0, **body})

    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    for number in range(3):
        yield case(f"greedy {number}", max_tokens=random.randint(4, 40))
        yield case(f"seeded {number}", **_seeded(random))
    yield case("n", **_seeded(random), n=2)
    yield case("stop", max_tokens=60, stop=["e"])
    yield case("log-probabilities", max_tokens=12, logprobs=True, top_logprobs=2)
    yield case("schema", **{**_seeded(random), "max_tokens": 600}, response_format=form)
    yield case("tool", max_tokens=600, tools=[_TOOL], tool_choice="required", parallel_tool_calls=False)
    named = {"type": "function", "function": {"name": "paint"}}
    yield case("named tool", **{**_seeded(random), "max_tokens": 600}, tools=[_TOOL], tool_choice=named)


def _responses(random: Random) -> Iterator[Case]:
    def case(name: str, **body: Any) -> Case:
        given = {"input": words(random, random.randint(2, 30)), "temperature": 0, "store": False, **body}
        return Case(f"response: {name}", Api.RESPONSES, given)

    yield case("greedy", max_output_tokens=24)
    yield case("instructions", max_output_tokens=24, instructions=words(random, 8))
    form = {"format": {"type": "json_schema", "name": "thing", "schema": _SCHEMA}}
    yield case("schema", max_output_tokens=600, text=form)
    tool = {"type": "function", **_FUNCTION}
    yield case("tool", max_output_tokens=600, tools=[tool], tool_choice="required", parallel_tool_calls=False)


def _messages(random: Random) -> Iterator[Case]:
    def case(name: str, **body: Any) -> Case:
        turns = [{"role": "user", "content": words(random, random.randint(2, 30))}]
        given = {"model": SERVED, "messages": turns, "temperature": 0, "max_tokens": 24}
        return Case(f"message: {name}", Api.MESSAGES, {**given, **body})

    yield case("greedy")
    yield case("system", system=words(random, 8))
    yield case("stop", stop_sequences=["e"], max_tokens=60)
    tool = {"name": "paint", "description": "Paints a thing.", "input_schema": _SCHEMA}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    yield case("tool", tools=[tool], tool_choice=choice, max_tokens=600)


def refusal(random: Random, key: str) -> Refusal:
    """Return a request that must not be served, with new keys, names and paths, so that no memory of them may grow."""
    good = {"prompt": words(random, 4), "max_tokens": 4}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    odd = f"{random.randrange(1 << 40):x}"
    made: list[tuple[str, str, int, Any, dict[str, str]]] = [
        ("too long", Api.COMPLETIONS, 400, {**good, "prompt": words(random, 20_000)}, headers),
        ("wrong key", Api.COMPLETIONS, 401, good, {**headers, "Authorization": f"Bearer {odd}"}),
        ("no key", Api.CHAT, 401, good, {"Content-Type": "application/json"}),
        ("unknown model", Api.COMPLETIONS, 404, {**good, "model": odd}, headers),
        ("unknown field", Api.COMPLETIONS, 400, {**good, odd: 1}, headers),
        ("wrong type", Api.COMPLETIONS, 400, {**good, "max_tokens": odd}, headers),
        ("unknown path", f"/v1/{odd}", 404, good, headers),
        ("bad schema", Api.COMPLETIONS, 400, {**good, "guided_json": {"type": odd}}, headers),
        ("bad regex", Api.COMPLETIONS, 400, {**good, "guided_regex": f"({odd}"}, headers),
        ("no messages", Api.MESSAGES, 400, {"max_tokens": 4}, headers),
        ("unknown response", Api.RESPONSES, 404, {"input": "a", "previous_response_id": f"resp_{odd}"}, headers),
        ("not JSON", Api.CHAT, 415, good, {**headers, "Content-Type": "text/plain"}),
    ]
    if random.randrange(len(made) + 1) == 0:
        cut = json.dumps(good).encode()[: random.randint(0, 20)]
        return Refusal("refused: bad JSON", random.choice(list(Api)), 400, cut, headers)
    name, path, status, body, sent = random.choice(made)
    return Refusal(f"refused: {name}", str(path), status, json.dumps(body).encode(), sent)


def fresh(random: Random) -> Case:
    """Return a request never sent before: new prompts, forms and tools; its second answer must be the first one's."""
    odd = f"{random.randrange(1 << 40):x}"
    body: dict[str, Any] = {**_seeded(random), "prompt": f"{odd} {words(random, random.randint(1, 100))}"}
    match random.randrange(5):
        case 0:
            body |= {"guided_regex": f"{odd}[a-f]{{2,8}}"}
        case 1:
            body |= {"guided_json": {"enum": [odd, f"{odd}{odd}"]}}
        case 2:
            turns = [{"role": "user", "content": body.pop("prompt")}]
            function = {"name": f"f{odd}", "parameters": _SCHEMA}
            tools = [{"type": "function", "function": function}]
            body |= {"messages": turns, "max_tokens": 600, "tools": tools, "tool_choice": "required"}
            return Case("fresh: tool", Api.CHAT, {**body, "parallel_tool_calls": False})
        case _:
            pass
    return Case("fresh: completion", Api.COMPLETIONS, body)
