"""A position's attention has the same bits in every step, on a GPU too where that is asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.gpu import plan
from cohort.kernels.gpu.attention import attention, positions
from cohort.kernels.gpu.workspace import Workspace
from tests.examples import another_of_its_kind
from tests.kernels.gpu.attention.test_fp8 import make_fp8_step as make_fp8_step
from tests.kernels.test_attention_invariance import Cut, assert_same_bits, cuts_of, step_of

PART = 32
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the length of two tiles and less, so that short contexts have several."""
    monkeypatch.setattr(plan, "_PART_KEYS", PART)
    monkeypatch.setattr(positions, "_planned", _planned)


def _planned(**shape: int) -> plan.PositionPlan:
    found = plan.position_plan(**shape)
    return plan.PositionPlan(16, 16 // shape["group"], 16, PART, 2, found.warps, found.stages)


def attend(step: Any, cuts: Sequence[Cut], *, room: int = 64, **options: Any) -> dict[tuple[int, int], Tensor]:
    """(row, position) → its output, of one step with these rows; `step` has a query for every position."""
    starts, meta = step.meta.query_start.tolist(), step.meta
    query = torch.cat([step.query[starts[row] + begin : starts[row] + end] for row, begin, end in cuts])
    rows = torch.tensor([row for row, _, _ in cuts], device=query.device)
    cut_meta = AttentionMeta(
        query_start=torch.tensor([0, *(end - begin for _, begin, end in cuts)]).cumsum(0).to(query.device, torch.int32),
        context_lens=torch.tensor([end for _, _, end in cuts], dtype=torch.int32, device=query.device),
        block_tables=meta.block_tables[rows].contiguous(),
        directions=None,
        block_size=meta.block_size,
        max_query_len=max(end - begin for _, begin, end in cuts),
        num_prefill_rows=sum(end - begin > 1 for _, begin, end in cuts),
    )
    out = torch.full_like(query, float("nan"))
    positions.attend(
        query,
        step.kv,
        step.layer,
        cut_meta,
        attention.scaling(step.scale, options.get("softcap", 0.0)),
        out,
        options.get("sliding_window", 0),
        options.get("sinks"),
        pad_dim=attention.padded(query.shape[2]),
        widen=attention.WIDEN_PRODUCTS,
        room=room,
    )
    places = [(row, position) for row, begin, end in cuts for position in range(begin, end)]
    return dict(zip(places, out, strict=True))


CASES = [
    pytest.param("gpt-oss", {"kv_heads": 1, "group": 4}, torch.bfloat16),
    *(
        pytest.param(form, {}, dtype, marks=another_of_its_kind())
        for form in ("llama", "qwen", "narrow", "gemma", "gpt-oss")
        for dtype in DTYPES
    ),
]


@pytest.mark.parametrize(("form", "heads", "dtype"), CASES)
def test_cuts_of_the_same_tokens(make_gpu_step, form, heads, dtype):
    contexts = [41, 9]
    step, options = step_of(form, make_gpu_step, contexts, dtype=dtype, directions="mixed", head_dim=16, **heads)
    options["sliding_window"] = min(options["sliding_window"], 37)
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"].to(step.query.device)
    expected = attend(step, [(0, 0, 41)], **options) | attend(step, [(1, 0, 9)], **options)
    out = torch.empty_like(step.query)
    reference.paged_attention(step.query, step.kv, step.layer, step.meta, step.scale, out, **options)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(torch.stack(list(expected.values())), out, **tolerance)
    one_by_one = [(0, at, at + 1) for at in (4, 40)]
    assert_same_bits(attend(step, one_by_one, **options), expected)  # some in parts, some not: room for 64 of them
    assert_same_bits(attend(step, one_by_one[-1:], **options), expected)
    assert_same_bits(attend(step, one_by_one[-1:], room=0, **options), expected)
    cuts = cuts_of(contexts, 20, random.Random(len(form)))
    for begin in range(0, len(cuts), 4):
        assert_same_bits(attend(step, cuts[begin : begin + 4], **options), expected)


def test_a_cache_in_fp8(make_fp8_step, assert_close):
    """By the same kernel: a key's scale multiplies its scores, a value's its weights."""
    step = make_fp8_step([(41, 41)], kv_heads=1, group=4, head_dim=16, dtype=torch.bfloat16, directions="mixed")
    expected = attend(step, [(0, 0, 41)])
    assert_close(torch.stack(list(expected.values())).cpu(), step.expected())
    assert_same_bits(attend(step, [(0, 4, 5), (0, 30, 34), (0, 40, 41)]), expected)


def test_what_lies_in_slots_of_no_token_changes_nothing(make_gpu_step):
    """Behind the context (rejected drafts) and before the window (released blocks), in the same tile."""
    step = make_gpu_step([(60, 60)], kv_heads=1, group=4, head_dim=16)
    rows: list[Cut] = [(0, 40, 43)]
    expected = attend(step, rows, sliding_window=20)
    table = step.meta.block_tables[0].long()
    step.kv[table[43 // 16 + 1 :]] = float("inf")
    step.kv[table[43 // 16], :, :, :, 43 % 16 :] = float("nan")
    step.kv[table[: 21 // 16]] = float("nan")
    step.kv[table[21 // 16], :, :, :, : 21 % 16] = float("nan")
    assert_same_bits(attend(step, rows, sliding_window=20), expected)


def test_a_workspace_says_which_kernel_attends(make_gpu_step, device, monkeypatch):
    """Prompt and decode row by one kernel, although flash attention is there."""
    step = make_gpu_step([(20, 20), (9, 1)], kv_heads=1, group=4, head_dim=16)
    shape = {"query_heads": 4, "kv_heads": 1, "head_dim": 16, "dtype": torch.float32, "device": device}
    step.meta.workspace = Workspace(max_rows=2, staging_tokens=64, batch_invariant=True, **shape)
    for other in ("flash_prefill", "prefill", "decode"):
        monkeypatch.setattr(attention, other, lambda *given, **options: pytest.fail("another kernel was asked"))
    out = torch.full_like(step.query, float("nan"))
    attention.paged_attention(step.query, step.kv, step.layer, step.meta, step.scale, out)
    torch.testing.assert_close(out.cpu(), step.expected().float(), rtol=1e-5, atol=1e-5)
