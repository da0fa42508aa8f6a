"""The papers' workloads by name: lengths from the figures they print, and assumptions where they print none.

Pure. For data sets that are not at hand; with the trace itself use `traces` and `generate.FromTrace`. Every length
distribution has the mean that its paper prints, after clipping to the minimum and maximum it prints; where a paper
gives no spread, the note says whose was taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import AllAtOnce, Arrivals, RandomArrivals
from cohort.common.workloads.changes import mixture
from cohort.common.workloads.generate import Drawn, generate
from cohort.common.workloads.items import Workload
from cohort.common.workloads.lengths import Blend, Fixed, LogNormal, Uniform, fitted_lognormal


@dataclass(frozen=True, slots=True)
class PaperShape:
    """`rate_per_s`: the paper's own arrival rate (Poisson), None where it sweeps."""

    lengths: Drawn
    source: str
    rate_per_s: float | None = None
    notes: tuple[str, ...] = ()


SHAPES: Mapping[str, PaperShape] = {
    "bros-sharegpt": PaperShape(
        Drawn(fitted_lognormal(222.76, 256.36, 4, 1024), fitted_lognormal(234.51, 268.50, 4, 1024)),
        "BROS Table 2, RT-ShareGPT",
        notes=("clipped to 4…1024 tokens, the usual filter; the paper names none",),
    ),
    "bros-lmsys": PaperShape(
        Drawn(fitted_lognormal(90.50, 148.52, 1, 1024), fitted_lognormal(237.04, 228.21, 1, 1024)),
        "BROS Table 2, RT-LMSYS-Chat-1M",
        notes=("clipped to 1…1024 tokens; the paper names no bounds",),
    ),
    "bros-best-effort": PaperShape(Drawn(Uniform(512, 1024), Uniform(32, 128)), "BROS §7.1, BE-Synthetic"),
    "ecoserve-alpaca": PaperShape(
        Drawn(fitted_lognormal(19.31, 14.1, 9, 2470), fitted_lognormal(58.41, 62.8, 13, 292)),
        "EcoServe Table 2, Alpaca",
        rate_per_s=36.0,
        notes=("spreads measured on 9,229 random Alpaca rows (standard deviations 14.1 and 62.8)",),
    ),
    "ecoserve-sharegpt": PaperShape(
        Drawn(fitted_lognormal(161.31, 256.36, 16, 3200), fitted_lognormal(337.99, 240.0, 19, 991)),
        "EcoServe Table 2, ShareGPT",
        rate_per_s=28.0,
        notes=(
            "spread of prompts as in BROS Table 2",
            "spread of outputs measured on ShareGPT's first turns (standard deviation 240)",
        ),
    ),
    "ecoserve-bookcorpus": PaperShape(
        # A book is cut into chunks of 2048 and a remainder of any length: 90.5 % full chunks give the printed mean.
        Drawn(Blend(((0.9053, Fixed(2048)), (0.0947, Uniform(18, 2047)))), fitted_lognormal(681.2, 200.0, 32, 1041)),
        "EcoServe Table 2, BookCorpus in chunks of 2048",
        rate_per_s=1.2,
        notes=("remainders of chunking uniform; spread of outputs assumed (standard deviation 200)",),
    ),
    "bucketserve-alpaca": PaperShape(
        Drawn(fitted_lognormal(83.0, 14.1, 64, 2534), fitted_lognormal(58.41, 62.8, 13, 292)),
        "BucketServe §II-C, Alpaca with its prompt template",
        notes=("outputs as in EcoServe Table 2: BucketServe prints none", "spread of prompts as in bare Alpaca"),
    ),
    "bucketserve-longbench": PaperShape(
        # exp(mu) is a lognormal's median.
        Drawn(LogNormal(math.log(41_417), 0.75, 1024, 1 << 20), Uniform(32, 512)),
        "BucketServe §II-C, LongBench (median 41,417 tokens); clip it to the model's context",
        notes=("long tail lognormal with sigma 0.75 (assumed)", "outputs uniform 32…512 (assumed: none printed)"),
    ),
    "alignedserve-short": PaperShape(
        Drawn(Uniform(16, 999), Uniform(32, 512)),
        "AlignedServe §4.1, synthetic, short requests",
        notes=("uniform below 1,000 tokens; outputs uniform 32…512 (assumed: none printed)",),
    ),
    "alignedserve-long": PaperShape(
        Drawn(Uniform(1000, 8000), Uniform(32, 512)),
        "AlignedServe §4.1, synthetic, long requests",
        notes=("uniform from 1,000 to 8,000 tokens; outputs uniform 32…512 (assumed: none printed)",),
    ),
    "alignedserve-azure": PaperShape(
        Drawn(fitted_lognormal(1188.8, 1159.0, 3, 7437), fitted_lognormal(201.8, 162.1, 7, 1000)),
        "AlignedServe §4.1, AzurePublicDataset, as conversations (prompts of 3 to 7,437 tokens)",
        notes=(
            "mean and spread measured on the published 2023 conversation trace",
            "the printed range is that of the code trace, whose rows are the trace azure2023_code",
        ),
    ),
    "dynaserve-code": PaperShape(Drawn(Fixed(8192), Fixed(32)), "DynaServe §2.4 and Table 1, long prompt"),
    "dynaserve-balanced": PaperShape(Drawn(Fixed(2048), Fixed(512)), "DynaServe §2.4 and Table 1, balanced"),
    "dynaserve-azure-code": PaperShape(
        Drawn(fitted_lognormal(2047.8, 1973.8, 3, 7437), fitted_lognormal(27.9, 59.9, 6, 1899)),
        "DynaServe §6.1, Azure Code",
        notes=("means, spreads and bounds of the public trace of 2023; prompt and output drawn independently",),
    ),
    "dynaserve-burstgpt": PaperShape(
        Drawn(fitted_lognormal(599.2, 560.5, 10, 1994), fitted_lognormal(291.2, 288.0, 3, 2019)),
        "DynaServe §6.1, BurstGPT",
        notes=("means, spreads and bounds of the first 268 successful requests of BurstGPT_1",),
    ),
    "dynaserve-arxiv": PaperShape(
        Drawn(fitted_lognormal(2588.1, 944.7, 16, 4054), fitted_lognormal(291.4, 530.5, 5, 4056)),
        "DynaServe §6.1, arXiv summarisation",
        notes=("means, spreads and bounds of 28,257 articles of at most 4,096 tokens",),
    ),
    "dynaserve-reasoning": PaperShape(Drawn(Fixed(219), Fixed(1467)), "DynaServe §2.4 and Table 1, Mini Reasoning"),
}

LONGBENCH: Mapping[str, tuple[int, int]] = {
    "narrativeqa": (18409, 128),
    "qasper": (3619, 128),
    "multifieldqa": (4559, 64),
    "hotpotqa": (9151, 32),
    "2wikimqa": (4887, 32),
    "musique": (11214, 32),
    "gov_report": (8734, 512),
    "qmsum": (10614, 512),
    "multi_news": (2113, 512),
    "trec": (5177, 64),
    "triviaqa": (8209, 32),
    "samsum": (6258, 128),
    "passage_count": (11141, 32),
    "passage_retrieval": (9289, 32),
    "lcc": (1235, 64),
    "repobench-p": (4206, 64),
}
"""Mean words of a prompt of LongBench's English and code tasks (its Table 1), and the most tokens of an answer."""
_TOKENS_PER_WORD, _TASK_SPREAD = 1.3, 0.35


def longbench_workload(arrivals: Arrivals, *, count: int, longest: int, seed: int = 0) -> Workload:
    """Mix all tasks in equal shares, as in LongBench itself (200 rows each, but for one). Assumed: 1.3 tokens a word, a
    standard deviation of 0.35 of a task's mean, answers as long as they may be; prompts are cut at `longest`."""
    parts = []
    for number, (words, answer) in enumerate(LONGBENCH.values()):
        mean = _TOKENS_PER_WORD * words
        prompt = fitted_lognormal(mean, _TASK_SPREAD * mean, 64, 1 << 20)
        drawn = generate("task", Drawn(prompt, Fixed(answer)), AllAtOnce(), count=count, seed=seed + 1000 * number)
        items = tuple(replace(item, prompt_tokens=min(item.prompt_tokens, longest)) for item in drawn.items)
        parts.append((1.0, replace(drawn, items=items)))
    return mixture("longbench", parts, arrivals, count=count, seed=seed)


def paper_workload(
    name: str,
    arrivals: Arrivals | None = None,
    *,
    count: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
) -> Workload:
    """Generate a workload of `SHAPES`, at the paper's own rate unless `arrivals` are given. Raises `ConfigError`."""
    shape = SHAPES.get(name)
    if shape is None:
        raise ConfigError(f"no workload named {name!r}; there are: {', '.join(SHAPES)}")
    if arrivals is None:
        if shape.rate_per_s is None:
            raise ConfigError(f"{name}: the paper sweeps the rate; give one")
        arrivals = RandomArrivals(shape.rate_per_s)
    workload = generate(name, shape.lengths, arrivals, count=count, duration_s=duration_s, seed=seed)
    return replace(workload, facts=replace(workload.facts, source=shape.source, notes=shape.notes))
