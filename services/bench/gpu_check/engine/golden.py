"""Sections: greedy responses equal to `transformers.generate`, in float32 under presets whose rows lie differently in
the cache, and in the precision that is served, which alone reaches flash prefill."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cohort.common.config import load_config
from cohort.common.engine.worker.worker_process import load_runner
from cohort.common.paths import cache_dir
from cohort.kernels.cpu import build
from cohort.services.bench.engine.inside.in_process import InProcessEngine
from cohort.services.bench.gpu_check.engine.golden16 import agreement
from cohort.services.bench.gpu_check.engine.reference import responses
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.shapes import TINY

Expected = list[tuple[list[int], list[float]]]
"""Tokens, and at each how far the two best logits lie apart."""
_NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.3}
_VOCABULARY = 1000
_LIMIT_STEPS = 20_000
_BUILD_S = 60.0


def run(check: Check) -> None:
    """The plain path."""
    _presets(check, ("unified",), ("float32", "bfloat16"))
    check.guard.item("log-probabilities, bfloat16", partial(_agreement, check), 40)


def run_presets(check: Check) -> None:
    """Blocks filled from both ends, lent inside each other, moved to the host and back; chunks beside decodes."""
    check.guard.item("C++ kernels", lambda: _host_kernels(check), _BUILD_S)
    _presets(check, ("bros", "ecoserve", "baseline-chunked-prefill"), ("float32",))


def _presets(check: Check, presets: Sequence[str], dtypes: Sequence[str]) -> None:
    folder = check.folder / "golden"
    lengths = (5, 17, 33, 64, 200, 411) if check.real else (5, 17, 33)
    outputs = 48 if check.real else 8
    draw = random.Random(4)
    prompts = [[draw.randrange(3, _VOCABULARY) for _ in range(length)] for length in lengths]
    for dtype in dtypes:
        call = partial(_reference, folder / dtype, prompts, outputs, check, dtype)
        expected = check.guard.item(f"transformers' responses, {dtype}", call, 40)
        if expected is None:
            continue
        for preset in presets:
            name = f"{preset}, {dtype}"
            judge = partial(_judge, check, name, preset, dtype, folder / dtype, prompts, outputs, expected)
            check.guard.item(name, judge, 30)


def _reference(folder: Path, prompts: list[list[int]], outputs: int, check: Check, dtype: str) -> Expected:
    """In float32, of weights that `dtype` holds exactly."""
    found = responses(_model(folder, check.real, dtype), prompts, outputs, check.device)
    return [(each.tokens, each.margins) for each in found]


def _judge(
    check: Check,
    name: str,
    preset: str,
    dtype: str,
    folder: Path,
    prompts: list[list[int]],
    outputs: int,
    expected: Expected,
) -> None:
    config = load_config(
        preset=preset,
        overrides={
            "model": {"path": str(folder), "dtype": dtype},
            "engine": {"device": str(check.device), "max_rows": 16, "prefill_chunk": 48, "max_step_tokens": 160},
            "kv": {"memory_bytes": 64 << 20, "cpu_memory_bytes": 64 << 20, "host_memory_bytes": 8 << 20},
        },
    )
    runner = load_runner(config, 0)
    runner.warm_up()
    ours = _responses(InProcessEngine(config, runner), prompts, outputs)
    wrong, ties = _compare(ours, expected, _NEAR_TIE[dtype])
    recorded = 0 if runner._device_steps is None else len(runner._device_steps.decode.classes)
    check.found.checked(
        f"{name}: {len(prompts)} responses of {outputs} tokens",
        not wrong and (ties <= 1 or dtype != "float32"),
        f"{recorded} recorded classes, {ties} near ties" + (f"; wrong: {wrong[:2]}" if wrong else ""),
    )
    check.found.checked(f"{name}: no step was cut in halves", runner.memory_retries == 0)


def _agreement(check: Check) -> None:
    """Behind a cached prefix, too: how far log-probabilities in 16 bits are from those in float32."""
    draw = random.Random(5)
    prompts = [[draw.randrange(3, _VOCABULARY) for _ in range(length)] for length in (9, 40, 150)]
    outputs = 24 if check.real else 6
    folder = _model(check.folder / "golden" / "agreement", check.real, "bfloat16")
    found = agreement(folder, str(check.device), prompts, outputs)
    wrong = f"; wrong: {', '.join(found.wrong[:2])}" if found.wrong else ""
    note = f"off by {found.error:.3f} standard deviations of the logits at most, {found.clear} clear decisions{wrong}"
    check.found.checked("log-probabilities, bfloat16", found.holds, note)


def _host_kernels(check: Check) -> None:
    """Copies of single slots on the host use them; the run builds them beside the sections before this one."""
    if not check.real:
        return
    library = build.library_path(cache_dir())
    until = time.monotonic() + _BUILD_S - 5
    while not library.is_file() and time.monotonic() < until:
        time.sleep(0.2)
    words = "built" if library.is_file() else "not built, the reference serves; see build.log"
    check.found.said("C++ kernels (host side)", words)


def _model(folder: Path, real: bool, dtype: str) -> Path:
    """A random Llama whose logits differ clearly, saved as a model folder of weights rounded to `dtype`."""
    import transformers

    sizes = (
        {
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 512,
            "max_position_embeddings": 1024,
        }
        if real
        else {"max_position_embeddings": 256}
    )
    kept = {key: value for key, value in TINY.items() if key not in ("model_type", "architectures", "torch_dtype")}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**kept, **sizes, "vocab_size": _VOCABULARY})
    factory: Any = transformers.AutoModelForCausalLM
    model: Any = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    model.save_pretrained(folder)
    return folder


def _responses(engine: InProcessEngine, prompts: list[list[int]], outputs: int) -> list[list[int]]:
    """Prompts that join one after the other, so that steps mix prompts and decodes."""
    responses: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))
    for step in range(_LIMIT_STEPS):
        if waiting and step % 3 == 0:
            index = waiting.pop(0)
            engine.submit(str(index), prompts[index], outputs)
        for sequence in engine.step():
            responses[int(sequence.request_id)] = list(sequence.tokens[sequence.request.prompt_tokens :])
        if not waiting and all(len(each) >= outputs for each in responses):
            break
    return responses


def _compare(responses: list[list[int]], expected: Expected, near_tie: float) -> tuple[list[str], int]:
    """Differences at a clear decision, and how many responses left the reference at a near tie."""
    wrong, ties = [], 0
    for index, (ours, (theirs, margins)) in enumerate(zip(responses, expected, strict=True)):
        if len(ours) != len(theirs):
            wrong.append(f"response {index} has {len(ours)} tokens")
            continue
        at = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is not None and margins[at] < near_tie:
            ties += 1
        elif at is not None:
            wrong.append(f"response {index}, token {at}: {ours[at]} for {theirs[at]}")
    return wrong, ties
