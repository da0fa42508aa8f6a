"""A cache in FP8 in Triton: the same codes and scales as in torch, and attention over the numbers that they stand for.

On a GPU codes and scales lie in planes (`fp8_cache`); what a row stands for is what it does on a processor.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.fp8_cache import decoded, decoded_apart, encoded, encoded_apart, planes
from cohort.kernels.gpu import elementwise
from cohort.kernels.gpu.attention import attention, prefill
from cohort.kernels.gpu.slots import gather_slots, scatter_slots
from cohort.kernels.gpu.workspace import Workspace
from tests.examples import another_of_its_kind
from tests.kernels.gpu.attention.test_attention import MIXED, attend, decode, dense_flash, plan_of, sinks_of
from tests.kernels.test_fp8_cache import rows_of_all_sizes

DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=another_of_its_kind()) for each in (torch.float32, torch.float16))],
    ids=str,
)


def in_planes(numbers: Tensor) -> Tensor:
    """A cache [..., block size, D] in FP8, in planes."""
    codes, scales = encoded_apart(numbers)
    kv = torch.empty((*numbers.shape[:-1], numbers.shape[-1] + 4), dtype=torch.uint8, device=numbers.device)
    to_codes, to_scales = planes(kv)
    to_codes.copy_(codes)
    to_scales.copy_(scales)
    return kv


@pytest.fixture
def make_fp8_step(make_gpu_step):
    """A step over a cache in FP8, whose dense keys and values are those that the codes stand for: of a processor's."""

    def make(*args, **options):
        step = make_gpu_step(*args, **options)
        step.kv = in_planes(step.kv)
        step.keys, step.values = ([decoded(encoded(x)) for x in rows] for rows in (step.keys, step.values))
        return step

    return make


def test_a_row_means_the_same_in_planes():
    numbers = rows_of_all_sizes(torch.float32)
    assert torch.equal(
        decoded_apart(*encoded_apart(numbers)).nan_to_num(7.0), decoded(encoded(numbers)).nan_to_num(7.0)
    )


@DTYPES
def test_the_codes_that_are_written_are_those_of_torch(device, dtype):
    """Rows of many sizes, infinities and NaN among them; a slot below zero takes nothing. No bfloat16 below 2^-126,
    which Triton's interpreter does not widen right."""
    rows = rows_of_all_sizes(torch.float32 if dtype == torch.float32 else torch.bfloat16)
    numbers = rows[[*range(40, 254, 18), *range(256, 262)]].to(dtype).to(device)[:, None]
    slots = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(2)).to(device)
    slots[5] = -1
    ours = torch.full((-(-len(numbers) // 16), 2, 2, 1, 16, 76), 7, dtype=torch.uint8, device=device)
    theirs = ours.clone()
    elementwise.write_kv(numbers, numbers.flip(0), ours, 1, slots)
    held = slots >= 0
    reference.write_kv(numbers[held], numbers.flip(0)[held], theirs, 1, slots[held])
    for found, expected in zip(planes(ours), planes(theirs), strict=True):
        assert torch.equal(found.nan_to_num(3.0), expected.nan_to_num(3.0))


def test_keys_are_rotated_before_they_are_encoded(device):
    random = torch.Generator().manual_seed(4)
    query, key, value = torch.randn(3, 9, 2, 24, generator=random).to(device, torch.bfloat16)
    angle, positions = torch.rand(32, 12, generator=random).to(device), torch.arange(20, 29, device=device)
    slots, ours = torch.arange(9, device=device) * 3, torch.zeros(2, 1, 2, 2, 16, 28, dtype=torch.uint8, device=device)
    theirs, expected = ours.clone(), (query.clone(), key.clone())
    elementwise.rope_and_write_kv(query, key, value, angle.cos(), angle.sin(), positions, ours, 0, slots)
    reference.rope_inplace(*expected, angle.cos(), angle.sin(), positions)
    reference.write_kv(expected[1], value, theirs, 0, slots)
    assert torch.equal(ours, theirs) and ours.any()
    assert torch.equal(query, expected[0])


@DTYPES
@pytest.mark.parametrize("sliding_window", [25, pytest.param(0, marks=another_of_its_kind())])
def test_attention_is_that_over_the_numbers(make_fp8_step, assert_close, dtype, sliding_window):
    step = make_fp8_step(MIXED, dtype=dtype, directions="mixed", head_dim=32)
    assert_close(attend(step, sliding_window=sliding_window), step.expected(sliding_window))


@pytest.mark.parametrize("head_dim", [80, *(pytest.param(each, marks=another_of_its_kind()) for each in (64, 128))])
def test_heads_and_groups(make_fp8_step, assert_close, head_dim):
    step = make_fp8_step([(37, 20), (50, 1)], kv_heads=2, group=3, head_dim=head_dim, block_size=8, directions="mixed")
    assert_close(attend(step), step.expected())


@pytest.mark.parametrize("softcap", [1.5, pytest.param(0.0, marks=another_of_its_kind())])
def test_contexts_in_parts_with_sinks(make_fp8_step, assert_close, softcap):
    step = make_fp8_step([(length, 1) for length in (1, 17, 64, 90)], head_dim=32, directions="mixed")
    options = {"sinks": sinks_of(step), "softcap": softcap}
    assert_close(decode(step, plan_of(6), **options), step.expected(**options))


def test_scores_of_prompts_are_capped(make_fp8_step, assert_close):
    step = make_fp8_step([(20, 20), (45, 13)], dtype=torch.bfloat16, directions="mixed", head_dim=32)
    assert_close(attend(step, softcap=1.5, sliding_window=25), step.expected(25, 1.5))


@DTYPES
def test_keys_and_values_of_very_different_sizes(make_gpu_step, assert_close, dtype):
    """Each token's own scale is used, of keys and of values."""
    step = make_gpu_step([(40, 9), (70, 1)], dtype=dtype, head_dim=32)
    sizes = torch.ldexp(
        torch.ones(step.kv.shape[0], 1, 2, 1, 16, 1), torch.randint(-6, 3, (step.kv.shape[0], 1, 2, 1, 16, 1))
    )
    numbers = step.kv * sizes.to(step.kv.device, dtype)
    step.kv = in_planes(numbers)
    for row in range(2):
        block, slot = reference.row_slots(step.meta, row, int(step.meta.context_lens[row]))
        held = decoded(encoded(numbers[block, step.layer, :, :, slot])).cpu()
        step.keys[row], step.values[row] = held[:, 0], held[:, 1]
    assert_close(attend(step), step.expected())


def test_the_reference_reads_planes_too(make_fp8_step, assert_close):
    """What runs on a GPU without Triton."""
    step = make_fp8_step(MIXED, directions="mixed", head_dim=32)
    out = torch.full_like(step.query, float("nan"))
    live = [(20, 20), (45, 13), (19, 2), (1, 1)]
    reference.paged_attention(step.query, step.kv, step.layer, step.meta, step.scale, out, softcap=1.5)
    tokens = sum(count for _, count in live)
    assert_close(out[:tokens].cpu(), step.expected(softcap=1.5)[:tokens])


def test_flash_attention_is_given_the_numbers(make_fp8_step, assert_close, monkeypatch, device):
    step = make_fp8_step(MIXED, dtype=torch.bfloat16, directions="mixed")
    step.meta.workspace = Workspace(
        max_rows=8, query_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device, staging_tokens=128
    )
    step.meta.prefill_context = 20 + 45 + 19
    keys, values = prefill.stage(step.kv, step.layer, step.meta, *stage_of(step))
    assert torch.equal(keys.cpu().float(), torch.cat(step.keys[:3]))
    assert torch.equal(values.cpu().float(), torch.cat(step.values[:3]))
    if device.type != "cuda":
        monkeypatch.setattr(prefill, "flash_serves", lambda query: True)
        monkeypatch.setattr(prefill, "flash_function", lambda: dense_flash)
    assert_close(attend(step), step.expected())


def stage_of(step) -> tuple[Tensor, Tensor]:
    return step.meta.workspace.staging, step.meta.workspace.starts


def test_tokens_move_as_bytes_between_device_and_host(make_fp8_step):
    """By Triton on the device, by torch in host memory: the same dense tokens."""
    step = make_fp8_step(MIXED, dtype=torch.bfloat16)
    kv = step.kv
    slots = torch.randperm(kv.shape[0] * 16, generator=torch.Generator().manual_seed(3))[:40].to(kv.device)
    held = torch.zeros(40, *kv.shape[1:4], kv.shape[5], dtype=torch.uint8, device=kv.device)
    gather_slots(kv, slots, held)
    expected = torch.zeros_like(held)
    reference.gather_slots(kv, slots, expected, apart=True)
    assert torch.equal(held, expected)
    ours, theirs = torch.zeros_like(kv), torch.zeros_like(kv)
    scatter_slots(held, ours, slots)
    reference.scatter_slots(held, theirs, slots, apart=True)
    assert torch.equal(ours, theirs)
    back = torch.zeros_like(held)
    reference.gather_slots(ours, slots, back, apart=True)
    assert torch.equal(back, held) and held.any()


def test_rows_of_a_processor_are_refused(make_gpu_step):
    step = make_gpu_step([(40, 1)])
    step.kv = encoded(step.kv)
    with pytest.raises(ValueError, match="do not fit a cache"):
        attention.check(step.query, step.kv, step.meta, step.query)
