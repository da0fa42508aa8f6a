"""Log-probabilities of a prompt's own tokens, from the logits of the positions before them.

Called by the model runner (`StepBatch.scoring`). Raw logits, before temperature and penalties, as for sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.step.batch import ScoringRow, TokenLogprobs

# The number of positions whose probabilities exist at a time, beside the logits they come from.
AT_ONCE = 64


def scored_tokens(rows: Sequence[ScoringRow], device: torch.device) -> Tensor:
    """Return int64 [N]: the step's tokens whose logits are needed, row after row."""
    index = [np.arange(row.first, row.first + len(row.targets), dtype=np.int64) for row in rows]
    return torch.from_numpy(np.concatenate(index)).to(device)


def score(logits: Tensor, wanted: Iterator[tuple[int, int]]) -> Iterator[TokenLogprobs]:
    """Yield one for each of the float32 logits [N, vocabulary]; takes as many (target, top) from `wanted`."""
    for start in range(0, len(logits), AT_ONCE):
        part = logits[start : start + AT_ONCE].log_softmax(dim=-1)
        pairs = list(islice(wanted, len(part)))
        targets = torch.tensor([target for target, _ in pairs], dtype=torch.int64, device=logits.device)
        chosen = part.gather(1, targets[:, None])[:, 0].tolist()
        values, ids = part.topk(min(max(top for _, top in pairs), part.shape[1]), dim=-1)
        for (_, top), logprob, top_ids, top_values in zip(pairs, chosen, ids.tolist(), values.tolist(), strict=True):
            yield TokenLogprobs(logprob, tuple(top_ids[:top]), tuple(top_values[:top]))


def by_row(rows: Sequence[ScoringRow], scores: Iterable[TokenLogprobs]) -> tuple[tuple[TokenLogprobs, ...], ...]:
    rest = iter(scores)
    return tuple(tuple(islice(rest, len(row.targets))) for row in rows)
