"""Models and KV pools the engine's tests share."""

from __future__ import annotations

import pytest
import torch

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.types import KvGeometry
from tests.engine_models import few_threads, model_folder, real_model

__all__ = ["model_folder", "few_threads", "real_model"]

GEOMETRY = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype_bytes=4, block_size=8)


@pytest.fixture(autouse=True)
def ranks_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that meet in this process choose their network for it; tests that come later choose their own."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def kv() -> KvTensors:
    """Ten blocks on the processor and six in the host pool, full of random numbers."""
    kv = KvTensors(GEOMETRY, num_blocks=10, host_blocks=6, dtype=torch.float32, device=torch.device("cpu"))
    kv.blocks.copy_(torch.randn_like(kv.blocks))
    kv.host_blocks.copy_(torch.randn_like(kv.host_blocks))
    return kv
