"""The claims of each paper's headlines, by the figures that answer them, and why ours differs where it does.

The table at the head of docs/reproduction.md is made of this list by `verdicts.py`; the verdicts are computed, the
reasons are typed here, the numbers beside them computed. A claim names figures of the modules beside this one by their
ids. Measures nothing.
"""

from __future__ import annotations

from cohort.services.simulator.figures.claim import Claim, Kind


def _each(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names)


def _table_1(cell: str) -> tuple[str, ...]:
    return tuple(f"dynaserve-table1-{shape}-{cell}" for shape in ("code", "balanced", "reasoning"))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "BucketServe",
        "throughput over UELLM, offline (Fig. 5a)",
        Kind.OVER,
        ("bucketserve-5a-mixed-uellm",),
        beside=_each("bucketserve-5a-mixed-", "3-1-uellm", "1-1-uellm", "uellm-leaving", "uellm-four"),
    ),
    Claim(
        "BucketServe",
        "throughput over DistServe, offline (Fig. 5a)",
        Kind.OVER,
        ("bucketserve-5a-mixed-distserve",),
        "neither system pads",
        _each(
            "bucketserve-5a-mixed-",
            "1-1-distserve",
            "first-come-padded-by-padded",
            "short-answers-first-come-padded-by-padded",
        ),
        shown_by="cohort reproduce --figure bucketserve-5a-mixed-short-answers",
    ),
    Claim(
        "BucketServe",
        "GPU utilisation (Fig. 5b)",
        Kind.VALUE,
        ("bucketserve-5b-utilisation",),
        "the prefill pair waits for decode memory",
    ),
    Claim(
        "BucketServe",
        "load over DistServe at 80 % attainment, Alpaca (Fig. 5c)",
        Kind.OVER,
        ("bucketserve-5c-alpaca-distserve",),
        "neither system pads",
        ("bucketserve-5c-alpaca-first-come-padded-by-padded",),
        shown_by="cohort reproduce --figure bucketserve-6a-decoding-alpaca",
    ),
    Claim(
        "BucketServe",
        "load over DistServe at 80 % attainment, mixed (Fig. 5d)",
        Kind.OVER,
        ("bucketserve-5d-mixed-distserve",),
        "neither system pads",
        _each(
            "bucketserve-5d-mixed-",
            "1-1-distserve",
            "first-come-padded-by-padded",
            "short-answers-first-come-padded-by-padded",
        ),
        shown_by="cohort reproduce --figure bucketserve-6a-decoding-mixed",
    ),
    Claim(
        "BucketServe",
        "load over UELLM, Alpaca (Fig. 5e)",
        Kind.OVER,
        ("bucketserve-5e-alpaca-uellm",),
        beside=_each("bucketserve-5e-alpaca-", "uellm-leaving", "uellm-four"),
        shown_by="cohort reproduce --figure bucketserve-5e-alpaca-uellm",
    ),
    Claim(
        "BucketServe",
        "load over UELLM, mixed (Fig. 5f)",
        Kind.OVER,
        ("bucketserve-5f-mixed-uellm",),
        beside=_each("bucketserve-5f-mixed-", "3-1-uellm", "1-1-uellm", "uellm-leaving", "uellm-four"),
        shown_by="cohort reproduce --figure bucketserve-5f-mixed-uellm",
    ),
    Claim(
        "BucketServe",
        "decoding's share of a request's time (Fig. 6a)",
        Kind.VALUE,
        ("bucketserve-6a-decoding-mixed",),
        beside=_each("bucketserve-6a-decoding-", "alpaca", "mixed-1-1"),
    ),
    Claim(
        "BucketServe",
        "share of time spent deciding (Fig. 6a)",
        Kind.AT_MOST,
        ("bucketserve-6a-overhead",),
        "wall time of the machine that simulated",
        shown_by="cohort bench decisions prefill-order",
    ),
    Claim(
        "BROS",
        "what round robin keeps alone, LMSYS-Chat-1M (Fig. 11)",
        Kind.VALUE,
        ("bros-11-kept-tpot-rr-lmsys",),
        beside=_each(
            "bros-11-", "none-vllm", *(f"kept-{name}-sharegpt" for name in ("ttft-vllm", "ttft-rr", "tpot-rr"))
        ),
        shown_by="cohort reproduce --figure bros-11-kept",
    ),
    Claim(
        "BROS",
        "TPOT targets that BROS keeps (Fig. 11)",
        Kind.VALUE,
        _each("bros-11-kept-tpot-bros-", "sharegpt", "lmsys"),
        shown_by="cohort reproduce --figure bros-rules",
    ),
    Claim(
        "BROS",
        "normalised latency against vLLM (Fig. 10)",
        Kind.CHANGE,
        _each("bros-10-latency-", "sharegpt-vllm", "lmsys-vllm"),
        beside=_each("bros-10-latency-to-end-", "sharegpt-vllm", "lmsys-vllm"),
        shown_by="cohort reproduce --figure bros-10-latency-to-end",
    ),
    Claim(
        "BROS",
        "normalised latency against round robin (Fig. 10)",
        Kind.CHANGE,
        _each("bros-10-latency-", "sharegpt-rr", "lmsys-rr"),
        beside=_each("bros-10-latency-to-end-", "sharegpt-rr", "lmsys-rr"),
        shown_by="cohort reproduce --figure bros-10-latency-to-end",
    ),
    *(
        Claim(
            "BROS",
            f"{metric.upper()} attainment over {name} (Fig. 11)",
            Kind.OVER,
            _each(f"bros-11-{metric}-", f"sharegpt-{other}", f"lmsys-{other}"),
            beside=_each(f"bros-11-kept-{metric}-", *anchors),
            shown_by="cohort reproduce --figure bros-11-kept",
        )
        for metric, other, name, anchors in (
            ("ttft", "vllm", "vLLM", ("vllm-sharegpt",)),
            ("ttft", "rr", "round robin", ("rr-sharegpt",)),
            ("tpot", "vllm", "vLLM", ()),
            ("tpot", "rr", "round robin", ("rr-sharegpt", "rr-lmsys")),
        )
    ),
    *(
        Claim(
            "BROS",
            f"best-effort throughput kept against {name} (Fig. 10)",
            Kind.AT_LEAST,
            _each("bros-10-be-", f"sharegpt-{other}", f"lmsys-{other}"),
            beside=_each(f"bros-10-model-be-sharegpt-{other}-", "opt-13b", "opt-30b", "llama-3-70b"),
            shown_by="cohort reproduce --figure bros-10-model-be",
        )
        for other, name in (("vllm", "vLLM"), ("rr", "round robin"))
    ),
    Claim(
        "BROS",
        "attainment by shared blocks (Fig. 13)",
        Kind.OVER,
        ("bros-13-ttft", "bros-13-tpot"),
        "hardly a request fails to get a block",
        ("bros-13-recomputed", "bros-13-ttft-drops", "bros-13-tpot-drops"),
        shown_by="cohort reproduce --figure bros-13",
    ),
    Claim(
        "BROS",
        "decision over iteration time (Fig. 14)",
        Kind.AT_MOST,
        ("bros-14-overhead-opt-13b", "bros-14-overhead-opt-30b"),
        "wall time of the machine that simulated",
        shown_by="cohort bench decisions iteration",
    ),
    Claim(
        "AlignedServe",
        "decode throughput over DistServe, synthetic (Fig. 7)",
        Kind.OVER,
        ("alignedserve-7-synthetic-distserve-rate-unit-opt-2.7b",),
        "short requests go first; alignment gains nothing",
        ("alignedserve-7-synthetic-distserve-rate-unit-opt-13b",),
        shown_by="cohort reproduce --figure alignedserve-ceiling",
    ),
    Claim(
        "AlignedServe",
        "decode throughput over vLLM and FastGen (Fig. 7)",
        Kind.OVER,
        _each(
            "alignedserve-7-synthetic-", "vllm-rate-unit-opt-2.7b-waited", "chunked-prefill-rate-unit-opt-2.7b-waited"
        ),
        "waits of ours as the paper measured them",
        _each("alignedserve-7-synthetic-", "vllm-rate-unit-opt-2.7b-plain", "chunked-prefill-rate-unit-opt-2.7b-plain"),
        shown_by="cohort reproduce --figure alignedserve-7-synthetic",
    ),
    Claim(
        "AlignedServe",
        "largest factor of decode throughput, LongBench, ShareGPT, Azure (Fig. 8)",
        Kind.OVER,
        _each("alignedserve-8-", "longbench-best", "sharegpt-best", "azure-best"),
        "over FastGen the most",
        _each("alignedserve-8-", "azure-distserve-rate-unit-opt-2.7b", "azure-distserve-rate-unit-opt-13b"),
        shown_by="cohort reproduce --figure alignedserve-8",
    ),
    Claim(
        "AlignedServe",
        "P99 time between tokens, times lower, least and most (Fig. 9)",
        Kind.OVER,
        _each("alignedserve-9-synthetic-", "least", "most"),
        "memory is filled, so iterations are longer",
        (
            "alignedserve-9-synthetic-distserve-tpot-unit-opt-13b-held",
            *_each("alignedserve-15-", "sharegpt-second", "longbench-second"),
        ),
        shown_by="cohort reproduce --figure alignedserve-9-synthetic-distserve",
    ),
    Claim(
        "AlignedServe",
        "deciding about batches (Fig. 11)",
        Kind.AT_MOST,
        ("alignedserve-11-deciding",),
        shown_by="cohort bench decisions placement",
    ),
    Claim(
        "AlignedServe",
        "forwards that take 30 ms at most, and with FCFS more (Fig. 13)",
        Kind.AT_MOST,
        tuple(f"alignedserve-13-{data}-{order}" for data in ("longbench", "sharegpt") for order in ("aligned", "fcfs")),
        "memory is filled, so iterations are longer",
        ("alignedserve-13-held",),
        shown_by="cohort reproduce --figure alignedserve-13",
    ),
    Claim(
        "AlignedServe",
        "throughput lost without prefetch (Fig. 14)",
        Kind.CHANGE,
        ("alignedserve-14-prefetch-blocks",),
        "few iterations wait for KV here",
        ("alignedserve-14-prefetch",),
        shown_by="cohort reproduce --figure alignedserve-14-prefetch",
    ),
    Claim(
        "AlignedServe",
        "throughput lost without prefetch and alignment (Fig. 14)",
        Kind.CHANGE,
        ("alignedserve-14-alignment-blocks",),
        "the order of requests, not the alignment",
        ("alignedserve-14-alignment",),
        shown_by="cohort reproduce --figure alignedserve-ceiling",
    ),
    Claim(
        "AlignedServe",
        "iterations that hold more than one batch (§4.4)",
        Kind.AT_MOST,
        ("alignedserve-mixed-sharegpt", "alignedserve-mixed-longbench"),
        "answers of one batch end far apart",
        shown_by="cohort reproduce --figure alignedserve-mixed",
    ),
    Claim(
        "DynaServe",
        "throughput of disaggregation (Table 1)",
        Kind.VALUE,
        _table_1("disaggregated-throughput"),
        beside=_table_1("unified-throughput"),
    ),
    Claim(
        "DynaServe",
        "median TBT of disaggregation (Table 1)",
        Kind.VALUE,
        _table_1("disaggregated-p50-tbt"),
        beside=_table_1("unified-p50-tbt"),
        shown_by="cohort reproduce --figure dynaserve-table1-reasoning-disaggregated",
    ),
    Claim(
        "DynaServe",
        "P99 TBT of both baselines (Table 1)",
        Kind.VALUE,
        (*_table_1("disaggregated-p99-tbt"), "dynaserve-table1-reasoning-unified-p99-tbt"),
        "a simulated process has no jitter",
        _table_1("unified-p99-tbt")[:-1],
        shown_by="cohort reproduce --figure dynaserve-table1 --scatter 0.1",
    ),
    *(
        Claim(
            "DynaServe",
            f"serving capacity over {name}: mean, least, most (Fig. 9)",
            Kind.OVER,
            tuple(f"dynaserve-9-{which}-{other}" for which in ("mean", "least", "most")),
            why,
            shown_by=f"cohort reproduce --figure {shown}",
        )
        for name, other, why, shown in (
            ("colocation", "colocated", "a tuned chunk of 512 keeps the bound", "dynaserve-9-capacity-azure-code"),
            ("disaggregation", "disaggregated", "more than theirs on Azure Code", "dynaserve-9-capacity"),
        )
    ),
    *(
        Claim(
            "DynaServe",
            f"ahead of {name} on each workload (Fig. 9)",
            Kind.MORE,
            tuple(f"dynaserve-9-capacity-{load}-{other}" for load in ("azure-code", "burstgpt", "arxiv", "reasoning")),
            why,
            shown_by="cohort reproduce --figure dynaserve-9-capacity",
        )
        for name, other, why in (
            ("colocation", "colocated", "a tuned chunk of 512 keeps the bound"),
            ("disaggregation", "disaggregated", ""),
        )
    ),
    Claim(
        "DynaServe",
        "goodput over both baselines, the most (Fig. 8)",
        Kind.OVER,
        ("dynaserve-8-best-colocated", "dynaserve-8-best-disaggregated"),
        "tuned chunks leave little to gain",
        shown_by="cohort reproduce --figure dynaserve-table2-capacity-eager",
    ),
    *(
        Claim(
            "DynaServe",
            f"ahead of {name} in goodput, each model (Fig. 8)",
            Kind.MORE,
            (
                f"dynaserve-8-goodput-{other}",
                *(
                    f"dynaserve-8-goodput-{size}-{load}-{other}"
                    for size in ("32b", "72b")
                    for load in ("azure-code", "burstgpt")
                ),
            ),
            why,
            shown_by="cohort reproduce --figure dynaserve-splits-8",
        )
        for name, other, why in (
            ("colocation", "colocated", "tuned chunks leave little to gain"),
            ("disaggregation", "disaggregated", "hardly any on BurstGPT"),
        )
    ),
    Claim(
        "DynaServe",
        "goodput under bursts (Fig. 10)",
        Kind.MORE,
        ("dynaserve-10-replay-colocated", "dynaserve-10-replay-disaggregated"),
        "all are full, hardly a token is late",
        shown_by="cohort reproduce --figure dynaserve-10-replay",
    ),
    Claim(
        "DynaServe",
        "hybrid capacity, DynaServe and disaggregation (Table 2)",
        Kind.VALUE,
        ("dynaserve-table2-requests-dynaserve", "dynaserve-table2-requests-disaggregated"),
        beside=_each("dynaserve-table2-capacity-", "dynaserve", "disaggregated"),
    ),
    Claim(
        "DynaServe",
        "hybrid capacity, colocation (Table 2)",
        Kind.VALUE,
        ("dynaserve-table2-requests-colocated",),
        "theirs uses half of what devices could",
        ("dynaserve-table2-capacity-colocated",),
        shown_by="cohort reproduce --figure dynaserve-table2-capacity",
    ),
    Claim(
        "DynaServe",
        "tokens within 100 ms, with and without SLO-aware batches (Fig. 11)",
        Kind.VALUE,
        ("dynaserve-11-aware", "dynaserve-11-unaware"),
    ),
    Claim(
        "DynaServe",
        "goodput kept under prediction errors (Table 4)",
        Kind.VALUE,
        _each("dynaserve-table4-sigma-", "10", "50", "100"),
        "requests stay whole here, so errors matter little",
    ),
    Claim("DynaServe", "transfer time hidden by chunks (§6.6)", Kind.VALUE, ("dynaserve-transfer",)),
    Claim("DynaServe", "goodput of an offline search of the split (§4.1)", Kind.VALUE, ("dynaserve-oracle",)),
    Claim(
        "DynaServe",
        "scheduling of a request (Table 3)",
        Kind.AT_MOST,
        ("dynaserve-table3-overhead",),
        shown_by="cohort bench decisions placement",
    ),
    Claim(
        "EcoServe",
        "sustained rate over vLLM, ShareGPT and BookCorpus (Fig. 10)",
        Kind.OVER,
        _each("ecoserve-10-rate-", "sharegpt-vllm", "bookcorpus-vllm")
        + _each("ecoserve-10-rate-", "sharegpt-vllm-llama-33b", "bookcorpus-vllm-llama-33b", "sharegpt-vllm-opt-175b"),
        "our vLLM already fills the KV slots",
        shown_by="cohort reproduce --figure ecoserve-1-kv",
    ),
    Claim(
        "EcoServe",
        "the same with lending by forecast, which is ours, ShareGPT",
        Kind.OVER,
        _each("ecoserve-10-rate-sharegpt-vllm-", "forecast", "llama-33b-forecast", "opt-175b-forecast"),
        "few more rows fit than vLLM runs",
        shown_by="cohort reproduce --figure ecoserve-10-oracle",
    ),
    Claim(
        "EcoServe",
        "sustained rate over vLLM, Alpaca (Fig. 10)",
        Kind.OVER,
        _each("ecoserve-10-rate-alpaca-vllm", "", "-llama-33b"),
        "within the paper's range over models",
        shown_by="cohort reproduce --figure ecoserve-10-rate-alpaca",
    ),
    Claim(
        "EcoServe",
        "sustained rate over FastGen, ShareGPT and BookCorpus (Fig. 10)",
        Kind.OVER,
        _each("ecoserve-10-rate-", "sharegpt-fastgen", "bookcorpus-fastgen")
        + _each("ecoserve-10-rate-", "sharegpt-fastgen-llama-33b", "bookcorpus-fastgen-llama-33b"),
        "allocating on demand fills more slots",
        shown_by="cohort reproduce --figure ecoserve-1-kv",
    ),
    Claim(
        "EcoServe",
        "sustained rate over FastGen, Alpaca (Fig. 10)",
        Kind.OVER,
        _each("ecoserve-10-rate-alpaca-fastgen", "", "-llama-33b"),
        "gone with the anchored iterations and headroom",
        shown_by="cohort reproduce --figure ecoserve-10-rate-alpaca-fastgen",
    ),
    Claim(
        "EcoServe",
        "sustained rate over ORCA, three data sets (Fig. 10)",
        Kind.OVER,
        tuple(
            f"ecoserve-10-rate-{name}-orca{model}"
            for name in ("sharegpt", "bookcorpus", "alpaca")
            for model in ("", "-llama-33b")
        ),
        "ahead everywhere, by other factors",
        shown_by="cohort reproduce --figure ecoserve-10-rate",
    ),
    Claim(
        "EcoServe",
        "SLO satisfaction over vLLM and FastGen (Fig. 10)",
        Kind.OVER,
        ("ecoserve-10-slo-vllm", "ecoserve-10-slo-fastgen"),
        "allocating on demand serves more here",
        shown_by="cohort reproduce --figure ecoserve-10-slo",
    ),
    Claim(
        "EcoServe",
        "throughput over vLLM (Fig. 11)",
        Kind.OVER,
        ("ecoserve-11-throughput-full-printed",),
        "throughput follows the rows that fit",
        shown_by="cohort reproduce --figure ecoserve-1-kv",
    ),
    Claim(
        "EcoServe",
        "job completion time against vLLM (Fig. 11)",
        Kind.OVER,
        ("ecoserve-11-jct-full-printed",),
        "throughput follows the rows that fit",
        shown_by="cohort reproduce --figure ecoserve-11-jct",
    ),
    Claim(
        "EcoServe",
        "requests without allocation failure (Fig. 1d)",
        Kind.VALUE,
        _each("ecoserve-1d-failures-", "sd", "oracle"),
        beside=("ecoserve-1d-failures", *_each("ecoserve-1d-failures-", "vllm", "fastgen")),
    ),
    Claim(
        "EcoServe",
        "KV slots filled by SyncDecoupled (Fig. 1)",
        Kind.VALUE,
        ("ecoserve-1-kv-sd",),
        beside=_each("ecoserve-1-kv-", "sdo", "full", "vllm"),
    ),
    Claim("EcoServe", "decoupled over coupled queues (Fig. 1)", Kind.OVER, ("ecoserve-1-sd-coupled",)),
    Claim(
        "EcoServe",
        "deciding time per token over vLLM's (Fig. 11j)",
        Kind.VALUE,
        ("ecoserve-11-scheduling",),
        "groups and loans cost more to decide",
        shown_by="cohort bench decisions iteration",
    ),
    Claim(
        "EcoServe",
        "best padding (Fig. 12)",
        Kind.VALUE,
        _each("ecoserve-12-padding-", "alpaca", "sharegpt", "bookcorpus"),
        "outliving a prediction costs little here",
        shown_by="cohort reproduce --figure ecoserve-12-padding",
    ),
)
