"""Triton's paged attention against dense attention in float64, which knows nothing of blocks, slots or directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.gpu.attention import attention, prefill
from cohort.kernels.gpu.plan import DecodePlan
from cohort.kernels.gpu.workspace import Workspace
from tests.examples import another_of_its_kind, examples
from tests.support.kinds import in_turn

NIGHTLY = another_of_its_kind()
RAGGED = [(70, 1), (1, 1), (0, 1), (16, 1), (150, 1)]  # one token, none at all, full blocks, a few keys over
MIXED = [(20, 20), (45, 13), (19, 2), (1, 1), (0, 1), (16, 1), (140, 1)]  # a prompt, chunks after a prefix, decode rows
TYPES_AND_WINDOWS = pytest.mark.parametrize(
    ("dtype", "sliding_window"),
    [
        (torch.float32, 25),
        (torch.bfloat16, 0),
        pytest.param(torch.float32, 0, marks=NIGHTLY),
        pytest.param(torch.bfloat16, 25, marks=NIGHTLY),
        pytest.param(torch.float16, 0, marks=NIGHTLY),
        pytest.param(torch.float16, 25, marks=NIGHTLY),
    ],
)


def attend(step, **options) -> Tensor:
    out = torch.full_like(step.query, float("nan"))
    attention.paged_attention(step.query, step.kv, step.layer, step.meta, step.scale, out, **options)
    return out.cpu()


def sinks_of(step) -> Tensor:
    return torch.linspace(-3.0, 6.0, step.query.shape[1], device=step.query.device)


def plan_of(items: int, programs: int = 3) -> DecodePlan:
    """A part is a tile of 16 keys, or as much longer as makes no more than about `items`."""
    return DecodePlan(programs, items, min_part_keys=16, tile_keys=16, warps=1, stages=2)


def decode(
    step, plan: DecodePlan, *, sliding_window: int = 0, sinks: Tensor | None = None, softcap: float = 0.0
) -> Tensor:
    out = torch.full_like(step.query, float("nan"))
    attention.decode(step.query, step.kv, step.layer, step.meta, step.scale, out, sliding_window, plan, sinks, softcap)
    return out.cpu()


def workspace_for(step, **options) -> Workspace:
    chosen = {"staging_tokens": 256, "max_rows": 8, **options}
    return Workspace(
        query_heads=step.query.shape[1],
        kv_heads=step.kv.shape[3],
        head_dim=step.query.shape[2],
        dtype=step.kv.dtype,
        device=step.kv.device,
        **chosen,
    )


@pytest.mark.parametrize(
    ("dtype", "directions"),
    [
        *(pytest.param(torch.float32, each, marks=NIGHTLY) for each in ("forward", "reversed")),
        (torch.float32, "mixed"),
        (torch.bfloat16, "mixed"),
        (torch.float16, "mixed"),
    ],
)
def test_decode_rows_of_any_length(make_gpu_step, assert_close, dtype, directions):
    step = make_gpu_step(RAGGED, dtype=dtype, directions=directions)
    assert_close(attend(step), step.expected())


def test_a_row_without_a_context_gives_zeros(make_gpu_step):
    step = make_gpu_step(RAGGED)
    assert attend(step)[2].eq(0).all()
    assert decode(step, plan_of(items=40))[2].eq(0).all()


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    in_turn(
        [
            (*sizes, dtype)
            for sizes in ((64, 1), (80, 3), (96, 5), (128, 4), (256, 8), (20, 17))
            for dtype in (torch.float32, torch.bfloat16)
        ],
        of=2,
    ),
)
def test_every_head_and_group_size(make_gpu_step, assert_close, dtype, head_dim, group):
    step = make_gpu_step(
        [(37, 20), (50, 1)], kv_heads=1, group=group, head_dim=head_dim, dtype=dtype, directions="mixed"
    )
    assert_close(attend(step), step.expected())


@TYPES_AND_WINDOWS
def test_prefill_chunks_and_decode_in_one_call(make_gpu_step, assert_close, dtype, sliding_window):
    step = make_gpu_step(MIXED, dtype=dtype, directions="mixed")
    assert_close(attend(step, sliding_window=sliding_window), step.expected(sliding_window))


@pytest.mark.parametrize(
    ("items", "sliding_window"),
    [(1, 0), (6, 0), (1000, 40), *(pytest.param(*each, marks=NIGHTLY) for each in [(1000, 0), (1, 40), (6, 40)])],
)
def test_however_contexts_fall_into_parts(make_gpu_step, assert_close, items, sliding_window):
    lengths = (1, 16, 17, 33, 64, 90)  # around the parts' bounds: one part, two, and many
    step = make_gpu_step([(length, 1) for length in lengths], head_dim=32, directions="mixed")
    assert_close(decode(step, plan_of(items), sliding_window=sliding_window), step.expected(sliding_window))


@pytest.mark.parametrize("programs", [1, 30])
def test_however_many_programs_share_the_items(make_gpu_step, assert_close, programs):
    step = make_gpu_step(RAGGED, head_dim=32, directions="mixed")
    assert_close(decode(step, plan_of(40, programs)), step.expected())


@TYPES_AND_WINDOWS
def test_sinks_take_their_share(make_gpu_step, assert_close, dtype, sliding_window):
    step = make_gpu_step(MIXED, dtype=dtype, directions="mixed")
    sinks = sinks_of(step)
    expected = step.expected(sliding_window, sinks=sinks)
    assert_close(attend(step, sliding_window=sliding_window, sinks=sinks), expected)
    assert not torch.allclose(expected, step.expected(sliding_window), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("items", "group"),
    [(1, 3), (6, 1), (1000, 3), *(pytest.param(*each, marks=NIGHTLY) for each in [(1, 1), (6, 3), (1000, 1)])],
)
def test_a_context_in_parts_counts_a_sink_once(make_gpu_step, assert_close, items, group):
    step = make_gpu_step([(length, 1) for length in (1, 17, 64, 90)], group=group, head_dim=32, directions="mixed")
    sinks = sinks_of(step)
    assert_close(decode(step, plan_of(items), sinks=sinks), step.expected(sinks=sinks))


def test_sinks_far_from_the_scores_do_not_overflow(make_gpu_step, assert_close):
    step = make_gpu_step([(40, 20), (0, 1), (80, 1)])
    sinks = torch.tensor([-1e4, float("-inf"), 1e4, 300.0], device=step.query.device)
    for found in (attend(step, sinks=sinks), attend(step, sinks=sinks, sliding_window=9)):
        assert found[:, 2:].eq(0).all()
        assert found[20].eq(0).all()
    assert_close(attend(step, sinks=sinks)[:, :2], step.expected()[:, :2])


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(8)[::2]])
def test_sinks_that_do_not_fit(make_gpu_step, wrong):
    with pytest.raises(ValueError, match="sinks"):
        attend(make_gpu_step([(40, 1)]), sinks=wrong)


@pytest.mark.parametrize(
    ("dtype", "softcap", "sliding_window"),
    [
        (torch.float32, 1.5, 0),
        (torch.bfloat16, 1.5, 25),
        *(
            pytest.param(*each, marks=NIGHTLY)
            for each in [(torch.float16, 0.05, 0), (torch.float32, 50.0, 25), (torch.bfloat16, 50.0, 0)]
        ),
    ],
)
def test_scores_are_capped(make_gpu_step, assert_close, dtype, softcap, sliding_window):
    """Before they are masked: a masked key has no weight, however small the cap."""
    step = make_gpu_step(MIXED, dtype=dtype, directions="mixed")
    expected = step.expected(sliding_window, softcap)
    assert_close(attend(step, sliding_window=sliding_window, softcap=softcap), expected)
    assert softcap == 50 or not torch.allclose(expected, step.expected(sliding_window), rtol=0.1, atol=0.1)


def test_capped_scores_beside_sinks_in_parts(make_gpu_step, assert_close):
    step = make_gpu_step([(length, 1) for length in (1, 17, 64, 90)], group=3, head_dim=32, directions="mixed")
    options = {"sinks": sinks_of(step), "softcap": 1.5}
    assert_close(decode(step, plan_of(items=6), **options), step.expected(**options))


def test_scores_far_beyond_the_cap_do_not_overflow(make_gpu_step, assert_close):
    step = make_gpu_step([(40, 20), (0, 1), (80, 1)])
    step.query *= 1e5
    found = attend(step, softcap=2.0)
    assert found[20].eq(0).all()
    assert_close(found, step.expected(softcap=2.0))


def test_a_part_counts_by_its_weight(make_gpu_step, assert_close):
    """All weight on one key far from the others: not by a part's length."""
    step = make_gpu_step([(130, 1)], kv_heads=1, group=1, head_dim=32)
    step.keys[0][100] = 40 * step.query[0, 0].cpu()
    block, slot = reference.row_slots(step.meta, 0, 130)
    step.kv[block[100], step.layer, 0, :, slot[100]] = step.keys[0][100].to(step.kv.device)
    assert_close(decode(step, plan_of(items=9)), step.expected())


@pytest.mark.parametrize("block_size", [1, 4, 32, 7])
def test_other_block_sizes(make_gpu_step, assert_close, block_size):
    step = make_gpu_step([(51, 20), (70, 1)], block_size=block_size, group=3, head_dim=32, directions="mixed")
    assert_close(attend(step), step.expected())


def test_rows_without_queries_are_left_alone(make_gpu_step, assert_close):
    step = make_gpu_step([(5, 5), (40, 0), (40, 1), (30, 0)])
    assert_close(attend(step), step.expected())
    assert_close(
        decode(make_gpu_step([(40, 0), (40, 1)]), plan_of(items=9)), make_gpu_step([(40, 0), (40, 1)]).expected()
    )


def test_views_of_a_fused_tensor(make_gpu_step, assert_close):
    step = make_gpu_step([(40, 9), (20, 1), (150, 1)])
    tokens, heads, head_dim = step.query.shape
    fused = torch.cat([step.query, torch.full((tokens, 3, head_dim), 9.0, device=step.query.device)], dim=1)
    wide = torch.full((tokens, heads + 1, head_dim), 7.0, device=step.query.device)
    query, out = fused[:, :heads], wide[:, :heads]
    attention.paged_attention(query, step.kv, step.layer, step.meta, step.scale, out)
    assert_close(out.cpu(), step.expected())
    out[9:] = float("nan")
    attention.decode(query, step.kv, step.layer, step.meta, step.scale, out, plan=plan_of(items=40))
    assert_close(out.cpu()[9:], step.expected()[9:])
    assert (wide[:, heads] == 7.0).all()


@pytest.mark.parametrize("queries", [1, 10], ids=["decode", "prefill"])
@pytest.mark.parametrize("change", ["none", "flip one", "flip all", "forget"])
def test_a_wrong_direction_bit_is_a_wrong_answer(make_gpu_step, queries, change):
    """The check of the checks: were directions read wrongly, the comparisons above would fail by far.

    The blocks are full, so that the wrong way round there are tokens, not NaN; but a row's last three are not its own.
    """
    step = make_gpu_step([(16, queries), (32, queries)], directions="reversed", seed=3)
    step.meta.context_lens -= 3
    step.keys, step.values = [key[:-3] for key in step.keys], [value[:-3] for value in step.values]
    right = step.expected()
    tables = step.meta.block_tables
    if change == "flip one":
        tables[0, 0] = ~tables[0, 0]
    elif change == "flip all":
        tables.bitwise_not_()
    elif change == "forget":
        step.meta.block_tables = step.meta.separate()[0]
    wrong = ((attend(step).double() - right).abs() / right.abs().max())[:queries].max()
    assert wrong < 1e-5 if change == "none" else wrong > 0.1


@settings(max_examples=examples(0.08), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(make_gpu_step, assert_close, data):
    rows = data.draw(
        st.lists(
            st.integers(1, 60).flatmap(lambda context: st.tuples(st.just(context), st.integers(1, context))),
            min_size=1,
            max_size=3,
        )
    )
    step = make_gpu_step(
        sorted([*rows, (data.draw(st.integers(0, 90)), 1)], key=lambda row: row[1] == 1),  # prefill rows come first
        kv_heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.integers(1, 6)),
        head_dim=data.draw(st.sampled_from([16, 24, 64])),
        block_size=data.draw(st.sampled_from([1, 2, 7, 16])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        directions=data.draw(st.sampled_from(["forward", "reversed", "mixed"])),
        seed=data.draw(st.integers(0, 1000)),
    )
    window, softcap = data.draw(st.sampled_from([0, 1, 5, 64])), data.draw(st.sampled_from([0.0, 0.0, 2.0]))
    sinks = sinks_of(step) if data.draw(st.booleans()) else None
    found = attend(step, sliding_window=window, softcap=softcap, sinks=sinks)
    assert_close(found, step.expected(window, softcap, sinks))


class TestWorkspace:
    """What a captured CUDA graph relies on."""

    def test_decode_allocates_nothing(self, make_gpu_step, assert_close, monkeypatch):
        step = make_gpu_step(RAGGED)
        step.meta.workspace = workspace_for(step)
        out = torch.full_like(step.query, float("nan"))
        for name in ("empty", "zeros", "full", "tensor", "empty_like"):
            monkeypatch.setattr(torch, name, None)
        attention.paged_attention(step.query, step.kv, step.layer, step.meta, step.scale, out)
        monkeypatch.undo()
        assert_close(out.cpu(), step.expected())

    def test_too_small_a_workspace_is_refused(self, make_gpu_step):
        step = make_gpu_step(RAGGED)
        step.meta.workspace = workspace_for(step, max_rows=1)
        with pytest.raises(ValueError, match="fewer than 5 rows"):
            attend(step)

    @settings(max_examples=examples(0.08), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        lengths=st.lists(st.integers(0, 200), min_size=1, max_size=6),
        items=st.integers(1, 30),
        window=st.sampled_from([0, 50]),
    )
    def test_parts_stay_in_the_room_planned_for_them(self, make_gpu_step, assert_close, lengths, items, window):
        step = make_gpu_step([(length, 1) for length in lengths], kv_heads=2, group=1, head_dim=16)
        plan = plan_of(items)
        room = plan.parts(len(lengths), kv_heads=2) * 2
        workspace = workspace_for(step, max_rows=200)
        workspace.lse.fill_(123.0)
        workspace.partial.fill_(123.0)
        step.meta.workspace = workspace
        assert room < len(workspace.lse)
        assert_close(decode(step, plan, sliding_window=window), step.expected(window))
        assert (workspace.lse[room:] == 123.0).all()
        assert (workspace.partial[room * 16 :] == 123.0).all()

    def test_a_longer_bound_on_the_context_changes_nothing(self, make_gpu_step, assert_close):
        """A captured grid is made for the longest context there may be; what rows hold is read on the device."""
        step = make_gpu_step(RAGGED, head_dim=32)
        step.meta.max_context_len = 100_000
        assert_close(attend(step), step.expected())


class TestFlashPrefill:
    """Flash attention itself needs a GPU; what it is given, and what becomes of its answer, does not."""

    @pytest.fixture(autouse=True)
    def dense_stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if torch.cuda.is_available():
            return
        monkeypatch.setattr(prefill, "flash_serves", lambda query: True)
        monkeypatch.setattr(prefill, "flash_function", lambda: dense_flash)

    @pytest.mark.parametrize(
        ("directions", "sliding_window"),
        [
            ("forward", 0),
            ("mixed", 25),
            *(
                pytest.param(*each, marks=NIGHTLY)
                for each in [("reversed", 0), ("mixed", 0), ("forward", 25), ("reversed", 25)]
            ),
        ],
    )
    def test_prefix_and_chunk_arrive_in_order(self, make_gpu_step, assert_close, directions, sliding_window):
        step = make_gpu_step(MIXED, dtype=torch.bfloat16, directions=directions)
        step.meta.workspace, step.meta.prefill_context = workspace_for(step), 20 + 45 + 19
        out = torch.full_like(step.query, float("nan"))
        assert prefill.flash_prefill(step.query, step.kv, step.layer, step.meta, step.scale, out, sliding_window)
        tokens = 20 + 13 + 2
        assert_close(out[:tokens].cpu(), step.expected(sliding_window)[:tokens])
        assert_close(attend(step, sliding_window=sliding_window), step.expected(sliding_window))

    @pytest.mark.parametrize("room", [83, 84])
    def test_rows_without_room_are_counted_once_a_step(self, make_gpu_step, room):
        """By whichever of its layers; contexts that nobody knows count nothing."""
        step = make_gpu_step(MIXED, dtype=torch.bfloat16)
        meta, out = step.meta, torch.empty_like(step.query)
        meta.workspace, unknown = workspace_for(step, staging_tokens=room), meta.prefill_context
        assert unknown == 0 and not prefill.flash_prefill(step.query, step.kv, 0, meta, step.scale, out, 0)
        for step_number in (1, 2):
            meta.prefill_context, meta.context_lens = 20 + 45 + 19, meta.context_lens.clone()
            for layer in range(2):
                of_layer = replace(meta, block_tables=meta.block_tables.clone())
                assert prefill.flash_prefill(step.query, step.kv, layer, of_layer, step.scale, out, 0) == (room == 84)
            assert meta.workspace.unstaged_rows == (0 if room == 84 else 3 * step_number)

    def test_staged_rows_are_the_dense_ones(self, make_gpu_step):
        step = make_gpu_step(MIXED, directions="mixed", head_dim=24)
        step.meta.prefill_context = 20 + 45 + 19
        workspace = workspace_for(step)
        keys, values = prefill.stage(step.kv, step.layer, step.meta, workspace.staging, workspace.starts)
        assert torch.equal(keys.cpu(), torch.cat(step.keys[:3]))
        assert torch.equal(values.cpu(), torch.cat(step.values[:3]))
        assert workspace.starts[:4].tolist() == [0, 20, 65, 84]

    @pytest.mark.parametrize("why", ["no workspace", "no room", "context unknown", "too many rows"])
    def test_steps_left_to_our_own_kernel(self, make_gpu_step, assert_close, why):
        step = make_gpu_step(MIXED, dtype=torch.bfloat16, directions="mixed")
        meta = step.meta
        meta.prefill_context = 0 if why == "context unknown" else 20 + 45 + 19
        if why != "no workspace":
            meta.workspace = workspace_for(step, staging_tokens=83 if why == "no room" else 256)
            if why == "too many rows":
                meta.workspace.starts = meta.workspace.starts[:3]
        out = torch.empty_like(step.query)
        assert not prefill.flash_prefill(step.query, step.kv, step.layer, meta, step.scale, out, 0)
        assert_close(attend(step), step.expected())


def dense_flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    window: int,
) -> Tensor:
    """What variable-length flash attention promises: a row's last query sees its last key."""
    out = torch.full_like(query, float("nan"))
    group = query.shape[1] // keys.shape[1]
    for row in range(len(query_starts) - 1):
        first, end = query_starts[row : row + 2].tolist()
        first_key, end_key = key_starts[row : row + 2].tolist()
        assert end - first <= max_queries
        assert end_key - first_key <= max_keys
        key = keys[first_key:end_key].float().repeat_interleave(group, dim=1)
        value = values[first_key:end_key].float().repeat_interleave(group, dim=1)
        score = torch.einsum("qhd,khd->hqk", query[first:end].float(), key) * scale
        seen = torch.arange(end_key - first_key)[None, :]
        own = torch.arange(end_key - first_key - (end - first), end_key - first_key)[:, None]
        hidden = (seen > own) | ((seen <= own - window) if window else seen < 0)
        weights = score.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
    return out


class TestRefuses:
    """What the kernels would misread; the values inside tensors they cannot check."""

    @pytest.mark.parametrize(
        ("error", "change"),
        [
            (TypeError, lambda step: {"kv": step.kv.bfloat16()}),
            (ValueError, lambda step: {"kv": step.kv.transpose(0, 1)}),
            (ValueError, lambda step: {"query": step.query[:, :3]}),
            (ValueError, lambda step: {"query": step.query[..., :32]}),
            (ValueError, lambda step: {"query": step.query.transpose(1, 2).contiguous().transpose(1, 2)}),
        ],
        ids=["dtype", "layout", "heads", "head_dim", "stride"],
    )
    def test_tensors_that_do_not_fit(self, make_gpu_step, error, change):
        step = make_gpu_step([(40, 2)])
        for name, value in change(step).items():
            setattr(step, name, value)
        with pytest.raises(error):
            attend(step)

    def test_tables_of_the_wrong_type_and_directions_beside_them(self, make_gpu_step):
        step = make_gpu_step([(40, 1)], directions="mixed")
        tables = step.meta.block_tables
        step.meta.block_tables = tables.long()
        with pytest.raises(TypeError, match="int32"):
            attend(step)
        step.meta.block_tables, step.meta.directions = tables, torch.ones_like(tables, dtype=torch.uint8)
        with pytest.raises(ValueError, match="signs"):
            attend(step)
