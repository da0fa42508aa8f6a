"""Which part of a model each rank of a tensor-parallel worker holds, and which degrees a model can be divided by.

    q, k, v        rows, by heads; k and v are the same on several ranks where there are fewer KV heads than ranks
    gate, up       rows; of a mixture those of every expert, and of its shared expert
    o, down        columns: each rank's product is one term of a sum over the ranks; codes with their groups' scales
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
from dataclasses import dataclass

from cohort.common.engine.model_config import LLAMA_SHAPED, MIXTURES, ExpertsGeometry, ModelGeometry
from cohort.common.engine.quantization_config import MXFP4_GROUP
from cohort.common.errors import ConfigError

MOST_RANKS = 64
_DIVIDED = ("llama", "moe", "gpt_oss")


@dataclass(frozen=True, slots=True)
class Part:
    """Of a tensor with the extent `of` along `axis`: the elements of these ranges [first, end), one after the other."""

    axis: int
    of: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def extent(self) -> int:
        return sum(end - first for first, end in self.ranges)


@dataclass(frozen=True, slots=True)
class RankShare:
    """The share of rank `rank` of `degree` in a model of this (whole) geometry."""

    geometry: ModelGeometry
    rank: int
    degree: int

    @property
    def own(self) -> ModelGeometry:
        """The geometry of what this rank holds and computes. `vocab_size`: of its rows of embedding and head."""
        whole, (first, end), mixture = self.geometry, self.vocabulary, self.geometry.experts
        if mixture is not None:
            mixture = dataclasses.replace(
                mixture,
                inner_size=mixture.inner_size // self.degree,
                shared_inner_size=mixture.shared_inner_size // self.degree,
            )
        return dataclasses.replace(
            whole,
            num_heads=whole.num_heads // self.degree,
            num_kv_heads=self.kv_heads[1] - self.kv_heads[0],
            intermediate_size=whole.intermediate_size // self.degree,
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
    def vocabulary(self) -> tuple[int, int]:
        """The tokens [first, end) whose rows of embedding and head are here."""
        whole = self.geometry.vocab_size
        return min(whole, self.rank * self.vocabulary_part), min(whole, (self.rank + 1) * self.vocabulary_part)

    @property
    def kv_heads(self) -> tuple[int, int]:
        """The KV heads [first, end) that are here."""
        return kv_heads_of(self.geometry.num_kv_heads, self.rank, self.degree)

    def part(self, name: str) -> Part | None:
        """Of the tensor of this name, by its last two words, and whether it is of experts; None = all of it."""
        words, whole, size = name.split("."), self.geometry, self.geometry.head_dim
        module, kind = words[-2] if len(words) > 1 else "", words[-1]
        query, kv, inner = whole.num_heads * size, whole.num_kv_heads * size, whole.intermediate_size
        if (mixture := whole.experts) is not None:
            if "experts" in words:
                return self._of_experts(words[words.index("experts") + 1 :], mixture)
            if "shared_expert" in words:
                inner = mixture.shared_inner_size
        own_query = self._even(query)
        own_kv = (self.kv_heads[0] * size, self.kv_heads[1] * size)
        own_inner = self._even(inner)
        match module, kind:
            case "q_proj", _:
                return Part(0, query, (own_query,))
            case (("k_proj" | "v_proj"), _):
                return Part(0, kv, (own_kv,))
            case "qkv_proj", _:
                ranges = (own_query, _behind(own_kv, query), _behind(own_kv, query + kv))
                return Part(0, query + 2 * kv, ranges)
            case (("gate_proj" | "up_proj"), _):
                return Part(0, inner, (own_inner,))
            case "gate_up_proj", _:
                return Part(0, 2 * inner, (own_inner, _behind(own_inner, inner)))
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

    def _of_experts(self, words: list[str], mixture: ExpertsGeometry) -> Part | None:
        """`words`: of the name, what follows "experts". One expert's matrix, or all of them in one tensor, which
        gpt-oss has transposed, with every gate beside its up."""
        inner, own = mixture.inner_size, self._even(mixture.inner_size)
        pairs = (2 * own[0], 2 * own[1])
        match self.geometry.family, words:
            case _, [_, ("w1" | "w3" | "gate_proj" | "up_proj"), "weight"]:
                return Part(0, inner, (own,))
            case _, [_, ("w2" | "down_proj"), "weight"]:
                return Part(1, inner, (own,))
            case "moe", ["gate_up_proj"]:
                return Part(1, 2 * inner, (own, _behind(own, inner)))
            case "moe", ["down_proj"]:
                return Part(2, inner, (own,))
            case "gpt_oss", ["gate_up_proj"]:
                return Part(2, 2 * inner, (pairs,))
            case "gpt_oss", ["gate_up_proj_bias" | "gate_up_proj_blocks" | "gate_up_proj_scales"]:
                return Part(1, 2 * inner, (pairs,))
            case "gpt_oss", ["down_proj"]:
                return Part(1, inner, (own,))
            case "gpt_oss", ["down_proj_blocks" | "down_proj_scales"]:
                return Part(2, inner // MXFP4_GROUP, (self._even(inner // MXFP4_GROUP),))
            case _:
                return None

    def adds_nothing(self, name: str) -> bool:
        """A bias of a product that is summed over the ranks, on all but the first."""
        return self.rank > 0 and name.endswith(("o_proj.bias", "down_proj.bias", "experts.down_proj_bias"))

    def _even(self, extent: int) -> tuple[int, int]:
        each = extent // self.degree
        return self.rank * each, (self.rank + 1) * each


def kv_heads_of(heads: int, rank: int, degree: int) -> tuple[int, int]:
    """Which of a model's KV heads, [first, end), rank `rank` of `degree` holds."""
    first = rank * heads // degree
    return first, first + max(1, heads // degree)


def hindrance(geometry: ModelGeometry, degree: int) -> str:
    """Why a model cannot be divided over so many ranks; "" where it can."""
    if degree == 1:
        return ""
    if geometry.family not in _DIVIDED:
        return (
            f"{geometry.model_type} runs in its {geometry.family} form, which one device computes; what is divided "
            f"over ranks are Llama-shaped decoders ({', '.join(sorted(LLAMA_SHAPED))}), their mixtures of experts "
            f"({', '.join(sorted(MIXTURES))}) and gpt_oss"
        )
    heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
    if heads % degree:
        return f"{heads} query heads do not divide by {degree}"
    if kv_heads % degree and degree % kv_heads:
        return f"{kv_heads} KV heads neither divide by {degree} nor divide it"
    for what, inner in _inner_sizes(geometry).items():
        if inner % degree:
            return f"{what} of {inner} columns does not divide by {degree}"
    if (degree - 1) * -(-geometry.vocab_size // degree) >= geometry.vocab_size:
        return f"a vocabulary of {geometry.vocab_size} leaves the last of {degree} ranks without a token"
    return _cut_codes(geometry, degree)


def _inner_sizes(geometry: ModelGeometry) -> dict[str, int]:
    """Columns of the MLPs that the model has, by what has them."""
    mixture = geometry.experts
    if mixture is None:
        return {"an MLP": geometry.intermediate_size}
    found = {"an expert": mixture.inner_size}
    found |= {"the shared expert": mixture.shared_inner_size} if mixture.shared_inner_size else {}
    return found if all(mixture.layers) else found | {"an MLP": geometry.intermediate_size}


def _divided_inputs(geometry: ModelGeometry, layer: int) -> dict[str, int]:
    """A layer's modules whose inputs are divided, and how many they are. Of the experts the first: they are alike, and
    one that is not is refused when it is read."""
    found, mixture = {"self_attn.o_proj": geometry.num_heads * geometry.head_dim}, geometry.experts
    if mixture is None or not mixture.layers[layer]:
        return found | {"mlp.down_proj": geometry.intermediate_size}
    down = "block_sparse_moe.experts.0.w2" if geometry.model_type == "mixtral" else "mlp.experts.0.down_proj"
    found[down] = mixture.inner_size
    return found | ({"mlp.shared_expert.down_proj": mixture.shared_inner_size} if mixture.shared_inner_size else {})


def _cut_codes(geometry: ModelGeometry, degree: int) -> str:
    """Why quantised weights whose inputs are divided cannot be; "" where they can. Outputs can be cut anywhere."""
    if (mixture := geometry.experts) is not None and mixture.mxfp4 and (mixture.inner_size // degree) % MXFP4_GROUP:
        return (
            f"the {mixture.inner_size} inputs of mlp.experts.down_proj share scales in groups of {MXFP4_GROUP}, and "
            f"each rank's {mixture.inner_size // degree} would cut through one"
        )
    if (quantization := geometry.quantization) is None:
        return ""
    for layer in range(geometry.num_layers):
        for module, inputs in _divided_inputs(geometry, layer).items():
            scheme = quantization.scheme_of(f"model.layers.{layer}.{module}")
            if scheme is None:
                continue
            own, group = inputs // degree, scheme.codes(inputs).group
            if group < inputs and own % group:
                return (
                    f"the {inputs} inputs of {module} share scales in groups of {group}, and each rank's {own} would "
                    "cut through one"
                )
            if scheme.bits == 4 and own % 2:
                return f"the {inputs} inputs of {module} are codes of 4 bits, and {own} of them cut through a byte"
    return ""


def degrees(geometry: ModelGeometry, most: int = MOST_RANKS) -> list[int]:
    """Every degree that the model divides by, ascending; 1 is always among them."""
    return [degree for degree in range(1, most + 1) if not hindrance(geometry, degree)]


def check_degree(geometry: ModelGeometry, degree: int, model: str) -> None:
    """Raises `ConfigError` that names what stands against the degree, and which ones would do."""
    if reason := hindrance(geometry, degree):
        able = ", ".join(str(each) for each in degrees(geometry, 16))
        raise ConfigError(f"workers: tensor_parallel: {degree}: {model}: {reason}; degrees for this model: {able}")


def exchange_bytes(geometry: ModelGeometry, element_bytes: int, max_rows: int, max_step_tokens: int) -> int:
    """Memory of the terms that a GPU's rank puts into a sum, and of the logits that rank 0 gathers (whole ones are
    among what a step takes)."""
    return max_step_tokens * geometry.hidden_size * element_bytes + max_rows * geometry.vocab_size * 4


def reduced_bytes(geometry: ModelGeometry, element_bytes: int, tokens: int) -> int:
    """Of one layer's two sums over the ranks: what every rank puts in, and gets out."""
    return 2 * tokens * geometry.hidden_size * element_bytes


def _behind(span: tuple[int, int], offset: int) -> tuple[int, int]:
    return span[0] + offset, span[1] + offset
