"""Lower bounds of a step's time: a model's matrix products alone, in three forms, over weights that are really distinct
memory.

Used by `comparisons`, which runs them in turn with the engine's steps. The weights are random, of the model's shapes,
and not the engine's own: each form packs them as it likes. Inputs stay as they are, so products do not feed
one another; activations, norms and attention are not part of a lower bound, except what the engine's form fuses into a
product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.weights.linear import GatedLinear, Linear
from cohort.kernels.cpu.panels import Arena
from cohort.services.bench.engine.report import Form

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
        """Weights of all layers' products."""
        return self.layers * _size(self.layer)

    @property
    def parameters(self) -> int:
        """Weights of all products."""
        return self.layer_parameters + _size((self.vocabulary,))


def model_products(geometry: ModelGeometry) -> Products | None:
    """The products of a lean model; None for one that runs through transformers, whose products are not listed, and for
    a mixture of experts, whose products depend on where tokens are routed."""
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
        """Per form: the products of `layers` layers for `tokens` rows, and the vocabulary's for `sampled` rows."""
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
        """Packed for exactly this number of rows: better than any server can have it, whose rows vary."""
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
        """As the lean models call them: activation and residual are part of the product, logits are float32."""
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
