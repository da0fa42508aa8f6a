"""Options that are elsewhere now, or no options any more: the error for a file that still has them."""

from __future__ import annotations

_ABLATION = {
    "alignedserve": ("prefetch", "aligned", "fill_memory"),
    "baselines": ("rectangular_kv",),
    "bros": ("cut_prompts", "starving_every"),
    "bucketserve": ("max_buckets", "splitter", "staging_share"),
    "dynaserve": ("balance", "await_arrivals"),
    "ecoserve": ("decoupled", "synced", "ordered", "pipelined", "tune_padding"),
    "transfer": ("chunked",),
}

_RENAMED = {
    **{f"{section}.{name}": f"{section}.ablation.{name}" for section, names in _ABLATION.items() for name in names},
    "baselines.target_forward_tokens": "engine.target_forward_tokens",
    "ecoserve.target_forward_tokens": "engine.target_forward_tokens",
    "bros.profile": "engine.profile",
    "dynaserve.hand_over_s": "dynaserve.kv_transfer_s",
    "dynaserve.profile": "engine.profile",
    "engine.record_dir": "recording.folder",
}

_FIXED = {
    "alignedserve.buffer_share": "0.4",
    "alignedserve.longest_prefix": "65536",
    "alignedserve.slack": "0.25",
    "alignedserve.starvation_share": "0.5",
    "baselines.batch_spread": "1.5",
    "baselines.queue_levels": "5",
    "baselines.queue_quantum_s": "learned from measured iterations",
    "batch.busy_concurrency": "1",
    "bucketserve.demand_horizon_s": "1 s",
    "bucketserve.figures_max_age_s": "1 s",
    "bucketserve.forecast_max_age_s": "3 s",
    "bucketserve.memory_reserve": "0.1",
    "bucketserve.split_share": "0.5",
    "dynaserve.search_probes": "6",
    "ecoserve.deadline_ranges_s": "0.5 and 2 s",
    "ecoserve.occupied_range_tokens": "128",
    "ecoserve.overdue_range_s": "2 s",
    "ecoserve.slo_scale": "2",
    "ecoserve.under_cost": "3",
    "engine.report_interval_s": "0.2 s",
    "gateway.stall_timeout_s": "600 s",
    "manager.max_waiting_requests": "100000; gateway.max_waiting_requests bounds what comes in",
    "manager.settle_s": "2 s",
    "monitor.push_interval_s": "0.5 s",
    "monitor.silence_s": "3 s",
    "predictor.buffer_size": "20000",
    "transfer.lease_s": "5 s",
    "transfer.offer_timeout_s": "30 s",
    "transfer.stall_timeout_s": "5 s",
}

MOVED: dict[str, str] = {
    **{old: f"it is {new!r} now" for old, new in _RENAMED.items()},
    **{old: f"it is no option any more, but fixed: {value}" for old, value in _FIXED.items()},
    "bucketserve.padding": "'policies.iteration' padded_prefill alone pads the batches now",
}
"""Dotted old name → its replacement, as the end of a sentence."""
