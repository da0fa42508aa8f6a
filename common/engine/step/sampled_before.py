"""Tokens that a step takes where the step before it samples them: into the standing inputs, without the host.

Used by `device_steps` and what it records, for steps that are launched behind one another (`StepBatch.token_source`).
Decides nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.step.batch import Int64Array, StepBatch
from cohort.common.engine.step.standing_inputs import Numbers


def awaited_tokens(token_source: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Of the tokens that are not known yet: which of the sampled ones each is, and where it stands in the step."""
    places = np.flatnonzero(token_source >= 0)
    return token_source[places], places


def fill_sources(batch: StepBatch, numbers: Numbers, gap: int = 0, behind: int = 0) -> int:
    """`awaited_tokens` into "sources" and "places", and how many they are. `gap`: tokens that stand between the batch's
    first `behind` ones and the others."""
    if batch.token_source is None:
        return 0
    sources, places = awaited_tokens(batch.token_source)
    numbers["sources"][: len(sources)] = sources
    numbers["places"][: len(places)] = places + gap * (places >= behind)
    return len(sources)


def put_tokens(token_ids: Tensor, sampled: Tensor, sources: Tensor, places: Tensor, count: int) -> None:
    """The first `count` of `sampled[sources]` into `token_ids`, at `places`; in place, on the device."""
    if count == len(token_ids):  # all of them, in order
        torch.index_select(sampled, 0, sources[:count], out=token_ids)
    else:
        token_ids.index_copy_(0, places[:count], sampled.index_select(0, sources[:count]))
