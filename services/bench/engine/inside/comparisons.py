"""Steps of the real engine beside their lower bounds, all in turn: round by round the forms of the matrix products, a
read of the memory, and the steps of as many tokens; decode attention of one model's heads beside the memory likewise.

Lower bounds are a model's matrix products alone, in three forms, over weights that are really distinct memory: random,
of the model's shapes, and not the engine's own, since each form packs them as it likes. Inputs stay as they are, so
products do not feed one another; activations, norms and attention are not part of a lower bound, except what the
engine's form fuses into a product.

Used by `cohort bench engine`. Overwrites the cache's first blocks, so nothing may be served meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import trial_batch
from cohort.common.engine.weights.linear import GatedLinear, Linear
from cohort.kernels.cpu.panels import Arena, huge_zeros
from cohort.kernels.fp8_cache import SCALE_BYTES, encoded, is_fp8
from cohort.kernels.ops.paged_attention import AttentionMeta, paged_attention
from cohort.services.bench.engine.report import AttentionPoint, Comparison, Form, StepPoint, Timing

Call = Callable[[], object]

_MEMORY_SHARE = 0.5  # of what is available, for the weights of all three forms together
_FORMS = 3


@dataclass(frozen=True, slots=True)
class Product:
    """x [T, inputs] · weightᵀ [inputs, outputs]. "gated": the first half gates the second; "added": into a residual."""

    outputs: int
    inputs: int
    kind: Literal["plain", "gated", "added"] = "plain"


@dataclass(frozen=True, slots=True)
class Products:
    """A model's products: those of one layer in their order, and the vocabulary's."""

    layer: tuple[Product, ...]
    vocabulary: Product
    layers: int

    @property
    def layer_parameters(self) -> int:
        return self.layers * _size(self.layer)

    @property
    def parameters(self) -> int:
        return self.layer_parameters + _size((self.vocabulary,))


def model_products(geometry: ModelGeometry) -> Products | None:
    """Return the products of a lean model; None for one that runs through transformers, whose products are not listed,
    and for a mixture of experts, whose products depend on where tokens are routed."""
    g = geometry
    if g.family in ("generic", "moe", "gpt_oss", "deepseek"):
        return None
    query, kv = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    attention = (Product(query + 2 * kv, g.hidden_size), Product(g.hidden_size, query, "added"))
    if g.family == "llama":
        mlp: tuple[Product, ...] = (Product(2 * g.intermediate_size, g.hidden_size, "gated"),)
    elif g.family == "gemma":
        mlp = (Product(2 * g.intermediate_size, g.hidden_size),)
    else:
        mlp = (Product(g.intermediate_size, g.hidden_size),)
    mlp += (Product(g.hidden_size, g.intermediate_size, "added"),)
    width = g.word_embedding_size or g.hidden_size
    return Products(attention + mlp, Product(g.vocab_size, width), g.num_layers)


class LowerBounds:
    """Weights in three forms. `layers` of the model's layers have weights of their own: all, where memory suffices."""

    def __init__(self, products: Products, dtype: torch.dtype, available_bytes: int) -> None:
        self.products = products
        layer_bytes = _FORMS * _size(products.layer) * dtype.itemsize
        headroom = available_bytes * _MEMORY_SHARE - _FORMS * _size((products.vocabulary,)) * dtype.itemsize
        self.layers = max(1, min(products.layers, int(headroom // layer_bytes)))
        self._dtype = dtype
        self._plain = [[self._random(product) for product in products.layer] for _ in range(self.layers)]
        self._vocabulary = self._random(products.vocabulary)
        arena = Arena()
        self._ours = [
            [_own_form(product, weight, arena) for product, weight in zip(products.layer, weights, strict=True)]
            for weights in self._plain
        ]
        self._own_vocabulary = Linear(self._vocabulary, arena=arena)

    def calls(self, tokens: int, sampled: int) -> dict[Form, tuple[Call, Call]]:
        """Return, per form, the products of `layers` layers for `tokens` rows, and the vocabulary's for `sampled`."""
        found: dict[Form, tuple[Call, Call]] = {"linear": self._linear(tokens, sampled)}
        if _onednn_serves(self._dtype):
            found["prepacked"] = self._prepacked(tokens, sampled)
        found["ours"] = self._own(tokens, sampled)
        return found

    def _linear(self, tokens: int, sampled: int) -> tuple[Call, Call]:
        pairs = [pair for layer in self._plain for pair in zip(self._inputs(tokens), layer, strict=True)]
        last = self._input(sampled, self.products.vocabulary)

        def layers() -> None:
            for x, weight in pairs:
                F.linear(x, weight)

        return layers, lambda: F.linear(last, self._vocabulary)

    def _prepacked(self, tokens: int, sampled: int) -> tuple[Call, Call]:
        """Pack for exactly this number of rows: better than any server can have it, whose rows vary."""
        pairs = [
            (x, torch.ops.mkldnn._reorder_linear_weight(weight, tokens))
            for layer in self._plain
            for x, weight in zip(self._inputs(tokens), layer, strict=True)
        ]
        last = self._input(sampled, self.products.vocabulary)
        vocabulary = torch.ops.mkldnn._reorder_linear_weight(self._vocabulary, sampled)
        multiply = torch.ops.mkldnn._linear_pointwise.default

        def layers() -> None:
            for x, weight in pairs:
                multiply(x, weight, None, "none", [], "")

        return layers, lambda: multiply(last, vocabulary, None, "none", [], "")

    def _own(self, tokens: int, sampled: int) -> tuple[Call, Call]:
        """Return our products as the lean models call them: with activation and residual, logits in float32."""
        inputs = self._inputs(tokens)
        outputs = [
            torch.zeros((tokens, product.outputs // (2 if product.kind == "gated" else 1)), dtype=self._dtype)
            for product in self.products.layer
        ]
        calls = [
            (linear.add_into if isinstance(linear, Linear) and product.kind == "added" else linear.into, x, out)
            for layer in self._ours
            for product, linear, x, out in zip(self.products.layer, layer, inputs, outputs, strict=True)
        ]
        last = self._input(sampled, self.products.vocabulary)
        logits = torch.empty((sampled, self.products.vocabulary.outputs))

        def layers() -> None:
            for multiply, x, out in calls:
                multiply(x, out)

        return layers, lambda: self._own_vocabulary.into(last, logits)

    def _inputs(self, tokens: int) -> list[Tensor]:
        return [self._input(tokens, product) for product in self.products.layer]

    def _input(self, rows: int, product: Product) -> Tensor:
        return torch.empty((rows, product.inputs)).uniform_(-1.0, 1.0).to(self._dtype)

    def _random(self, product: Product) -> Tensor:
        reach = product.inputs**-0.5
        return torch.empty((product.outputs, product.inputs), dtype=self._dtype).uniform_(-reach, reach)


def _own_form(product: Product, weight: Tensor, arena: Arena) -> Linear | GatedLinear:
    return GatedLinear(weight, arena=arena) if product.kind == "gated" else Linear(weight, arena=arena)


def _onednn_serves(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _size(products: tuple[Product, ...]) -> int:
    return sum(product.outputs * product.inputs for product in products)


_ATTENTION_BLOCK = 16
READ_BYTES = 192 << 20  # far beyond any last-level cache: every layer's KV comes from memory


def each_s(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Return each call's times over rounds in which all run in turn: other load on the machine then hits all alike."""
    seconds: list[list[float]] = [[] for _ in calls]
    for round_index in range(rounds + 1):
        for call, times in zip(calls, seconds, strict=True):
            begin_s = time.perf_counter()
            call()
            if round_index > 0:  # the first round warms up
                times.append(time.perf_counter() - begin_s)
    return seconds


def memory_reads(size: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two reads of the same `size` bytes of memory; the faster one tells the bandwidth."""
    memory = huge_zeros(size).view(torch.float32).fill_(1.0)
    return memory.sum, memory.amax


def timing(seconds: Sequence[float]) -> Timing:
    return Timing(median(seconds), min(seconds), max(seconds))


def compared(
    runner: ModelRunner,
    lower_bounds: LowerBounds | None,
    rows: int,
    contexts: Sequence[int],
    rounds: int,
    read_bytes: int = READ_BYTES,
    *,
    tokens_per_row: int = 1,
) -> Comparison:
    """Compare `rows` rows of one new token at each context that the model and its cache can hold; with more, prompts in
    one step, of which only the last token goes through the vocabulary."""
    batches = []
    for context in contexts:
        batch = trial_batch(
            rows, tokens_per_row, context, block_size=runner.block_size, num_blocks=len(runner.kv.blocks)
        )
        if batch is not None and context <= runner.geometry.max_positions:
            batches.append((context, batch))
    with torch.inference_mode():
        forms = lower_bounds.calls(rows * tokens_per_row, rows) if lower_bounds is not None else {}
        calls: list[Call] = [call for pair in forms.values() for call in pair]
        calls += memory_reads(read_bytes)
        steps: list[Call] = [partial(runner.execute, batch) for _, batch in batches]
        seconds = each_s(calls + steps, rounds)
    times: dict[Form, list[float]] = {}
    if lower_bounds is not None:
        scale = lower_bounds.products.layers / lower_bounds.layers
        for index, form in enumerate(forms):
            layers_s, vocabulary_s = seconds[2 * index], seconds[2 * index + 1]
            times[form] = [layer * scale + last for layer, last in zip(layers_s, vocabulary_s, strict=True)]
    reads = 2 * len(forms)
    rates = [read_bytes / min(pair) for pair in zip(seconds[reads], seconds[reads + 1], strict=True)]
    if lower_bounds is not None:
        weight_bytes = lower_bounds.products.parameters * runner.compute_dtype.itemsize
        times["memory"] = [weight_bytes / rate for rate in rates]
    points = []
    for (context, _), step_s in zip(batches, seconds[reads + 2 :], strict=True):
        ratios: dict[Form, float] = {
            form: median(step / lower_bound for step, lower_bound in zip(step_s, lower_bound_s, strict=True))
            for form, lower_bound_s in times.items()
        }
        points.append(
            StepPoint(rows=rows, tokens_per_row=tokens_per_row, context=context, step=timing(step_s), ratios=ratios)
        )
    return Comparison(
        kind="decode" if tokens_per_row == 1 else "prefill",
        tokens=rows * tokens_per_row,
        sampled=rows,
        rounds=rounds,
        lower_bound_layers=lower_bounds.layers if lower_bounds is not None else 0,
        bandwidth=median(rates),
        lower_bounds={form: timing(lower_bound_s) for form, lower_bound_s in times.items()},
        steps=points,
    )


class _Step:
    """Rows of one new token over shuffled blocks of a cache too large to stay in the processor."""

    def __init__(self, runner: ModelRunner, rows: int, context: int, cache_bytes: int) -> None:
        geometry, dtype, self.fp8 = runner.geometry, runner.compute_dtype, is_fp8(runner.kv.blocks)
        dim, self.kv_heads, blocks = geometry.head_dim, geometry.num_kv_heads, -(-context // _ATTENTION_BLOCK)
        row_bytes = dim + SCALE_BYTES if self.fp8 else dim * dtype.itemsize
        block_bytes = 2 * self.kv_heads * _ATTENTION_BLOCK * row_bytes
        self.layers = max(2, cache_bytes // (rows * blocks * block_bytes))
        self.read_bytes = self.layers * (rows * context * block_bytes // _ATTENTION_BLOCK)
        cache = (rows * blocks, self.layers, 2, self.kv_heads, _ATTENTION_BLOCK)
        stored = torch.uint8 if self.fp8 else dtype
        # as the engine's cache lies in memory
        self.kv = huge_zeros(math.prod(cache) * row_bytes).view(stored).view(*cache, -1)
        for part in self.kv.unbind():
            numbers = torch.randn(*part.shape[:-1], dim)
            part.copy_(encoded(numbers) if self.fp8 else numbers)
        table = torch.randperm(rows * blocks).to(torch.int32).view(rows, blocks)
        contexts = torch.full((rows,), context, dtype=torch.int32)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        self.directions = torch.zeros_like(table, dtype=torch.uint8)
        self.meta = AttentionMeta(starts, contexts, table, self.directions, _ATTENTION_BLOCK, 1, 0)
        self.query = torch.randn(rows, geometry.num_heads, dim).to(dtype)
        self.out = torch.empty_like(self.query)

    def paged(self, direction: int) -> None:
        """Run our kernel over every layer; direction 1 takes every block as filled right to left."""
        self.directions.fill_(direction)
        scale = self.query.shape[2] ** -0.5
        for layer in range(self.layers):
            paged_attention(self.query, self.kv, layer, self.meta, scale, self.out)


def measure_attention(runner: ModelRunner, rows: int, context: int, rounds: int, cache_bytes: int) -> AttentionPoint:
    """Decode attention of this model's heads over more layers than a processor's cache holds: `cache_bytes`, if not
    more."""
    with torch.inference_mode():
        step = _Step(runner, rows, context, cache_bytes)
        calls = (partial(step.paged, 0), partial(step.paged, 1), *memory_reads(cache_bytes))
        forward_s, reversed_s, *reading_s = each_s(calls, rounds)
    rates = [step.read_bytes / seconds for seconds in forward_s]
    bandwidths = [cache_bytes / min(pair) for pair in zip(*reading_s, strict=True)]
    return AttentionPoint(
        rows=rows,
        context=context,
        layers=step.layers,
        read_bytes=step.read_bytes,
        paged=timing(forward_s),
        rate=median(rates),
        bandwidth=median(bandwidths),
        share=median(rate / bandwidth for rate, bandwidth in zip(rates, bandwidths, strict=True)),
        reversed_ratio=median(back / forward for back, forward in zip(reversed_s, forward_s, strict=True)),
    )
