"""Section: greedy answers in float32 equal to `transformers.generate`, under several presets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from cohort.common.config import load_config
from cohort.common.engine.model_runner import ModelRunner
from cohort.common.engine.worker_process import load_runner
from cohort.services.bench.engine.inside.in_process import InProcessEngine
from cohort.services.bench.gpu_check.context import Check
from cohort.services.bench.gpu_check.shapes import TINY

_PRESETS = ("unified", "bros", "ecoserve", "baseline-chunked-prefill")
_NEAR_TIE = 1e-3
_VOCABULARY = 1000
_LIMIT_STEPS = 20_000


def run(check: Check) -> None:
    folder = _model(check.folder / "golden", check.real)
    lengths = (5, 17, 33, 64, 200, 411) if check.real else (5, 17, 33)
    outputs = 48 if check.real else 8
    draw = random.Random(4)
    prompts = [[draw.randrange(3, _VOCABULARY) for _ in range(length)] for length in lengths]
    expected = _expected(folder, prompts, outputs, check.device)
    for preset in _PRESETS:
        config = load_config(
            preset=preset,
            overrides={
                "model": {"path": str(folder), "dtype": "float32"},
                "engine": {"device": str(check.device), "max_rows": 16, "prefill_chunk": 48, "max_step_tokens": 160},
                "kv": {"memory_bytes": 64 << 20, "cpu_memory_bytes": 64 << 20, "host_memory_bytes": 8 << 20},
            },
        )
        runner = load_runner(config, 0)
        runner.warm_up()
        answers = _answers(InProcessEngine(config, runner), prompts, outputs)
        wrong, ties = _compare(answers, expected)
        recorded = 0 if runner._device_steps is None else len(runner._device_steps.decode.classes)
        check.found.checked(
            f"{preset}: {len(prompts)} answers of {outputs} tokens",
            not wrong and ties <= 1,
            f"{recorded} recorded classes, {ties} near ties" + (f"; wrong: {wrong[:2]}" if wrong else ""),
        )
        _moved(check, preset, runner)


def _moved(check: Check, preset: str, runner: ModelRunner) -> None:
    """Nothing may have run in halves on an empty device."""
    check.found.checked(f"{preset}: no step was cut in halves", runner.memory_retries == 0)


def _model(folder: Path, real: bool) -> Path:
    """A random Llama whose logits differ clearly, saved as a model folder."""
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
    model.save_pretrained(folder)
    return folder


Expected = list[tuple[list[int], list[float]]]


def _expected(folder: Path, prompts: list[list[int]], outputs: int, device: torch.device) -> Expected:
    """transformers' answers, and at each token how far the two best logits lie apart."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=outputs,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = [logits[0].topk(2).values.tolist() for logits in answer.logits]
        found.append((answer.sequences[0, len(prompt) :].tolist(), [first - second for first, second in best]))
    return found


def _answers(engine: InProcessEngine, prompts: list[list[int]], outputs: int) -> list[list[int]]:
    """Prompts that join one after the other, so that steps mix prompts and answers."""
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))
    for step in range(_LIMIT_STEPS):
        if waiting and step % 3 == 0:
            index = waiting.pop(0)
            engine.submit(str(index), prompts[index], outputs)
        for sequence in engine.step():
            answers[int(sequence.request_id)] = list(sequence.tokens[sequence.request.prompt_tokens :])
        if not waiting and all(len(answer) >= outputs for answer in answers):
            break
    return answers


def _compare(answers: list[list[int]], expected: Expected) -> tuple[list[str], int]:
    """Differences at a clear decision, and how many answers left the reference at a near tie."""
    wrong, ties = [], 0
    for index, (ours, (theirs, margins)) in enumerate(zip(answers, expected, strict=True)):
        if len(ours) != len(theirs):
            wrong.append(f"answer {index} has {len(ours)} tokens")
            continue
        at = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is not None and margins[at] < _NEAR_TIE:
            ties += 1
        elif at is not None:
            wrong.append(f"answer {index}, token {at}: {ours[at]} for {theirs[at]}")
    return wrong, ties
