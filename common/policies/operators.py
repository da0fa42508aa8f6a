"""Times of a device's operators between the points where they were measured; the cost model adds them up.

    matrices   roofline(FLOPs, bytes of weights) over the efficiency that a table has by tokens and by the bytes of the
               matrix that one device holds: thin ones fill neither the device nor its bandwidth
    between    norms, rotation, activation, residual sums of a layer: (floor³ + (bytes moved / attained bandwidth)³)^⅓
    prompts    floor + pairs of queries and keys over attained peaks: `own` among the tokens of a chunk, which the mask
               halves in vain and whose start costs `lead_pairs` a token; `context` with what lies before it
    decodes    floor + the KV read over the attained bandwidth
    exchange   one all-reduce by its bytes, for each number of devices

Efficiencies are shares of a device's own peaks, so that another device of the same kind has them scaled; floors are
seconds. `cohort bench operators --fit` fits all of them to measurements. Used by `cost_model.py` alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from cohort.common.policies.cost_model import DeviceShape, ModelShape

Curve = tuple[tuple[float, float], ...]
"""Ascending places, and the value at each."""

_ACTIVATION_BYTES = 2


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Matrices(_Part, frozen=True):
    """Attained shares of the roofline: a row for each of `tokens`, in it one for each of `weight_bytes`. Between them
    logarithms are linear; beyond them the last one holds."""

    tokens: tuple[float, ...]
    weight_bytes: tuple[float, ...]
    efficiency: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for knots in (self.tokens, self.weight_bytes):
            if list(knots) != sorted(set(knots)) or len(knots) < 2 or knots[0] <= 0:
                raise ValueError("tokens and weight_bytes ascend, from above 0")
        if len(self.efficiency) != len(self.tokens) or {*map(len, self.efficiency)} != {len(self.weight_bytes)}:
            raise ValueError("efficiency has a row for each of tokens, and in it a share for each of weight_bytes")

    def attained(self, tokens: float, weight_bytes: float) -> float:
        row, along = place(self.tokens, tokens)
        column, across = place(self.weight_bytes, weight_bytes)
        first, second = (
            _between(self.efficiency[each][column], self.efficiency[each][column + 1], across)
            for each in (row, row + 1)
        )
        return _between(first, second, along)


class Between(_Part, frozen=True):
    floor_s: float
    efficiency: float

    def seconds(self, moved_bytes: float, bytes_per_s: float) -> float:
        return float((self.floor_s**3 + (moved_bytes / (bytes_per_s * self.efficiency)) ** 3) ** (1 / 3))


class Prompts(_Part, frozen=True):
    floor_s: float
    lead_pairs: float
    own: float
    context: float

    def seconds(self, tokens: float, own: float, context: float, pair_s: float) -> float:
        """Return one layer's seconds. `own`, `context`: pairs; `pair_s`: of one, at the device's peak."""
        return self.floor_s + pair_s * ((own + self.lead_pairs * tokens) / self.own + context / self.context)


class Decodes(_Part, frozen=True):
    floor_s: float
    efficiency: float


class Operators(_Part, frozen=True):
    matrices: Matrices
    between: Between
    prompts: Prompts
    decodes: Decodes
    exchange: tuple[tuple[int, Curve], ...]
    """Curve for each number of devices, ascending."""

    def paced(self, pace: float) -> Operators:
        """Return the same where everything takes `pace` times as long on a device whose peaks are so much lower."""
        between, prompts, decodes = (
            msgspec.structs.replace(part, floor_s=part.floor_s * pace)
            for part in (self.between, self.prompts, self.decodes)
        )
        exchange = tuple(
            (devices, tuple((size, pace * seconds) for size, seconds in curve)) for devices, curve in self.exchange
        )
        return Operators(self.matrices, between, prompts, decodes, exchange)  # type: ignore[arg-type]

    def best(self, *, by_size: bool) -> Operators:
        """Return what nothing is faster than: no floors, and the best efficiency at any number of tokens, of matrices
        of each size or (not `by_size`) of all."""
        rows = self.matrices.efficiency
        columns = [max(column) for column in zip(*rows, strict=True)]
        attained = tuple(columns if by_size else [max(columns)] * len(columns))
        pairs = max(self.prompts.own, self.prompts.context)
        slopes = [(devices, min(seconds / size for size, seconds in curve)) for devices, curve in self.exchange]
        return Operators(
            Matrices(self.matrices.tokens, self.matrices.weight_bytes, (attained,) * len(rows)),
            Between(0.0, self.between.efficiency),
            Prompts(0.0, 0.0, pairs, pairs),
            Decodes(0.0, self.decodes.efficiency),
            tuple((devices, ((1.0, slope), (2.0, 2.0 * slope))) for devices, slope in slopes),
        )


class OperatorTimes:
    """Seconds of a model's operators on each of `devices` devices that compute it together."""

    def __init__(self, model: ModelShape, device: DeviceShape, operators: Operators, devices: int) -> None:
        self._model, self._device, self._operators, self._devices = model, device, operators, devices
        self._layers: dict[int, float] = {}
        self._head: dict[int, float] = {}
        self._pair_s = 4.0 * model.heads * (model.pair_dim or model.head_dim) / (device.flops_per_s * devices)
        kv_width = model.kv_heads * model.kv_copies(devices) * model.head_dim
        width = model.heads * model.head_dim
        self._attention = [model.hidden * (width + 2 * kv_width) / devices, model.hidden * width / devices]
        if model.attention_weights:
            self._attention = [model.attention_weights / (2 * devices)] * 2
        self._rotated = (width + kv_width) / devices
        self._curve: Curve = ()
        if devices > 1:
            enough = [curve for measured, curve in operators.exchange if measured >= devices]
            self._curve = enough[0] if enough else operators.exchange[-1][1]
        self.decode_floor_s = operators.decodes.floor_s * model.layers

    def layers_s(self, tokens: int) -> float:
        """Return the seconds of all layers without attention: matrices, what lies between them, exchange."""
        if tokens not in self._layers:
            model = self._model
            dense = model.layers - model.mixture_layers
            seconds = dense * self._layer_s(tokens, model.intermediate, ()) if dense else 0.0
            if model.experts:
                width = model.experts_per_token * model.expert_intermediate + model.shared_intermediate
                experts = self._experts_s(tokens)
                seconds += model.mixture_layers * self._layer_s(tokens, width, experts)
            self._layers[tokens] = seconds
        return self._layers[tokens]

    def head_s(self, sampled: int) -> float:
        if sampled not in self._head:
            self._head[sampled] = self.matrix_s(self._model.head_parameters / self._devices, sampled)
        return self._head[sampled]

    def prompts_s(self, tokens: int, rows: int, pairs: int) -> float:
        """Return the seconds of prompt attention in all layers. Rows are taken as equally long, which says how many of
        their pairs are among the tokens themselves."""
        own = min(float(pairs), tokens * (tokens / max(1, rows) + 1.0) / 2.0)
        return self._model.layers * self._operators.prompts.seconds(tokens, own, pairs - own, self._pair_s)

    def matrix_s(self, parameters: float, tokens: float, *, read_bytes: float = 0.0) -> float:
        """Return the seconds of one product. `read_bytes`: what is read where that is not what tokens are multiplied
        with."""
        if tokens <= 0:
            return 0.0
        read = read_bytes or parameters * self._model.weight_bytes
        compute_s = 2.0 * tokens * parameters / self._device.flops_per_s
        roofline_s = max(compute_s, read / self._device.memory_bytes_per_s)
        return roofline_s / self._operators.matrices.attained(tokens, read)

    def _layer_s(self, tokens: int, width: int, experts: Sequence[float]) -> float:
        """Return one layer's seconds; `width`: of its MLP as a token sees it; `experts`: seconds of a mixture's."""
        model, devices = self._model, self._devices
        mlp = model.shared_intermediate if experts else width
        inner = model.hidden * mlp / devices
        products = [*self._attention, *([(1 + model.gated_mlp) * inner, inner] if mlp else [])]
        seconds = sum(experts) + sum(self.matrix_s(each, tokens) for each in products)
        moved = 10 * model.hidden + 2 * self._rotated + (2 + model.gated_mlp) * width / devices
        moved_bytes = _ACTIVATION_BYTES * tokens * moved
        seconds += self._operators.between.seconds(moved_bytes, self._device.memory_bytes_per_s)
        return seconds + (
            2 * exchange_s(self._curve, _ACTIVATION_BYTES * tokens * model.hidden) if devices > 1 else 0.0
        )

    def _experts_s(self, tokens: int) -> list[float]:
        """Return the seconds of a layer's two products over its experts: each reads those that the tokens reach, with
        the efficiency that the tokens of one of them have."""
        model = self._model
        reached = model.experts * model.reached_share(tokens)
        each_tokens = tokens * model.experts_per_token / reached
        bits = model.expert_bits or 8.0 * model.weight_bytes
        whole = model.expert_parameters * reached / self._devices
        parts = (whole * (1 + model.gated_mlp) / (2 + model.gated_mlp), whole / (2 + model.gated_mlp))
        return [self.matrix_s(part, each_tokens, read_bytes=part * bits / 8.0) for part in parts]


def exchange_s(curve: Curve, moved_bytes: float) -> float:
    """Return the seconds of one all-reduce; beyond the largest measured one they grow with the bytes."""
    sizes = [size for size, _ in curve]
    if moved_bytes >= sizes[-1]:
        return curve[-1][1] * moved_bytes / sizes[-1]
    at, share = place(sizes, moved_bytes)
    return _between(curve[at][1], curve[at + 1][1], share)


def place(knots: Sequence[float], value: float) -> tuple[int, float]:
    """Return the knot below a value and the share of the way to the next, by logarithms; ends hold beyond."""
    value = min(max(value, knots[0]), knots[-1])
    below = min(bisect_right(knots, value) - 1, len(knots) - 2)
    return below, math.log(value / knots[below]) / math.log(knots[below + 1] / knots[below])


def _between(first: float, second: float, share: float) -> float:
    return float(first * (second / first) ** share)
