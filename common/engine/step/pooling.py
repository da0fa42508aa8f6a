"""Sums of a prompt's final hidden states: what an embedding is made of.

Called by the model runner (`StepBatch.pooling`). States are behind the model's last norm, as transformers'
`last_hidden_state`. A prompt in several chunks has a sum of each, which its worker adds up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.step.batch import PoolingRow


def pooled_tokens(rows: Sequence[PoolingRow], device: torch.device) -> Tensor:
    """Return int64 [N]: the step's tokens whose states are summed, row after row."""
    index = [np.arange(row.first, row.first + row.count, dtype=np.int64) for row in rows]
    return torch.from_numpy(np.concatenate(index)).to(device)


def sums(states: Tensor, rows: Sequence[PoolingRow]) -> tuple[bytes, ...]:
    """Return for each row the sum of its states [N, hidden] (`StepOutput.pooled`)."""
    parts: tuple[Tensor, ...] = torch.split(states.float(), [row.count for row in rows])  # type: ignore[no-untyped-call]
    return tuple([part.sum(dim=0).cpu().numpy().astype("<f4").tobytes() for part in parts])
