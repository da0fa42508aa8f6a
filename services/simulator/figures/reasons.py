"""Why rows are not reproduced, by the beginnings of their ids, and the commands whose numbers show it.

Typed here, as the reasons beside the claims are; which rows they stand under on docs/reproduction.md is computed. A row
that is reproduced has no reason, whatever begins like it. Measures nothing.
"""

from __future__ import annotations

from cohort.services.simulator.figures.claim import Reason

_RUN = "cohort reproduce --figure "

REASONS: tuple[Reason, ...] = (
    Reason(
        ("dynaserve-table1-code-disaggregated-p99",),
        "A simulated decode process has no jitter",
        f"{_RUN}dynaserve-table1-code-disaggregated --scatter 0.3",
    ),
    Reason(
        ("dynaserve-table1-reasoning-unified-p99",),
        "Theirs is beyond saturation and preempts at this rate, ours serves it",
        f"{_RUN}dynaserve-table1-reasoning-unified",
    ),
    Reason(
        ("dynaserve-table1-reasoning-disaggregated",),
        "Our decode instance is overloaded at the paper's rate",
        f"{_RUN}dynaserve-table1-reasoning-disaggregated",
    ),
    Reason(
        (
            "bucketserve-5a-mixed-uellm-",
            "bucketserve-5a-mixed-1-1-uellm",
            "bucketserve-5a-mixed-3-1-uellm",
            "bucketserve-5e-alpaca-uellm-",
            "bucketserve-5f-mixed-uellm-",
            "bucketserve-5f-mixed-1-1-uellm",
            "bucketserve-5f-mixed-3-1-uellm",
        ),
        "A stronger UELLM than its authors', or another mix: what static batches and one device at a time cost",
        f"{_RUN}bucketserve-5a-mixed-uellm",
    ),
    Reason(
        ("bucketserve-5a", "bucketserve-5d", "bucketserve-5f"),
        "On one engine neither system pads, and only padding could differ; with padding it does where prefill binds",
        f"{_RUN}bucketserve-5a-mixed-short-answers",
    ),
    Reason(
        ("bucketserve-5c",),
        "Prompts of Alpaca are all short: no bucket spares any padding",
        f"{_RUN}bucketserve-6a-decoding-alpaca",
    ),
    Reason(
        ("bucketserve-6a-overhead",),
        "Wall time of the machine that simulated; alone a decision takes microseconds",
        "cohort bench decisions prefill-order",
    ),
    Reason(
        ("alignedserve-7", "alignedserve-8"),
        "Alignment as such gains nothing where full memory is what an iteration reads; short requests first does",
        f"{_RUN}alignedserve-ceiling",
    ),
    Reason(
        ("alignedserve-9", "alignedserve-10", "alignedserve-13"),
        "Memory is filled beyond B_max, which serves more and lengthens iterations; up to B_max only they are shorter",
        f"{_RUN}alignedserve-9-synthetic-distserve",
    ),
    Reason(
        ("alignedserve-14-prefetch",),
        "KV arrives long before its row can join: few iterations wait for it, with blocking transfers as well",
        f"{_RUN}alignedserve-14-prefetch",
    ),
    Reason(
        ("alignedserve-14-alignment",),
        "What is lost is the order of requests, not the alignment",
        f"{_RUN}alignedserve-ceiling",
    ),
    Reason(
        ("alignedserve-mixed",),
        "Answers of one batch end far apart, and its last rows run beside the next batch",
        f"{_RUN}alignedserve-mixed",
    ),
    Reason(
        ("alignedserve-15",),
        "How deep the overload was is not printed, and no one load makes both data sets wait as long as the paper's",
        f"{_RUN}alignedserve-15",
    ),
    Reason(
        ("dynaserve-9-mean-coloc", "dynaserve-9-least-coloc", "dynaserve-9-most-coloc", "dynaserve-9-capacity"),
        "A chunk of 512 keeps the bound in this cost model; untuned it does not",
        f"{_RUN}dynaserve-9-capacity-azure-code",
    ),
    Reason(
        ("dynaserve-9-mean-disagg", "dynaserve-9-least-disagg", "dynaserve-9-most-disagg"),
        "Disaggregation's prefill device is full far earlier than the paper's, so the gain is larger",
        f"{_RUN}dynaserve-9-capacity",
    ),
    Reason(
        ("dynaserve-8",),
        "Under overload a tuned chunk loses next to nothing, as hardly any request is split",
        f"{_RUN}dynaserve-splits-8",
    ),
    Reason(
        ("dynaserve-10",),
        "All devices are full and hardly a token is late, with the best chunk (256) or with decode devices",
        f"{_RUN}dynaserve-10-replay",
    ),
    Reason(
        ("dynaserve-table2",),
        "Colocation with a tuned chunk reaches more than half of what the devices can do; theirs did not",
        f"{_RUN}dynaserve-table2",
    ),
    Reason(("dynaserve-table3",), "Wall time of the machine that simulated", "cohort bench decisions placement"),
    Reason(
        ("ecoserve-10-rate", "ecoserve-1-", "ecoserve-10-slo"),
        "Where memory binds, rates follow the rows that fit, and allocation on demand fills most slots",
        f"{_RUN}ecoserve-1-kv",
    ),
    Reason(
        (
            "ecoserve-10-rate-sharegpt-orca",
            "ecoserve-10-rate-bookcorpus-orca",
            "ecoserve-10-rate-alpaca-orca",
            "ecoserve-10-slo-orca",
        ),
        "ORCA runs 8 requests whatever their length: how far behind that is follows from the rows that fit elsewhere",
        f"{_RUN}ecoserve-1-kv",
    ),
    Reason(
        ("ecoserve-11-throughput", "ecoserve-11-jct"),
        "Throughput follows the rows that fit, and at the paper's rates whom the order lets pass",
        f"{_RUN}ecoserve-11-tokens",
    ),
    Reason(
        ("ecoserve-1d",),
        "An answer of Alpaca asks for two or three blocks in all and seldom finds none; on ShareGPT every request does",
        f"{_RUN}ecoserve-1d",
    ),
    Reason(
        ("ecoserve-11-tbt",),
        "An answer of EcoServe waits for its batch once; vLLM's iterations for prompts and its swaps delay less",
        f"{_RUN}ecoserve-11-anchor",
    ),
    Reason(
        ("ecoserve-11-scheduling",),
        "Wall time of the machine that simulated; groups and loans cost more to decide",
        "cohort bench decisions iteration",
    ),
    Reason(
        ("ecoserve-12",),
        "Outliving a prediction costs little here, and the sweeps are flat",
        f"{_RUN}ecoserve-12-reserve-sharegpt-spread",
    ),
    Reason(
        ("bros-10", "bros-11"),
        "Of what overload leaves unserved each system counts another part; the anchors and unserved requests beside",
        f"{_RUN}bros-10-latency-to-end",
    ),
    Reason(
        ("bros-10-be",),
        "On Llama-3-70B real-time requests alone take 150 of the 200 ms from 12/s on and, at 15/s, all 256 rows",
        f"{_RUN}bros-10-model-be",
    ),
    Reason(
        ("bros-11-kept-tpot-rr", "bros-11-tpot"),
        "On Llama-3-70B two of round robin's iterations, and many a one of vLLM's, take more than the 200 ms",
        f"{_RUN}bros-11-kept-tpot",
    ),
    Reason(
        ("bros-11-kept", "bros-11-none"),
        "The batch of best-effort requests decides what the baselines keep",
        f"{_RUN}bros-11-kept",
    ),
    Reason(
        ("bros-13",),
        "The packing starts nothing that would take a running request's next block, so hardly any is computed again",
        f"{_RUN}bros-13",
    ),
)
