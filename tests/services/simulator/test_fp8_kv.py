"""The simulator keeps keys and values as `kv.cache_dtype` says: as many bytes a token as a worker of that device."""

from __future__ import annotations

import pytest

from cohort.common.config import load_config
from cohort.common.policies.cost_model import CostModel
from cohort.services.simulator.core.deployment import kv_blocks
from cohort.services.simulator.hardware.hardware import as_stored, load_cluster, load_model


@pytest.mark.parametrize(("cluster_name", "row"), [("h100-80", 132), ("cpu-2core", 129)])
def test_the_bytes_of_a_token_are_those_of_the_engine(cluster_name: str, row: int) -> None:
    model, cluster = load_model("llama-3-8b"), load_cluster(cluster_name)
    plain, fp8 = (load_config(overrides={"kv": {"cache_dtype": name}}) for name in ("auto", "fp8"))
    assert as_stored(model, plain, cluster) is model
    kept = as_stored(model, fp8, cluster)
    assert kept.kv_geometry(16).token_bytes == 2 * 32 * 8 * row
    assert as_stored(kept, fp8, cluster) == kept


def test_blocks_and_attention_follow_the_bytes() -> None:
    model, cluster = load_model("llama-3-8b"), load_cluster("h100-80")
    fp8 = load_config(overrides={"engine": {"device": "cuda"}, "kv": {"cache_dtype": "fp8"}})
    kept = as_stored(model, fp8, cluster)
    blocks = [kv_blocks(fp8, cluster, each, each.kv_geometry(16))[0] for each in (model, kept)]
    assert blocks[1] / blocks[0] == pytest.approx(256 / 132, rel=1e-3)
    of_position = [CostModel(each, cluster.device, cluster.stack)._position_s for each in (model, kept)]
    assert of_position[1] / of_position[0] == pytest.approx(132 / 256)
