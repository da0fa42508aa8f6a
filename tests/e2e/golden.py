"""The truth: what `transformers.generate` says in float32, greedy, and where it hardly knew itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from cohort.common.paths import cache_dir

NEAR_TIE = 1e-3
"""Two best logits closer than this: another order of the same float32 sums may pick the other token."""


@dataclass(frozen=True)
class Golden:
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    gaps: tuple[float, ...]
    """Difference of the two best logits at each output position."""
    runner_up: tuple[int, ...]


def golden_outputs(model_dir: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Golden]:
    """The reference's answers, computed once per machine: they are kept in the cache folder under a key of everything
    they depend on."""
    weights = max((file.stat().st_mtime_ns, file.stat().st_size) for file in model_dir.glob("*.safetensors"))
    key = hashlib.sha256(
        repr((torch.__version__, transformers.__version__, str(model_dir.resolve()), weights, new_tokens, prompts))
        .encode()
    ).hexdigest()[:24]
    kept = cache_dir() / "test_goldens" / f"{key}.json"
    if kept.is_file():
        rows = json.loads(kept.read_text(encoding="utf-8"))
        return [Golden(tuple(p), tuple(o), tuple(g), tuple(r)) for p, o, g, r in rows]
    goldens = compute(model_dir, prompts, new_tokens)
    kept.parent.mkdir(parents=True, exist_ok=True)
    fresh = kept.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps([[g.prompt, g.output, g.gaps, g.runner_up] for g in goldens]), encoding="utf-8")
    fresh.replace(kept)
    return goldens


def compute(model_dir: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Golden]:
    """One after the other, without padding; end tokens are ignored, as `ignore_eos` does."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    results = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            tops = [logits[0].topk(2) for logits in out.logits]
            results.append(
                Golden(
                    tuple(prompt),
                    tuple(out.sequences[0, len(prompt) :].tolist()),
                    tuple(float(top.values[0] - top.values[1]) for top in tops),
                    tuple(int(top.indices[1]) for top in tops),
                )
            )
    return results


def near_ties(golden: Golden, tokens: Sequence[int]) -> int:
    """0 when equal, 1 when they part at a near-tie (the rest cannot be compared then); fails otherwise."""
    assert len(tokens) == len(golden.output), f"{len(tokens)} tokens instead of {len(golden.output)}"
    for position, (ours, theirs) in enumerate(zip(tokens, golden.output, strict=True)):
        if ours != theirs:
            gap = golden.gaps[position]
            assert gap <= NEAR_TIE and ours == golden.runner_up[position], (
                f"prompt of {len(golden.prompt)}: token {position} is {ours}, should be {theirs}; "
                f"the reference's two best logits lie {gap:.6f} apart"
            )
            return 1
    return 0
