"""A position's attention has the same bits however a step was cut: prompt, chunk, drafted row, decode row."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohort.kernels.cpu import native
from cohort.kernels.ops.paged_attention import AttentionMeta, paged_attention
from tests.examples import examples

from .conftest import MakeStep, Step

Cut = tuple[int, int, int]
"""Row, first position, and the position behind the last."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def only_native() -> None:
    if native.implementation() != "native":
        pytest.skip("the reference multiplies by torch, whose sums follow the shape of a product")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attend(step: Step, cuts: Sequence[Cut], **options: Any) -> dict[tuple[int, int], Tensor]:
    """(row, position) → its output, of one step with these rows; `step` has a query for every position."""
    starts, meta = step.meta.query_start.tolist(), step.meta
    query = torch.cat([step.query[starts[row] + begin : starts[row] + end] for row, begin, end in cuts])
    rows = torch.tensor([row for row, _, _ in cuts])
    cut_meta = AttentionMeta(
        query_start=torch.tensor([0, *(end - begin for _, begin, end in cuts)]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor([end for _, _, end in cuts], dtype=torch.int32),
        block_tables=meta.block_tables[rows].contiguous(),
        directions=None if meta.directions is None else meta.directions[rows].contiguous(),
        block_size=meta.block_size,
        max_query_len=max(end - begin for _, begin, end in cuts),
        num_prefill_rows=sum(end - begin > 1 for _, begin, end in cuts),
    )
    out = torch.full_like(query, float("nan"))
    paged_attention(query, step.kv, step.layer, cut_meta, step.scale, out, **options)
    places = [(row, position) for row, begin, end in cuts for position in range(begin, end)]
    return dict(zip(places, out, strict=True))


def whole(step: Step, **options: Any) -> dict[tuple[int, int], Tensor]:
    """Every row a prompt computed at once, each in a step of its own."""
    found: dict[tuple[int, int], Tensor] = {}
    for row, context in enumerate(step.meta.context_lens.tolist()):
        found |= attend(step, [(row, 0, context)], **options)
    return found


def assert_same_bits(found: dict[tuple[int, int], Tensor], expected: dict[tuple[int, int], Tensor]) -> None:
    assert found
    ours, theirs = torch.stack(list(found.values())), torch.stack([expected[place] for place in found])
    bits = torch.int32 if ours.dtype == torch.float32 else torch.int16
    differ = (ours.view(bits) != theirs.view(bits)).flatten(1).any(1)
    assert not differ.any(), (
        f"{int(differ.sum())} positions of {len(found)}, e.g. {list(found)[int(differ.int().argmax())]}"
    )


def cuts_of(contexts: Sequence[int], longest: int, chance: random.Random) -> list[Cut]:
    """All rows' positions in pieces of 1 to `longest`, in any order."""
    cuts: list[Cut] = []
    for row, context in enumerate(contexts):
        at = 0
        while at < context:
            end = min(context, at + chance.randint(1, longest))
            cuts.append((row, at, end))
            at = end
    chance.shuffle(cuts)
    return cuts


FORMS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2, "group": 4},
    "qwen": {"kv_heads": 2, "group": 7},
    "opt": {"kv_heads": 3, "group": 1},
    "gemma": {"kv_heads": 1, "group": 2, "head_dim": 96, "window": 100, "softcap": 2.0},
    "gpt-oss": {"kv_heads": 2, "group": 8, "window": 128, "sinks": True},
    "narrow": {"kv_heads": 1, "group": 3, "head_dim": 20, "window": 33},
    "latents": {"kv_heads": 1, "group": 20, "head_dim": 72, "latents": True},
}


def step_of(form: str, make_step: MakeStep, contexts: Sequence[int], **more: Any) -> tuple[Step, dict[str, Any]]:
    """A step with a query for every position, and the options of the form's attention."""
    shape = dict(FORMS[form])
    window, softcap = shape.pop("window", 0), shape.pop("softcap", 0.0)
    sinks, latents = shape.pop("sinks", False), shape.pop("latents", False)
    step = make_step([(context, context) for context in contexts], **({"head_dim": 64} | shape | more))
    if latents:
        step.kv = step.kv[:, :, :1].contiguous()
    heads = torch.linspace(-3, 3, step.query.shape[1]) if sinks else None
    return step, {"sliding_window": window, "softcap": softcap, "sinks": heads}


@DTYPES
@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_at_once_and_token_by_token(make_step, dtype, form):
    step, options = step_of(form, make_step, [300, 131], dtype=dtype, directions="mixed")
    expected = whole(step, **options)
    for row, position in list(expected)[::7]:
        assert_same_bits(attend(step, [(row, position, position + 1)], **options), expected)
    single = [(row, position, position + 1) for row, position in expected]
    assert_same_bits(attend(step, single, **options), expected)


@DTYPES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("positions", range(1, 9))
def test_rows_of_a_few_positions(make_step, dtype, form, positions):
    """What verifies drafts: some positions behind a context, alone and beside others."""
    step, options = step_of(form, make_step, [290, 140, 9], dtype=dtype)
    expected = whole(step, **options)
    rows = [(0, 250, 250 + positions), (1, 127, 127 + positions), (2, 1, 1 + positions)]
    for row in rows:
        assert_same_bits(attend(step, [row], **options), expected)
    assert_same_bits(attend(step, rows, **options), expected)
    assert_same_bits(attend(step, [*rows, (0, 30, 250), (1, 0, 127)], **options), expected)


@settings(max_examples=examples(1), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_of_any_step(make_step, data):
    contexts = data.draw(st.lists(st.integers(1, 280), min_size=1, max_size=3))
    step, options = step_of(
        data.draw(st.sampled_from(sorted(FORMS))),
        make_step,
        contexts,
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        block_size=data.draw(st.sampled_from([1, 8, 16, 24, 32])),
        directions=data.draw(st.sampled_from(["forward", "reversed", "mixed"])),
        seed=data.draw(st.integers(0, 1000)),
    )
    options["sliding_window"] = data.draw(st.sampled_from([options["sliding_window"], 0, 1, 50]))
    expected = whole(step, **options)
    chance = random.Random(data.draw(st.integers(0, 10**6)))
    cuts = cuts_of(contexts, data.draw(st.sampled_from([1, 4, 9, 70, 280])), chance)
    with threads(data.draw(st.integers(1, 2))):
        for begin in range(0, len(cuts), batch := data.draw(st.integers(1, len(cuts)))):
            assert_same_bits(attend(step, cuts[begin : begin + batch], **options), expected)


@DTYPES
@pytest.mark.parametrize("window", [0, 700])
def test_contexts_in_parts(make_step, dtype, window):
    """A step of one long row is split among threads; beside many others it is not."""
    step, options = step_of("gpt-oss", make_step, [1500, 40], dtype=dtype, directions="mixed")
    options["sliding_window"] = window
    with threads(1):
        expected = whole(step, **options)
    rows = [(0, 1400, 1401), (0, 1490, 1494), (0, 1499, 1500)]
    with threads(2):
        for row in rows:
            assert_same_bits(attend(step, [row], **options), expected)
        assert_same_bits(attend(step, [*rows, *[(1, at, at + 1) for at in range(40)]], **options), expected)
        assert_same_bits(attend(step, [(0, 1200, 1500)], **options), expected)


@DTYPES
def test_what_lies_in_slots_of_no_token_changes_nothing(make_step, dtype):
    """Behind the context (rejected drafts) and before the window (released blocks), in the same tile."""
    step, options = step_of("gpt-oss", make_step, [200], dtype=dtype)
    expected = whole(step, **options)
    assert_same_bits(attend(step, [(0, 150, 154)], **options), expected)
    beyond = step.meta.block_tables[0, 154 // 16 + 1 :]
    step.kv[beyond.long()] = float("inf")
    step.kv[step.meta.block_tables[0, 154 // 16].long(), :, :, :, 154 % 16 :] = float("nan")
    step.kv[step.meta.block_tables[0, : (150 - 127) // 16].long()] = float("nan")
    assert_same_bits(attend(step, [(0, 150, 154)], **options), expected)
