"""The least time that a device can take: bytes over its bandwidth or operations over its matrix rate, the larger.

The rates are those that the same process has measured (`rates.ceilings`), so an H100 is held against an H100. Called by
the sections. Arithmetic only; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from cohort.common.engine.config.model_config import DTYPE_BYTES, ModelGeometry


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that a device reached: bytes a second of a copy (read and written) and of reading alone, operations a
    second of a large product in the model's precision."""

    copy: float
    read: float
    matrix: float

    @property
    def bandwidth(self) -> float:
        """What a kernel that mostly reads can hope for."""
        return max(self.copy, self.read)

    def least_s(self, moved_bytes: float, operations: float) -> float:
        """Of one launch."""
        return max(moved_bytes / self.bandwidth, operations / self.matrix)


@dataclass(frozen=True, slots=True)
class Product:
    """A weight matrix [outputs, inputs] and how many of them a step multiplies with."""

    name: str
    outputs: int
    inputs: int
    count: int

    def least_s(self, rows: int, element_bytes: int, ceilings: Ceilings) -> float:
        """One of them, times `rows` rows: weights and rows read, results written."""
        elements = self.outputs * self.inputs + rows * (self.outputs + self.inputs)
        return ceilings.least_s(elements * element_bytes, 2.0 * rows * self.outputs * self.inputs)


def products(geometry: ModelGeometry) -> list[Product]:
    """A Llama-shaped model's five products; gate and up are one, as q, k and v are."""
    g = geometry
    heads = (g.num_heads + 2 * g.num_kv_heads) * g.head_dim
    return [
        Product("qkv", heads, g.hidden_size, g.num_layers),
        Product("attention out", g.hidden_size, g.num_heads * g.head_dim, g.num_layers),
        Product("gate and up", 2 * g.intermediate_size, g.hidden_size, g.num_layers),
        Product("down", g.hidden_size, g.intermediate_size, g.num_layers),
        Product("head", g.vocab_size, g.hidden_size, 1),
    ]


def products_s(geometry: ModelGeometry, dtype: str, rows: int, sampled: int, ceilings: Ceilings) -> float:
    """All products of a step of `rows` tokens, `sampled` of which get logits."""
    size = DTYPE_BYTES[dtype]
    return sum(
        each.count * each.least_s(sampled if each.name == "head" else rows, size, ceilings)
        for each in products(geometry)
    )


def attention_s(geometry: ModelGeometry, dtype: str, rows: int, context: int, ceilings: Ceilings) -> float:
    """Decode attention of all layers: every row's keys and values once."""
    operations = 4.0 * geometry.num_heads * geometry.head_dim * rows * context * geometry.num_layers
    return ceilings.least_s(rows * context * geometry.kv_token_bytes(dtype), operations)


def decode_s(geometry: ModelGeometry, dtype: str, rows: int, context: int, ceilings: Ceilings) -> float:
    """The least a decode step takes: products and attention one after the other, each at its own bound."""
    return products_s(geometry, dtype, rows, rows, ceilings) + attention_s(geometry, dtype, rows, context, ceilings)
