"""How good length predictions were: the figures every predictor of a study is compared by.

Pure; called by `study.py`.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PADDINGS = (0.10, 0.15, 0.20)
"""E4 · the paper's padding ratios for Alpaca, ShareGPT and BookCorpus."""
NEAR_TOKENS = 20
BUCKETS = (32, 64, 128, 256, 512, 1024, 2048)
"""Upper bounds of the length buckets that a padded prediction should hit."""


class Judgement(msgspec.Struct, frozen=True):
    """One predictor on held-out answers.

    `mae_tokens`; `near`: share within 20 tokens; per padding ratio x, `enough[x]`: share of answers no longer than the
    prediction · (1 + x), what EcoServe calls accuracy; `bucket_hit[x]`: share whose length lies in the very bucket
    (powers of two from 32) of the padded prediction, which predicting too much does not improve; `over[x]`: tokens
    promised beyond need, as a share of the promised; `covered_p90`: share below the 90 % quantile.
    """

    name: str
    count: int
    mae_tokens: float
    near: float
    enough: dict[str, float]
    bucket_hit: dict[str, float]
    over: dict[str, float]
    covered_p90: float

    def __str__(self) -> str:
        paddings = "; ".join(
            f"+{x}: enough {self.enough[x]:.1%}, bucket {self.bucket_hit[x]:.1%}, over {self.over[x]:.1%}"
            for x in self.enough
        )
        return (
            f"{self.name:>16}: MAE {self.mae_tokens:.1f} tokens, within {NEAR_TOKENS} {self.near:.1%}, {paddings}; "
            f"below p90 {self.covered_p90:.1%}"
        )


def judge(name: str, predicted: Floats, p90: Floats, real: Floats) -> Judgement:
    """`predicted` and `p90` in tokens, one per held-out answer of `real` tokens."""
    error = np.abs(predicted - real)
    enough, hit, over = {}, {}, {}
    for padding in PADDINGS:
        allocated = np.ceil(np.round(predicted * (1.0 + padding), 6))  # whole tokens
        key = f"{padding:.0%}"
        enough[key] = float(np.mean(real <= allocated))
        hit[key] = float(np.mean(np.searchsorted(BUCKETS, allocated) == np.searchsorted(BUCKETS, real)))
        over[key] = float(np.maximum(0.0, allocated - real).sum() / allocated.sum())
    return Judgement(
        name,
        len(real),
        float(error.mean()),
        float(np.mean(error <= NEAR_TOKENS)),
        enough,
        hit,
        over,
        float(np.mean(real <= p90)),
    )
