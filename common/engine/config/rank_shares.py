"""Which part of a model each rank of a tensor-parallel worker holds, and which degrees a model can be divided by.

    q, k, v        rows, by heads; k and v are the same on several ranks where there are fewer KV heads than ranks
    q_b, kv_b      rows, by heads; what makes latents is whole on every rank (q_a, kv_a), and so is their cache
    gate, up       rows; of a mixture those of every expert, and of its shared expert
    o, down        columns: each rank's product is one term of a sum over the ranks; codes with their groups' scales,
                   of which a rank has whole ones: where they do not divide evenly, the first ranks have one more
    sinks          by heads
    router         whole on every rank, which so choose the same experts: all see the same sums
    embedding,     rows, by token: an embedding is taken from the rank that has it, logits are gathered at rank 0
    lm_head
    norms          whole on every rank

Called by the lean model and its weights, by planners of memory, and by checks of the configuration before anything is
started: hence no torch here. Sums over the ranks add a bias of o or down once, on rank 0. Never reads a weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cohort.common.engine.config.model_config import LLAMA_SHAPED, MIXTURES, LatentGeometry, ModelGeometry
from cohort.common.engine.config.quantization_config import MXFP4_GROUP
from cohort.common.errors import ConfigError

MOST_RANKS = 64
_DIVIDED = ("llama", "moe", "gpt_oss", "deepseek")


class Span(NamedTuple):
    """A range [first, end)."""

    first: int
    end: int

    def shifted(self, offset: int) -> Span:
        return Span(self.first + offset, self.end + offset)


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of these ranges, one after the other, of a tensor with the extent `of` along `axis`."""

    axis: int
    of: int
    ranges: tuple[Span, ...]

    @property
    def extent(self) -> int:
        return sum(end - first for first, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns inside an MLP, between its two products. Groups of `together` share a scale in the second one."""

    count: int
    together: int = 1

    def of(self, rank: int, degree: int) -> Span:
        """Return the columns [first, end) of a rank: equal parts where no group is cut by them, else as many whole
        groups, of which the first ranks have one more."""
        if self.count % degree == 0 and self.count // degree % self.together == 0:
            each = self.count // degree
            return Span(rank * each, (rank + 1) * each)
        each, more = divmod(self.groups, degree)
        first = rank * each + min(rank, more)
        end = first + each + (rank < more)
        return Span(min(self.count, first * self.together), min(self.count, end * self.together))

    @property
    def groups(self) -> int:
        """The number of groups, of which the last may have fewer columns."""
        return -(-self.count // self.together)

    def why_not_divisible(self, degree: int) -> str:
        """Return why they cannot be divided over `degree` ranks; "" where they can."""
        if self.together == 1:
            return f"of {self.count} columns does not divide by {degree}" if self.count % degree else ""
        if self.groups >= degree:
            return ""
        return (
            f"of {self.count} columns has {self.groups} groups of {self.together} that share scales, for {degree} ranks"
        )


_Inside = Literal["an MLP", "an expert", "the shared expert"]


@dataclass(frozen=True, slots=True)
class RankShare:
    """The share of rank `rank` of `degree` in a model of this (whole) geometry."""

    geometry: ModelGeometry
    rank: int
    degree: int
    _columns: dict[_Inside, Columns] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_columns", columns_inside(self.geometry))

    @property
    def own(self) -> ModelGeometry:
        """The geometry of what this rank holds and computes. `vocab_size`: of its rows of embedding and head."""
        whole, (first, end), mixture = self.geometry, self.vocabulary, self.geometry.experts
        if mixture is not None:
            mixture = dataclasses.replace(
                mixture, inner_size=self._width("an expert"), shared_inner_size=self._width("the shared expert")
            )
        return dataclasses.replace(
            whole,
            num_heads=whole.num_heads // self.degree,
            num_kv_heads=self.kv_heads.end - self.kv_heads.first,
            intermediate_size=self._width("an MLP") or whole.intermediate_size // self.degree,
            vocab_size=end - first,
            experts=mixture,
        )

    @property
    def working(self) -> ModelGeometry:
        """The geometry whose intermediates a step of this rank has at the most: rank 0 gathers all logits."""
        return dataclasses.replace(self.own, vocab_size=self.geometry.vocab_size)

    @property
    def vocabulary_part(self) -> int:
        """Tokens of each rank; the last may have fewer."""
        return -(-self.geometry.vocab_size // self.degree)

    @property
    def vocabulary(self) -> Span:
        """The tokens [first, end) whose rows of embedding and head are here."""
        whole = self.geometry.vocab_size
        each, rank = self.vocabulary_part, self.rank
        return Span(min(whole, rank * each), min(whole, (rank + 1) * each))

    @property
    def kv_heads(self) -> Span:
        """The KV heads [first, end) that are here."""
        return kv_heads_of(self.geometry.num_kv_heads, self.rank, self.degree)

    def part(self, name: str) -> Part | None:
        """Return the part of a tensor by its name's last two words, and whether it is of experts; None = all of it."""
        parts, whole, size = name.split("."), self.geometry, self.geometry.head_dim
        module, kind = parts[-2] if len(parts) > 1 else "", parts[-1]
        query, kv, inside = whole.num_heads * size, whole.num_kv_heads * size, self._columns["an MLP"]
        if whole.experts is not None:
            if "experts" in parts:
                return self._of_experts(parts[parts.index("experts") + 1 :])
            if "shared_expert" in parts or "shared_experts" in parts:
                inside = self._columns["the shared expert"]
        own_query = self._even(query)
        own_kv = Span(self.kv_heads.first * size, self.kv_heads.end * size)
        inner, own_inner = inside.count, inside.of(self.rank, self.degree)
        if whole.latent is not None and (part := self._of_latents(module, kind, whole.latent)) is not None:
            return part
        match module, kind:
            case "q_proj", _:
                return Part(0, query, (own_query,))
            case (("k_proj" | "v_proj"), _):
                return Part(0, kv, (own_kv,))
            case "qkv_proj", _:
                ranges = (own_query, own_kv.shifted(query), own_kv.shifted(query + kv))
                return Part(0, query + 2 * kv, ranges)
            case (("gate_proj" | "up_proj"), _):
                return Part(0, inner, (own_inner,))
            case "gate_up_proj", _:
                return Part(0, 2 * inner, (own_inner, own_inner.shifted(inner)))
            case "o_proj", "weight":
                return Part(1, query, (own_query,))
            case "down_proj", "weight":
                return Part(1, inner, (own_inner,))
            case "self_attn", "sinks":
                return Part(0, whole.num_heads, (self._even(whole.num_heads),))
            case (("embed_tokens" | "lm_head"), _):
                return Part(0, whole.vocab_size, (self.vocabulary,))
            case _:
                return None

    def _of_latents(self, module: str, kind: str, latent: LatentGeometry) -> Part | None:
        """Return the part in attention over latents, whose queries, keys and values have widths of their own."""
        match module, kind:
            case (("q_proj" | "q_b_proj"), _):
                axis, each = 0, latent.plain + latent.rotated
            case "kv_b_proj", _:
                axis, each = 0, latent.plain + latent.value
            case "o_proj", "weight":
                axis, each = 1, latent.value
            case _:
                return None
        whole = self.geometry.num_heads * each
        return Part(axis, whole, (self._even(whole),))

    def _of_experts(self, parts: list[str]) -> Part | None:
        """Return the part of one expert's matrix, or of all of them in one tensor, which gpt-oss has transposed, with
        every gate beside its up. `parts`: of the name, after "experts"."""
        columns = self._columns["an expert"]
        inner, own = columns.count, columns.of(self.rank, self.degree)
        pairs = Span(2 * own.first, 2 * own.end)
        match self.geometry.family, parts:
            case _, [_, ("w1" | "w3" | "gate_proj" | "up_proj"), "weight"]:
                return Part(0, inner, (own,))
            case _, [_, ("w2" | "down_proj"), "weight"]:
                return Part(1, inner, (own,))
            case (("moe" | "deepseek"), ["gate_up_proj"]):
                return Part(1, 2 * inner, (own, own.shifted(inner)))
            case (("moe" | "deepseek"), ["down_proj"]):
                return Part(2, inner, (own,))
            case "gpt_oss", ["gate_up_proj"]:
                return Part(2, 2 * inner, (pairs,))
            case "gpt_oss", ["gate_up_proj_bias" | "gate_up_proj_blocks" | "gate_up_proj_scales"]:
                return Part(1, 2 * inner, (pairs,))
            case "gpt_oss", ["down_proj"]:
                return Part(1, inner, (own,))
            case "gpt_oss", ["down_proj_blocks" | "down_proj_scales"]:
                return Part(2, inner // MXFP4_GROUP, (Span(own.first // MXFP4_GROUP, own.end // MXFP4_GROUP),))
            case _:
                return None

    def adds_nothing(self, name: str) -> bool:
        """Return whether a tensor is a bias of a product that is summed over the ranks, on all but the first."""
        return self.rank > 0 and name.endswith(("o_proj.bias", "down_proj.bias", "experts.down_proj_bias"))

    def _width(self, what: _Inside) -> int:
        first, end = self._columns[what].of(self.rank, self.degree)
        return end - first

    def _even(self, extent: int) -> Span:
        each = extent // self.degree
        return Span(self.rank * each, (self.rank + 1) * each)


def kv_heads_of(heads: int, rank: int, degree: int) -> Span:
    """Return which of a model's KV heads, [first, end), rank `rank` of `degree` holds."""
    first = rank * heads // degree
    return Span(first, first + max(1, heads // degree))


def why_not_divisible(geometry: ModelGeometry, degree: int) -> str:
    """Return why a model cannot be divided over `degree` ranks; "" where it can."""
    if degree == 1:
        return ""
    if geometry.family not in _DIVIDED:
        return (
            f"{geometry.model_type} runs in its {geometry.family} form, which one device computes; what is divided "
            f"over ranks are Llama-shaped decoders ({', '.join(sorted(LLAMA_SHAPED))}), their mixtures of experts "
            f"({', '.join(sorted(MIXTURES))}), gpt_oss, deepseek_v2 and deepseek_v3"
        )
    heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
    if heads % degree:
        return f"{heads} query heads do not divide by {degree}"
    if kv_heads % degree and degree % kv_heads:
        return f"{kv_heads} KV heads neither divide by {degree} nor divide it"
    if reason := _cut_heads(geometry, degree):
        return reason
    for what, columns in columns_inside(geometry).items():
        if reason := columns.why_not_divisible(degree):
            return f"{what} {reason}"
    if (degree - 1) * -(-geometry.vocab_size // degree) >= geometry.vocab_size:
        return f"a vocabulary of {geometry.vocab_size} leaves the last of {degree} ranks without a token"
    return ""


def columns_inside(geometry: ModelGeometry) -> dict[_Inside, Columns]:
    """Return the columns of each kind of MLP; none where the model has none of that kind."""
    mixture, together = geometry.experts, _sharing_scales(geometry)
    found: dict[_Inside, int] = {"an MLP": geometry.intermediate_size, "an expert": 0, "the shared expert": 0}
    if mixture is not None:
        if all(mixture.layers):
            found["an MLP"] = 0
        found["an expert"], found["the shared expert"] = mixture.inner_size, mixture.shared_inner_size
    return {what: Columns(count, together[what] if count else 1) for what, count in found.items()}


def _sharing_scales(geometry: ModelGeometry) -> dict[_Inside, int]:
    """Return the number of columns inside MLPs that share a scale, or the byte of two codes, in some layer."""
    mixture, quantization = geometry.experts, geometry.quantization
    found: dict[_Inside, int] = {"an MLP": 1, "an expert": 1, "the shared expert": 1}
    if mixture is not None and mixture.mxfp4:
        found["an expert"] = MXFP4_GROUP
    if quantization is None:
        return found
    for layer in range(geometry.num_layers):
        for what, module, inputs in _summed(geometry, layer):
            scheme = quantization.scheme_of(f"model.layers.{layer}.{module}")
            if scheme is not None:
                group = scheme.codes(inputs).group
                found[what] = math.lcm(found[what], group if group < inputs else 1, 2 if scheme.bits == 4 else 1)
    return found


def _summed(geometry: ModelGeometry, layer: int) -> Iterator[tuple[_Inside, str, int]]:
    """Yield the modules of a layer's MLPs whose inputs are divided, and the number of these. Of the experts the first:
    they are alike, and one that is not is refused when it is read."""
    mixture = geometry.experts
    if mixture is None or not mixture.layers[layer]:
        yield "an MLP", "mlp.down_proj", geometry.intermediate_size
        return
    down = "block_sparse_moe.experts.0.w2" if geometry.model_type == "mixtral" else "mlp.experts.0.down_proj"
    yield "an expert", down, mixture.inner_size
    if mixture.shared_inner_size:
        shared = "shared_experts" if geometry.family == "deepseek" else "shared_expert"
        yield "the shared expert", f"mlp.{shared}.down_proj", mixture.shared_inner_size


def _cut_heads(geometry: ModelGeometry, degree: int) -> str:
    """Return why heads in codes cannot be divided as inputs of the product after them; "" where they can. Outputs can
    be cut anywhere."""
    if (quantization := geometry.quantization) is None:
        return ""
    width = geometry.head_dim if geometry.latent is None else geometry.latent.value
    module, inputs = "self_attn.o_proj", geometry.num_heads * width
    own = inputs // degree
    for layer in range(geometry.num_layers):
        scheme = quantization.scheme_of(f"model.layers.{layer}.{module}")
        if scheme is None:
            continue
        group = scheme.codes(inputs).group
        if group < inputs and own % group:
            return (
                f"the {inputs} inputs of {module} share scales in groups of {group}, and each rank's {own} would "
                "cut through one"
            )
        if scheme.bits == 4 and own % 2:
            return f"the {inputs} inputs of {module} are codes of 4 bits, and {own} of them cut through a byte"
    return ""


def degrees(geometry: ModelGeometry, most: int = MOST_RANKS) -> list[int]:
    """Return every degree that the model divides by, ascending; 1 is always among them."""
    return [degree for degree in range(1, most + 1) if not why_not_divisible(geometry, degree)]


def check_degree(geometry: ModelGeometry, degree: int, model: str) -> None:
    """Raise `ConfigError` that names what stands against the degree, and which ones would do."""
    if reason := why_not_divisible(geometry, degree):
        able = ", ".join(str(each) for each in degrees(geometry, 16))
        raise ConfigError(f"workers: tensor_parallel: {degree}: {model}: {reason}; degrees for this model: {able}")


def exchange_bytes(geometry: ModelGeometry, element_bytes: int, max_rows: int, max_step_tokens: int) -> int:
    """Return the bytes of the terms that a GPU's rank puts into a sum, and of the logits that rank 0 gathers (whole
    ones are among what a step takes)."""
    return max_step_tokens * geometry.hidden_size * element_bytes + max_rows * geometry.vocab_size * 4


def reduced_bytes(geometry: ModelGeometry, element_bytes: int, tokens: int) -> int:
    """Return the bytes that every rank puts into one layer's two sums over the ranks, and gets out."""
    return 2 * tokens * geometry.hidden_size * element_bytes
