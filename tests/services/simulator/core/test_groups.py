"""A model with sliding windows in some layers, simulated: memory is counted in blocks of groups of layers."""

from __future__ import annotations

from dataclasses import replace

from cohort.common.policies.compose import groups_layers
from cohort.services.simulator.core.sim_options import SimOptions
from tests.services.simulator.lab import MODEL, Recorded, cache_of, cluster, config, workload

MIXED = replace(MODEL, window=64, full_layers=1)


def test_groups_of_a_simulated_model() -> None:
    geometry = MIXED.kv_geometry(16, grouped=True)
    assert geometry.groups == (0, 64, 64, 64)
    assert geometry.token_bytes == MODEL.kv_geometry(16).token_bytes
    assert MIXED.kv_geometry(16) == MODEL.kv_geometry(16)
    assert replace(MODEL, window=64).kv_geometry(16, grouped=True).window == 64


def test_presets_whose_policies_count_one_table_keep_blocks_of_all_layers() -> None:
    grouped = {preset: groups_layers(config(preset)) for preset in ("cohort", "unified", "alignedserve", "bucketserve")}
    assert all(grouped.values()), grouped
    whole = {preset: groups_layers(config(preset)) for preset in ("bros", "ecoserve", "baseline-orca")}
    assert not any(whole.values()), whole


def test_more_sequences_run_in_the_same_memory() -> None:
    """Prompts of 64 and responses of 500 tokens, in memory for six whole ones: with groups none is preempted."""
    asked = workload(*[(0.0, 64, 500)] * 12)
    preempted, ends_s = {}, {}
    for model in (MODEL, MIXED):
        sim = Recorded(config(kv=cache_of(6 * 36)), cluster(), model, asked, SimOptions())
        sim.run()
        for worker in sim.workers:
            worker.machine.check()
            assert worker.machine.kv.owners() == {}
        preempted[model.full_layers] = sum(worker.machine.counters.preemptions for worker in sim.workers)
        ends_s[model.full_layers] = max(times[-1] for times in sim.token_times.values())
        assert {len(times) for times in sim.token_times.values()} == {500}
    assert preempted[0] > 0 == preempted[1]
    assert ends_s[1] < 0.8 * ends_s[0]
