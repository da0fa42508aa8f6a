"""What the kernel tests share: both implementations in turn, and steps whose result is known without any kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cohort.common.paths import cache_dir
from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.cpu import native
from cohort.kernels.cpu.build import find_compiler

native.keep_in(cache_dir())


@dataclass
class Step:
    """A step over a paged cache, beside the dense keys and values it was made from."""

    query: Tensor
    kv: Tensor
    layer: int
    meta: AttentionMeta
    scale: float
    keys: list[Tensor]  # per row [context, kv_heads, head_dim]
    values: list[Tensor]

    def expected(self, sliding_window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        """Attention in float64 from the dense tensors: knows nothing of blocks, slots or directions."""
        group = self.query.shape[1] // self.kv.shape[3]
        starts = self.meta.query_start.tolist()
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        for row, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            begin, end = starts[row], starts[row + 1]
            query = self.query[begin:end].cpu().double().unflatten(1, (-1, group))
            scores = torch.einsum("qhgd,khd->hgqk", query, key.double()) * self.scale
            scores = softcap * (scores / softcap).tanh() if softcap else scores
            own, seen = torch.arange(len(key) - (end - begin), len(key))[:, None], torch.arange(len(key))
            hidden = (seen > own) | (seen <= own - sliding_window) if sliding_window else seen > own
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                column = sinks.double().cpu().view(-1, group, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, column], dim=3)
            weights = scores.softmax(3)[..., : len(key)]
            out[begin:end] = torch.einsum("hgqk,khd->qhgd", weights, value.double()).flatten(1, 2)
        return out


MakeStep = Callable[..., Step]


@pytest.fixture(params=["native", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test with the compiled extension and again with the torch reference."""
    if request.param == "reference":
        monkeypatch.setattr(native, "_decided", True)
        monkeypatch.setattr(native, "_operators", None)
    elif native.implementation() != "native":
        if find_compiler() is not None:
            pytest.fail("there is a compiler, but the extension was not built or disagrees with the reference")
        pytest.skip("no C++ compiler: only the reference can run")
    yield request.param


@pytest.fixture
def make_step() -> MakeStep:
    """Builds a step from (context, queries) per row; unwritten slots hold NaN, so reading one shows."""

    def make(
        rows: list[tuple[int, int]],
        *,
        kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        directions: str = "forward",
        seed: int = 0,
    ) -> Step:
        random = torch.Generator().manual_seed(seed)
        layers, layer = 2, 1
        blocks = [-(-context // block_size) for context, _ in rows]
        num_blocks = sum(blocks) + 2
        order = torch.randperm(num_blocks, generator=random).tolist()
        table = torch.full((len(rows), max(blocks)), 2**30, dtype=torch.int32)  # beyond the context: never to be read
        reverse = torch.zeros(table.shape, dtype=torch.uint8)
        if directions == "reversed":
            reverse.fill_(1)
        elif directions == "mixed":
            reverse = torch.randint(0, 2, table.shape, generator=random, dtype=torch.uint8)
        kv = torch.full((num_blocks, layers, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
        keys, values = [], []
        for row, (context, _) in enumerate(rows):
            key = torch.randn(context, kv_heads, head_dim, generator=random).to(dtype)
            value = torch.randn(context, kv_heads, head_dim, generator=random).to(dtype)
            keys.append(key)
            values.append(value)
            for index in range(blocks[row]):
                table[row, index] = order.pop()
            index, slot = torch.arange(context) // block_size, torch.arange(context) % block_size
            slot = torch.where(reverse[row, index] > 0, block_size - 1 - slot, slot)
            kv[table[row, index].long(), layer, 0, :, slot] = key
            kv[table[row, index].long(), layer, 1, :, slot] = value
        queries = [count for _, count in rows]
        meta = AttentionMeta(
            query_start=torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
            context_lens=torch.tensor([context for context, _ in rows], dtype=torch.int32),
            block_tables=table,
            directions=None if directions == "forward" else reverse,
            block_size=block_size,
            max_query_len=max(queries),
            num_prefill_rows=sum(count > 1 for count in queries),
        )
        query = torch.randn(sum(queries), kv_heads * group, head_dim, generator=random).to(dtype)
        return Step(query, kv, layer, meta, head_dim**-0.5, keys, values)

    return make


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Within 1e-5 in float32, 1e-2 in bfloat16 and 2e-3 in float16, of the largest expected value."""

    def check(ours: Tensor, expected: Tensor) -> None:
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[ours.dtype]
        error = (ours.double() - expected.double()).abs().max().item()
        largest = expected.double().abs().max().item()
        assert error <= tolerance * largest, f"off by {error:.2e} of {largest:.2e}"

    return check
