"""Live: answers that keep to a form, also where the cache makes them start over."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e.equality.golden import kv_bytes
from tests.e2e.pipeline import Pipeline

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 2, "maxItems": 3},
        "story": {"type": "string", "minLength": 40, "maxLength": 60},
    },
    "required": ["name", "age", "hobbies", "story"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def asked(index: int) -> dict[str, Any]:
    """Of some 60 and 80 tokens: five of them are more than the cache holds."""
    return {
        "prompt": f"Person number {index}. " + "Describe an invented person with a name, an age and hobbies. " * 4,
        "max_tokens": 80,
        "temperature": 0.7,
        "seed": index,
        "guided_json": PERSON,
    }


def chat(pipeline: Pipeline, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{pipeline.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return dict(json.loads(response.read())["choices"][0])


def test_answers_conform_and_are_the_same_after_preemptions(tmp_path: Path, small_model: Path) -> None:
    overrides = {
        "engine": {"prefill_chunk": 64, "preemption": "recompute"},
        "kv": {"memory_bytes": kv_bytes(small_model, 26), "prefix_caching": False},
    }
    bodies = [asked(index) for index in range(5)]
    made = Pipeline(tmp_path, small_model, overrides, preset="unified")
    made.held.add("unified-0")
    with made as pipeline:
        alone = pipeline.complete_all(bodies, concurrency=2)
        together = pipeline.complete_together(bodies, "unified-0")
        assert [answer.error for answer in (*alone, *together)] == [""] * 10
        assert [answer.text for answer in together] == [answer.text for answer in alone]
        pipeline.wait_for("unified-0", "preemptions_total", 1)
        assert sum(answer.finish == "stop" for answer in alone) >= 2
        for answer in alone:
            if answer.finish == "stop":
                jsonschema.validate(json.loads(answer.text), PERSON)
        weather = [{"role": "user", "content": "What is the weather in Paris?"}]
        called = chat(pipeline, messages=weather, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert called["finish_reason"] == "tool_calls" and called["message"]["content"] is None
        [call] = called["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        jsonschema.validate(json.loads(call["function"]["arguments"]), TOOLS[0]["function"]["parameters"])  # type: ignore[index]
        pipeline.assert_nothing_left()
