"""How a GPU's memory is divided, in figures worked out by hand."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.config.device_memory import SAMPLER_BYTES, STAGING_TOKENS, kv_bytes, step_bytes
from cohort.common.engine.config.model_config import ModelGeometry, RopeConfig

GIB = 1 << 30
LLAMA_8B = ModelGeometry(
    model_type="llama",
    family="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_positions=8192,
    norm_eps=1e-5,
    tie_embeddings=False,
    activation="silu",
    eos_token_ids=(),
    checkpoint_dtype="bfloat16",
    rope=RopeConfig(500000.0, "default", {}),
    sliding_windows=(0,) * 32,
)


def test_one_worker_takes_its_fraction_less_weights_and_reserve() -> None:
    assert kv_bytes(total=140 * GIB, free=124 * GIB, own=16 * GIB, sharers=1, fraction=0.9, reserved=4 * GIB) == (
        int(0.9 * 140 * GIB) - 20 * GIB
    )
    # another process is on the device
    assert kv_bytes(total=140 * GIB, free=50 * GIB, own=16 * GIB, sharers=1, fraction=0.9, reserved=4 * GIB) == (
        41 * GIB
    )
    assert kv_bytes(total=140 * GIB, free=139 * GIB, own=16 * GIB, sharers=1, fraction=0.5, reserved=4 * GIB) == (
        50 * GIB
    )


def test_a_full_device_leaves_nothing() -> None:
    assert kv_bytes(total=16 * GIB, free=GIB, own=14 * GIB, sharers=1, fraction=0.9, reserved=2 * GIB) == 0


@given(
    sharers=st.integers(1, 4),
    fraction=st.floats(0.1, 1.0),
    weights=st.integers(0, 30),
    reserved=st.integers(0, 4),
    total=st.integers(16, 200),
    order=st.permutations(range(4)),
)
def test_together_the_sharers_never_take_more_than_the_device_has(
    sharers: int, fraction: float, weights: int, reserved: int, total: int, order: list[int]
) -> None:
    """In any order of measuring: workers load one after the other here, in any mixture of loading and dividing."""
    used = 0
    loaded = [False] * sharers
    for worker in [each for each in order if each < sharers]:
        for other in range(worker + 1):  # some others have their weights already, some not
            if not loaded[other] and used + weights * GIB <= total * GIB:
                loaded[other], used = True, used + weights * GIB
        if not loaded[worker]:
            continue
        kv = kv_bytes(
            total=total * GIB,
            free=total * GIB - used,
            own=weights * GIB,
            sharers=sharers,
            fraction=fraction,
            reserved=reserved * GIB,
        )
        assert kv >= 0
        assert kv == 0 or kv + reserved * GIB + weights * GIB <= fraction * total * GIB / sharers + 1
        used += kv + (reserved * GIB if kv else 0)
    assert used <= total * GIB


def test_the_reserve_for_a_step_covers_its_largest_tensors() -> None:
    taken = step_bytes(LLAMA_8B, 2, 256, 2048)
    gate_up, logits, staging = 2048 * 2 * 14336 * 2, 256 * 128256 * (2 + 4), 2 * STAGING_TOKENS * 8 * 128 * 2
    assert taken > gate_up + logits + staging + SAMPLER_BYTES
    assert taken < 4 * GIB
    assert step_bytes(dataclasses.replace(LLAMA_8B, vocab_size=256512), 2, 256, 2048) - taken == 256 * 128256 * 6
