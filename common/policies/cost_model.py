"""The time of an iteration: the model's arithmetic over the device's speed, plus the serving stack's own.

One formula for every device; the simulator turns plans into virtual time with it, and a policy that predicts (D4, R3)
may ask it too. Pure arithmetic on numbers that `configs/models` and `configs/devices` hold, fitted to measurements.

    step  =  (max(launching, device) + host) · (1 + mixed share, where prompts and decodes share it)
    host  =  fixed + per_row · rows                              ahead, behind decodes: max(launching + host, device)
    launching = launch · layers                                  the host issuing kernels; 0 where graphs are replayed
    device = the sum of its measured operators (`operators.py`); of a device that `cohort profile` fitted as a whole:
             linear + prefill attention + decode attention + tensor-parallel exchange + layer · layers
    linear = (computeⁿ + memoryⁿ)^(1/n), n = 4                   a roofline with a round corner: both limits are near
    memory = the weights' bytes over the bandwidth; of a mixture, of the experts that its tokens reach:
             E · (1 − (1 − k/E)^tokens) of a layer's E where each token goes to k, all alike

Decode attention has three models (A1):

    split_kv       the KV of all rows is read at the device's bandwidth, however long single rows are
    unit_per_row   one work unit reads the whole KV of one head of one row (kernels without split-KV): a unit has a
                   fixed share of the bandwidth, so a long row holds the others up and few rows cannot fill the device
    unit_last      the same, and the units of the longest row begin when all others have been read: the most that any
                   order of units can cost (Graham's bound on list scheduling), as `unit_per_row` is the least

A mixed iteration reads the weights once for prompts and decodes; both attentions add, for each keeps the device busy by
itself. `mixed_share` is what no operator explains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from cohort.common.kv.layer_groups import in_groups
from cohort.common.policies.operators import Operators, OperatorTimes
from cohort.common.types import KvGeometry

DecodeAttention = Literal["split_kv", "unit_per_row", "unit_last"]

_CORNER = 4.0
"""Sharpness of the roofline's corner; at the ridge point the smooth maximum is 19 % above either limit."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of a decoder that cost depends on. Grouped-query attention has fewer `kv_heads` than `heads`."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated_mlp: bool
    vocabulary: int
    tied_embeddings: bool
    max_positions: int
    weight_bytes: int
    kv_bytes: int
    window: int = 0
    """Positions that a token sees back: bounds a sequence's memory, not an iteration's time."""
    kv_scale_bytes: int = 0
    """Scale bytes of one token's key or value of one head, where KV is in FP8 (`kv_bytes` 1)."""
    full_layers: int = 0
    """Layers that see everything, where only the others have the window; 0 = all have it."""
    experts: int = 0
    """Experts of each layer but `dense_layers`, in place of its MLP; a token goes to `experts_per_token` of them."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Width of what every token passes through beside them."""
    dense_layers: int = 0
    """Layers with an MLP (`intermediate`) in a model with experts."""
    expert_bits: float = 0.0
    """Bits per weight of an expert, scales included, where experts have another precision; 0 = `weight_bytes`."""
    attention_weights: int = 0
    """Weights of one layer's attention if the heads do not give them (multi-head latent attention), else 0."""
    pair_dim: int = 0
    """Mean width of a head's score and value products, where that is not `head_dim`; 0 = it is."""

    @property
    def attention_parameters(self) -> int:
        """Parameters in one layer's attention matrices; norms and biases are a thousandth of them."""
        of_heads = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.attention_weights or of_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters in the matrices of one layer with an MLP."""
        return self.attention_parameters + self._mlp_parameters(self.intermediate)

    @property
    def mixture_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        return self._mlp_parameters(self.expert_intermediate)

    @property
    def common_parameters(self) -> int:
        """Parameters in all layers' matrices that every token passes through: all but the experts."""
        mixtures = self.mixture_layers
        shared = self.hidden * self.experts + self._mlp_parameters(self.shared_intermediate)
        dense = (self.layers - mixtures) * self.layer_parameters
        return dense + mixtures * (self.attention_parameters + shared)

    @property
    def active_parameters(self) -> int:
        """Parameters in all layers' matrices that one token passes through."""
        return self.common_parameters + self.mixture_layers * self.experts_per_token * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def _outside_experts(self) -> int:
        """Parameters of all but the experts, embeddings included."""
        return self.common_parameters + self.head_parameters * (1 if self.tied_embeddings else 2)

    @property
    def _all_experts(self) -> int:
        return self.mixture_layers * self.experts * self.expert_parameters

    @property
    def parameters(self) -> int:
        return self._outside_experts + self._all_experts

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        weights = self._all_experts
        return int(weights * self.expert_bits / 8.0) if self.expert_bits else weights * self.weight_bytes

    @property
    def weights_total_bytes(self) -> int:
        return self._outside_experts * self.weight_bytes + self.expert_bytes

    def reached_share(self, tokens: int) -> float:
        """Return the expected share of a layer's experts that `tokens` reach: an upper estimate, as routing is
        uneven."""
        if not self.experts:
            return 0.0
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens

    def read_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that an iteration of `tokens` reads once: the layers' and the output head's."""
        common = (self.common_parameters + self.head_parameters) * self.weight_bytes
        return common + self.expert_bytes * self.reached_share(tokens)

    def _mlp_parameters(self, width: int) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden * width

    def kv_copies(self, devices: int) -> int:
        """Return how many of `devices` that divide the model have the same KV: each has a head where there are fewer KV
        heads than devices; latents, which are one head's, all of them have."""
        return max(1, devices // self.kv_heads)

    def kv_geometry(self, block_size: int, *, grouped: bool = False) -> KvGeometry:
        """Return the KV geometry. `grouped`: blocks of groups of layers, where only some have the window."""
        window = 0 if self.full_layers else self.window
        width = self.head_dim + self.kv_scale_bytes // self.kv_bytes
        whole = KvGeometry(self.layers, self.kv_heads, width, self.kv_bytes, block_size, window)
        if not grouped or not self.full_layers:
            return whole
        return in_groups(whole, [0] * self.full_layers + [self.window] * (self.layers - self.full_layers))


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """Accelerator (or CPU): data-sheet peaks and the fitted share of them that real kernels reach. `units`: what runs a
    work unit of decode attention at a time (streaming multiprocessors, threads). `unit_speedup`: how many times its
    equal share of the memory bandwidth one unit alone can draw. `kv_efficiency`: share of the memory bandwidth with
    which decode attention reads KV, where that is not `memory_efficiency` (None): on a CPU it computes more than it
    waits. `exchange_*`: all-reduce between the devices of one instance. `host_bytes_per_s`: to host memory, for
    swapping."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    compute_efficiency: float
    memory_efficiency: float
    attention_efficiency: float
    units: int
    unit_speedup: float
    exchange_bytes_per_s: float
    exchange_latency_s: float
    host_bytes_per_s: float
    layer_s: float = 0.0
    kv_efficiency: float | None = None
    operators: Operators | None = None
    """Measured operators, which stand in for the efficiencies, `exchange_*` and `layer_s`."""
    scaled: str = ""
    """Parts that were measured on another device, and on which: for people."""

    @property
    def shown(self) -> str:
        return f"{self.name} ({self.scaled})" if self.scaled else self.name


@dataclass(frozen=True, slots=True)
class StackShape:
    """Time that the serving software adds to an iteration. `launch_s`: host time to issue one layer, hidden behind the
    device unless it is longer. `step_s`: fixed, per iteration. `row_s`: per row (scheduling, block tables, sampling,
    detokenising). The `parallel_*` are added where an instance has several devices (their driver has to talk to them).
    `mixed_share`: how much longer an iteration takes because it holds both prompt chunks and decodes, beside what its
    tokens and positions cost. `prompt_launch_s`: `launch_s` of an iteration with prompts. `ahead`:
    the host plans an iteration of decodes while the one before it runs, so that its time shows only where the device is
    faster; one with prompts waits for the host."""

    name: str
    launch_s: float
    step_s: float
    row_s: float
    parallel_step_s: float = 0.0
    parallel_row_s: float = 0.0
    mixed_share: float = 0.0
    prompt_launch_s: float = 0.0
    ahead: bool = False


class StepWork(msgspec.Struct, frozen=True, gc=False):
    """Numbers of one iteration. `tokens`: computed. `rows`: sequences in it. `sampled`: of these, how many sample a
    token (the output head runs for them). `pairs`: query-key pairs of rows with more than one token. `prefill_context`:
    KV positions those rows read. `decode_rows`, `decode_context`, `longest_context`: rows of one token, the KV
    positions they read together, and the most that one reads."""

    tokens: int
    rows: int
    sampled: int
    pairs: int = 0
    prefill_context: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    longest_context: int = 0


def prefill_pairs(start: int, count: int) -> int:
    """Return the query-key pairs of positions [start, start + count): each sees all before it and itself."""
    return count * start + count * (count + 1) // 2


class CostModel:
    """Seconds of an iteration of `model` on `tensor_parallel` devices."""

    def __init__(
        self,
        model: ModelShape,
        device: DeviceShape,
        stack: StackShape,
        *,
        tensor_parallel: int = 1,
        decode_attention: DecodeAttention = "split_kv",
    ) -> None:
        self.model = model
        self.device = device
        self.stack = stack
        self.tensor_parallel = tensor_parallel
        self.decode_attention = decode_attention
        peak = device.flops_per_s * tensor_parallel
        bandwidth = device.memory_bytes_per_s * device.memory_efficiency * tensor_parallel
        compute = peak * device.compute_efficiency
        self._token_s = 2.0 * model.active_parameters / compute
        self._sample_s = 2.0 * model.head_parameters / compute
        self._weights_s = model.read_bytes(0) / bandwidth
        self._experts_s = model.expert_bytes / bandwidth
        pair = 4.0 * model.layers * model.heads * (model.pair_dim or model.head_dim)
        self._pair_s = pair / (peak * device.attention_efficiency)
        copies = model.kv_copies(tensor_parallel)
        position_bytes = model.kv_geometry(1).token_bytes
        operators = device.operators
        kv_efficiency = operators.decodes.efficiency if operators else device.kv_efficiency
        if kv_efficiency is not None:
            bandwidth = device.memory_bytes_per_s * kv_efficiency * tensor_parallel
        self._position_s = copies * position_bytes / bandwidth
        self._operators = OperatorTimes(model, device, operators, tensor_parallel) if operators else None
        # A unit reads one head of one row; with few units running each draws more than its equal share.
        share = bandwidth / (device.units * tensor_parallel) * device.unit_speedup
        self._unit_position_s = position_bytes / model.kv_heads / share
        self._exchange_token_s = 0.0
        self._exchange_s = 0.0
        if tensor_parallel > 1:
            # Two all-reduces a layer; a ring moves 2·(n−1)/n of the activations over every link.
            moved = 2.0 * (tensor_parallel - 1) / tensor_parallel * (self.reduced_token_bytes // 2)
            self._exchange_token_s = 2 * model.layers * moved / device.exchange_bytes_per_s
            self._exchange_s = 2 * model.layers * device.exchange_latency_s
        self._launch_s = stack.launch_s * model.layers
        self._prompt_launch_s = max(stack.launch_s, stack.prompt_launch_s) * model.layers
        self._layers_s = device.layer_s * model.layers
        parallel = tensor_parallel > 1
        self._fixed_s = stack.step_s + (stack.parallel_step_s if parallel else 0.0)
        self._row_s = stack.row_s + (stack.parallel_row_s if parallel else 0.0)

    @property
    def reduced_token_bytes(self) -> int:
        """Bytes of one token in one layer that both sums over the devices take in, at each of them."""
        return 2 * self.model.hidden * self.model.weight_bytes if self.tensor_parallel > 1 else 0

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of one iteration; 0 rows cost nothing."""
        if work.rows == 0:
            return 0.0
        host_s = self._fixed_s + self._row_s * work.rows
        if self.stack.ahead and not work.pairs:
            return max(self._launch_s + host_s, self._device_s(work))
        seconds = host_s + max(self._prompt_launch_s if work.pairs else self._launch_s, self._device_s(work))
        mixed = work.pairs and work.decode_rows
        return seconds * (1.0 + self.stack.mixed_share) if mixed else seconds

    def repeated_s(self, work: StepWork, steps: int) -> list[float]:
        """Return the seconds of this all-decode iteration and of those that follow with the same rows, `steps` in all,
        each a position longer. The same numbers as `step_s` of each, only cheaper."""
        host_s = self._fixed_s + self._row_s * work.rows
        beside, least = (0.0, self._launch_s + host_s) if self.stack.ahead else (host_s, self._launch_s)
        fixed = self._without_attention_s(work)
        context, longest, rows = work.decode_context, work.longest_context, work.decode_rows
        position_s = self._position_s
        if self.decode_attention == "split_kv":  # `_decode_s` written out: thousands of times for every request
            devices = [fixed + position_s * each for each in range(context, context + steps * rows, rows)]
        else:
            devices = [fixed + self._decode_s(context + step * rows, longest + step) for step in range(steps)]
        return [beside + (device if device > least else least) for device in devices]

    def memory_share(self, work: StepWork) -> float:
        """Return the share of an iteration's time that reading its weights and KV would take alone, 0 to 1."""
        reads_s = self._read_s(work.tokens) + self._position_s * (work.prefill_context + work.decode_context)
        return min(1.0, reads_s / self.step_s(work)) if work.rows else 0.0

    def swap_s(self, swapped_bytes: int) -> float:
        """Return the seconds of copies to or from host memory; every device of an instance has its own path."""
        copies = self.model.kv_copies(self.tensor_parallel)
        return copies * swapped_bytes / (self.device.host_bytes_per_s * self.tensor_parallel)

    def flops(self, work: StepWork) -> float:
        """Return model FLOPs of an iteration, for utilisation figures: matrices, output head, attention."""
        model = self.model
        pairs = work.pairs + work.decode_context
        return (
            2.0 * model.active_parameters * work.tokens
            + 2.0 * model.head_parameters * work.sampled
            + 4.0 * model.layers * model.heads * (model.pair_dim or model.head_dim) * pairs
        )

    @property
    def peak_flops_per_s(self) -> float:
        return self.device.flops_per_s * self.tensor_parallel

    def _device_s(self, work: StepWork) -> float:
        # Same order of additions as in `repeated_s`: a decode step must come out equal to the last bit.
        fixed = self._without_attention_s(work)
        return fixed + self._prefill_s(work) + self._decode_s(work.decode_context, work.longest_context)

    def _without_attention_s(self, work: StepWork) -> float:
        """Return the seconds of all but attention; the floor of a decode's is here, which does not grow with it."""
        if self._operators is None:
            exchange = self._exchange_token_s * work.tokens + self._exchange_s
            return self._linear_s(work) + exchange + self._layers_s
        floor_s = self._operators.decode_floor_s if work.decode_rows else 0.0
        return self._operators.layers_s(work.tokens) + self._operators.head_s(work.sampled) + floor_s

    def _prefill_s(self, work: StepWork) -> float:
        if not work.pairs:
            return 0.0
        if self._operators is None:
            return self._pair_s * work.pairs + self._position_s * work.prefill_context
        rows, tokens = work.rows - work.decode_rows, work.tokens - work.decode_rows
        return self._operators.prompts_s(tokens, rows, work.pairs)

    def _linear_s(self, work: StepWork) -> float:
        compute = self._token_s * work.tokens + self._sample_s * work.sampled
        return float((compute**_CORNER + self._read_s(work.tokens) ** _CORNER) ** (1.0 / _CORNER))

    def _read_s(self, tokens: int) -> float:
        """Return the seconds of reading an iteration's weights from memory."""
        if not self._experts_s:
            return self._weights_s
        return self._weights_s + self._experts_s * self.model.reached_share(tokens)

    def _decode_s(self, context: int, longest: int) -> float:
        together = self._position_s * context
        if self.decode_attention == "split_kv":
            return together
        alone = self._unit_position_s * longest
        if self.decode_attention == "unit_per_row":
            return max(together, alone)
        return max(together, self._position_s * (context - longest) + alone)
