"""transformers' greedy responses in float32, which both golden checks hold the engine's against. Called by `golden` and
`golden16`; decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Reference:
    tokens: list[int]
    logits: torch.Tensor  # float32 [outputs, vocabulary], on the host

    @property
    def margins(self) -> list[float]:
        """At each token, how far the two best logits lie apart."""
        best = self.logits.topk(2).values
        return [first - second for first, second in best.tolist()]


def responses(
    folder: Path, prompts: Iterable[Sequence[int]], outputs: int, device: torch.device | str, dtype: str = "float32"
) -> list[Reference]:
    """Of `outputs` tokens each, of a model whose weights are rounded to `dtype` first."""
    import transformers

    factory: Any = transformers.AutoModelForCausalLM
    model: Any = factory.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", trust_remote_code=False
    )
    model = model.to(device=device, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=device)
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=outputs,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(answer.logits).float().cpu()
        found.append(Reference(answer.sequences[0, len(prompt) :].tolist(), logits))
    return found
