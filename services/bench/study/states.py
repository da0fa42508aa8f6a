"""The hidden states in which the prompts of a length study end, computed by this machine's engine as a worker would.

Reads what `cohort bench study collect` wrote, wraps chat prompts in the model's own template, and writes `index` [n]
and `states` [n, hidden], for `study report --states`. The only part of the study that loads torch; called by `command`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from cohort.common.config import load_config
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.worker.prompt_states import prompt_states
from cohort.common.engine.worker.worker_process import load_runner
from cohort.common.errors import ConfigError
from cohort.common.paths import default_model_dir
from cohort.services.bench.engine.inside.in_process import InProcessEngine

_AT_ONCE = 64
"""Prompts in the engine at a time."""


class Asked(msgspec.Struct, frozen=True):
    """Of a line of the study: which prompt, its tokens without a template, and whether it was asked as a chat."""

    index: int
    tokens: list[int]
    chat: bool = True


def read_asked(path: Path) -> list[Asked]:
    """Raises `ConfigError`; a last line cut off by an interruption is left out."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    try:
        return [msgspec.json.decode(line, type=Asked) for line in lines[:-1] if line]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from error


def as_served(model: Path, asked: Iterable[Asked]) -> dict[int, list[int]]:
    """Prompt tokens as the gateway made them, by index."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    prompts = {}
    for each in asked:
        if each.chat:
            message = {"role": "user", "content": str(tokenizer.decode(each.tokens))}
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
            prompts[each.index] = list(tokenizer.encode(text, add_special_tokens=False))
        else:
            prompts[each.index] = each.tokens
    return prompts


def states_of(
    engine: InProcessEngine, runner: ModelRunner, prompts: Mapping[int, list[int]]
) -> dict[int, npt.NDArray[np.float16]]:
    """The state at each prompt's last position. Raises `ConfigError` for a model that keeps none."""
    found: dict[int, npt.NDArray[np.float16]] = {}
    waiting = iter(prompts.items())
    inside = 0
    for index, prompt in waiting:
        engine.submit(str(index), prompt, 1)
        inside += 1
        if inside == min(_AT_ONCE, len(prompts) - len(found)):
            while inside:
                sampled = engine.step()
                inside -= len(sampled)
                states = prompt_states(runner, sampled)
                if len(states) < len(sampled):
                    raise ConfigError("this model's engine keeps no hidden states")
                found |= {int(each.attempt.request_id): np.frombuffer(each.hidden, "<f2") for each in states}
    return found


def write_states(answers: Path, output: Path, preset: str, threads: int) -> int:
    """How many states were written; `threads` 0: as a worker of the preset. Raises `CohortError`."""
    asked = read_asked(answers)
    if not asked:
        raise ConfigError(f"{answers}: no answers")
    config = load_config(preset=preset, overrides={"kv": {"prefix_caching": False}})
    runner = load_runner(config, threads or config.default_threads(os.cpu_count() or 1))
    model = Path(config.model.path) if config.model.path else default_model_dir()
    found = states_of(InProcessEngine(config, runner), runner, as_served(model, asked))
    np.savez(output, index=np.array(list(found)), states=np.stack(list(found.values())))
    return len(found)
