"""Clients of other projects against the running pipeline, by their scripts in docs/clients.md.

They are too heavy for the project's own environment: each runs in one of its own, and is skipped where there is none
(`client_scripts.py`). A client that breaks is a defect of the server.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients.client_scripts import FOLDERS, WITHOUT, names_there, run_there, script_of
from tests.e2e.pipeline import Pipeline

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get(FOLDERS), reason=WITHOUT),  # before a pipeline is started for nothing
]


def test_langchain_chats_streams_parses_and_calls(standard: Pipeline, tmp_path: Path) -> None:
    names = {
        "answer": "answer.content",
        "tokens": "answer.usage_metadata['output_tokens']",
        "streamed": "streamed",
        "pet": "pet.model_dump()",
        "call": "call",
        "told": "told.content",
    }
    found = names_there("langchain", "LangChain", names, standard, tmp_path)
    assert found["answer"] and 0 < found["tokens"] <= 80 and found["streamed"] and found["told"]
    assert isinstance(found["pet"]["name"], str) and 0 <= found["pet"]["age"] <= 99
    assert found["call"]["name"] == "get_weather" and isinstance(found["call"]["args"]["city"], str)


def test_litellm_chats_streams_parses_calls_and_responds(standard: Pipeline, tmp_path: Path) -> None:
    names = {
        "answer": "answer.choices[0].message.content",
        "tokens": "answer.usage.completion_tokens",
        "streamed": "rebuilt.choices[0].message.content",
        "streamed_tokens": "rebuilt.usage.completion_tokens",
        "pet": "pet.model_dump()",
        "name": "call.function.name",
        "arguments": "arguments",
        "continued": "continued.choices[0].text",
        "responded": "responded.output_text",
    }
    found = names_there("litellm", "LiteLLM", names, standard, tmp_path)
    assert found["answer"] and found["streamed"] and found["continued"] and found["responded"]
    assert 0 < found["tokens"] <= 40 and 0 < found["streamed_tokens"] <= 40
    assert isinstance(found["pet"]["name"], str) and 0 <= found["pet"]["age"] <= 99
    assert found["name"] == "get_weather" and isinstance(found["arguments"]["city"], str)


def test_llamaindex_chats_streams_parses_and_calls(standard: Pipeline, tmp_path: Path) -> None:
    names = {
        "answer": "answer.message.content",
        "tokens": "answer.raw.usage.completion_tokens",
        "streamed": "streamed",
        "pet": "pet.model_dump()",
        "name": "call.tool_name",
        "arguments": "call.tool_kwargs",
        "completed": "completed",
    }
    found = names_there("llamaindex", "LlamaIndex", names, standard, tmp_path)
    assert found["answer"] and found["streamed"] and found["completed"] and 0 < found["tokens"] <= 80
    assert isinstance(found["pet"]["name"], str) and 0 <= found["pet"]["age"] <= 99
    assert found["name"] == "get_weather" and isinstance(found["arguments"]["city"], str)


def test_instructor_parses_in_the_modes_that_a_grammar_binds(standard: Pipeline, tmp_path: Path) -> None:
    names = {"pets": "{mode: pet.model_dump() for mode, pet in pets.items()}"}
    pets = names_there("instructor", "Instructor", names, standard, tmp_path)["pets"]
    assert len(pets) == 4 and all(_is_a_pet(pet) for pet in pets.values())


def test_pydantic_ai_parses_by_tools_and_by_schemas(standard: Pipeline, tmp_path: Path) -> None:
    names = {"pets": "[pet.model_dump() for pet in pets]", "answer": "answer"}
    found = names_there("pydantic-ai", "Pydantic AI", names, standard, tmp_path)
    assert len(found["pets"]) == 4 and all(map(_is_a_pet, found["pets"])) and found["answer"]


def test_agents_of_openai_call_and_parse(standard: Pipeline, tmp_path: Path) -> None:
    names = {"pets": "[pet.model_dump() for pet in pets]", "answers": "answers", "cities": "cities"}
    found = names_there("openai-agents", "OpenAI Agents SDK", names, standard, tmp_path)
    assert len(found["pets"]) == 2 and all(map(_is_a_pet, found["pets"])) and all(found["answers"])
    assert len(found["cities"]) >= 2 and all(isinstance(city, str) for city in found["cities"])


def test_langgraph_goes_from_call_to_answer(standard: Pipeline, tmp_path: Path) -> None:
    names = {"kinds": "[message.type for message in messages]", "told": "messages[2].content"}
    found = names_there("langgraph", "LangGraph", names, standard, tmp_path)
    assert found["kinds"] == ["human", "ai", "tool", "ai"] and "18 degrees" in found["told"]


def test_llm_answers_and_keeps_to_a_schema(standard: Pipeline, tmp_path: Path) -> None:
    told = run_there("llm", ["bash", "-ec", script_of("clients.md", "`llm`", "bash", standard)], tmp_path)
    answer, brace, pet = told.rpartition("{")  # which may go over several lines
    assert answer.strip() and _is_a_pet(json.loads(brace + pet))


def _is_a_pet(pet: dict[str, Any]) -> bool:
    return set(pet) == {"name", "age"} and isinstance(pet["name"], str) and isinstance(pet["age"], int)


def test_guidellm_measures_what_it_asked_for(standard: Pipeline, tmp_path: Path) -> None:
    run_there("guidellm", ["bash", "-ec", script_of("clients.md", "GuideLLM", "bash", standard)], tmp_path)
    [run] = json.loads((tmp_path / "guidellm.json").read_text(encoding="utf-8"))["benchmarks"]
    requests = run["requests"]
    assert len(requests["successful"]) >= 6 and not requests["errored"]
    assert {each["output_metrics"]["text_tokens"] for each in requests["successful"]} == {16}
    for each in requests["successful"]:
        assert 0 < each["time_to_first_token_ms"] <= 1000 * each["request_latency"]


def test_aiperf_counts_the_tokens_that_the_server_counts(standard: Pipeline, tmp_path: Path) -> None:
    run_there("aiperf", ["bash", "-ec", script_of("clients.md", "AIPerf", "bash", standard)], tmp_path)
    told = json.loads((tmp_path / "aiperf" / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert told["request_count"]["avg"] == 6 and told.get("error_request_count", {"avg": 0})["avg"] == 0
    assert told["usage_completion_tokens"]["avg"] == 16
    assert told["output_sequence_length"]["avg"] == pytest.approx(16, abs=1)  # the text, tokenized again
    assert told["input_sequence_length"]["avg"] == told["usage_prompt_tokens"]["avg"] == 32
    scraped = json.loads((tmp_path / "aiperf" / "server_metrics_export.json").read_text(encoding="utf-8"))
    assert "cohort_time_to_first_token_seconds" in scraped["metrics"]


def test_lm_eval_scores_as_with_transformers(standard: Pipeline, tmp_path: Path) -> None:
    """`echo` and `logprobs` of completions, against the harness's own model in float32, request by request."""
    script = script_of("clients.md", "lm-evaluation-harness", "bash", standard)
    run_there("lm-eval", ["bash", "-ec", script], tmp_path)
    arguments = f"pretrained={standard.config.model.path},dtype=float32"
    command = ["lm_eval", "run", "--model", "hf", "--model_args", arguments, "--device", "cpu", "--include_path", "."]
    run_there("lm-eval", [*command, "--tasks", "capitals,prose", "--log_samples", "--output_path", "here"], tmp_path)
    for task, count in (("capitals", 9), ("prose", 3)):
        served, here = (_scores(tmp_path / kind, task) for kind in ("served", "here"))
        assert len(served) == len(here) == count
        for (value, *greedy), (expected, *greedily) in zip(served, here, strict=True):
            assert value == pytest.approx(expected, abs=2e-3) and greedy == greedily


def _scores(folder: Path, task: str) -> list[list[Any]]:
    """Log-probability, and for a choice whether it is the greedy one: of every request of a task, in order."""
    [file] = folder.rglob(f"samples_{task}_*.jsonl")
    samples = sorted(
        (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()), key=lambda s: s["doc_id"]
    )
    return [_score(answer) for sample in samples for answer in sample["filtered_resps"]]


def _score(answer: Any) -> list[Any]:
    value, *greedy = answer if isinstance(answer, list) else [answer]
    return [float(value), *map(str, greedy)]
