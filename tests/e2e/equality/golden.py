"""The truth: what `transformers.generate` says in float32, greedy, and where it hardly knew itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

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
    """The reference's answers, computed once per checkout and in one of a run's processes: they are kept in pytest's
    cache folder under a key of everything they depend on."""
    weights = max(file.stat().st_mtime_ns for file in model_dir.glob("*.safetensors"))
    depends = ("in batches", torch.__version__, transformers.__version__, content_of(model_dir, weights), new_tokens)
    key = hashlib.sha256(repr((*depends, prompts)).encode()).hexdigest()[:24]
    kept = Path(os.environ.get("COHORT_TEST_GOLDENS") or cache_dir() / "goldens") / f"{key}.json"
    if kept.is_file():
        rows = json.loads(kept.read_text(encoding="utf-8"))
        return [Golden(tuple(p), tuple(o), tuple(g), tuple(r)) for p, o, g, r in rows]
    goldens = compute(model_dir, prompts, new_tokens)
    kept.parent.mkdir(parents=True, exist_ok=True)
    fresh = kept.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps([[g.prompt, g.output, g.gaps, g.runner_up] for g in goldens]), encoding="utf-8")
    fresh.replace(kept)
    return goldens


@cache
def content_of(model_dir: Path, written_ns: int) -> str:
    """Digest of weights and configuration: a seeded model has the same in every folder."""
    digest = hashlib.blake2b()
    for file in (model_dir / "config.json", *sorted(model_dir.glob("*.safetensors"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def outgrowing(model_dir: Path) -> list[Golden]:
    """Twelve prompts of a block, answers of six more. Asked together, they fit 24 to 83 blocks when they begin and not
    when they end, in whatever order they come: something is preempted."""
    random = Random(22)
    return golden_outputs(model_dir, [[random.randrange(3, 400) for _ in range(16)] for _ in range(12)], 96)


def kv_bytes(model_dir: Path, blocks: int) -> int:
    """Of so many blocks of 16 positions in float32."""
    shape = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    position = 2 * 4 * int(shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"])
    return blocks * 16 * position


def compute(
    model_dir: Path, prompts: Sequence[Sequence[int]], new_tokens: int, attention: str | None = None
) -> list[Golden]:
    """Prompts of similar length together, padded on their left as `generate` wants them: a step reads every weight, for
    one row as for sixteen. End tokens are ignored, as `ignore_eos` does."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    found: dict[int, Golden] = {}
    for batch in batches([len(prompt) for prompt in prompts]):
        longest = max(len(prompts[index]) for index in batch)
        ids = torch.tensor([[0] * (longest - len(prompts[index])) + list(prompts[index]) for index in batch])
        mask = torch.tensor([[0] * (longest - len(prompts[index])) + [1] * len(prompts[index]) for index in batch])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tops = [logits.topk(2) for logits in out.logits]
        for row, index in enumerate(batch):
            found[index] = Golden(
                tuple(prompts[index]),
                tuple(out.sequences[row, longest:].tolist()),
                tuple(float(top.values[row, 0] - top.values[row, 1]) for top in tops),
                tuple(int(top.indices[row, 1]) for top in tops),
            )
    return [found[index] for index in range(len(prompts))]


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Indices in batches of at most 16, none more than twice as long as another of its batch (and 16 tokens)."""
    made: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        last = made[-1] if made else []
        if last and len(last) < 16 and lengths[index] <= 2 * lengths[last[0]] + 16:
            last.append(index)
        else:
            made.append([index])
    return made


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
