"""What the design expects of every metric, before any was measured: one table, each line with its derivation in words.

A metric far off its line shows where to look first: in the code, or in the derivation. Called by the sections, which
put the prediction beside the metric. All lines are functions of the device's measured rates, so they hold for an H100
as for an H200. Estimates throughout; nothing here is a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cohort.common.config.serving import TransferConfig
from cohort.common.engine.config.model_config import DTYPE_BYTES, ModelGeometry
from cohort.services.bench.gpu_check.frame import bounds
from cohort.services.bench.gpu_check.frame.bounds import Ceilings
from cohort.services.bench.gpu_check.frame.report import Prediction

# What the derivations assume.
_PRODUCT_BYTES = 0.92  # share of bandwidth that a library product of few rows reaches
_CODED_BYTES = 0.6  # share of bandwidth that a product over codes is hoped to reach: its numbers are made in the tile
_PRODUCT_RATE = 0.85  # share of the matrix rate, of many rows
_KV_LONG, _KV_SHORT = 0.80, 0.60  # share of bandwidth of decode attention, from 8,192 keys a row; below
_KERNELS_A_LAYER = 10
_RAMP_S = 2.2e-6  # a kernel's start and end, when one follows the other in a graph
_LAUNCH_S = 8e-6  # of one kernel by the host, Python included
_AROUND_S = 0.35e-3  # copies in and out, the graph's launch, waking from the event
_FLASH_RATE = 0.45  # share of the matrix rate that FlashAttention-2 reaches on Hopper
_RENDEZVOUS_S = 0.2e-3  # one tagged message between two processes, event loops included
_RUNS_AT_ONCE = TransferConfig().runs_at_once
_MIXED_KERNELS_A_LAYER = 13  # of a step with prompts: attention twice, and its gathering or merging
_PAGED_RATE = 0.20  # share of the matrix rate that attention of prompts over the paged cache reaches
_MULTIPROCESSORS = 132
_SM_INSTRUCTIONS_S = 0.6 * 4 * 32 * 1.785e9  # of one multiprocessor's threads, at 60 % of what four schedulers issue
_FP8_OPERATIONS, _SM_INTEGERS = 7, 64
_EDITS_S = 4e-6  # penalties are put in place and taken back


@dataclass(frozen=True, slots=True)
class Facts:
    """The circumstances of a metric; a line reads the fields it needs."""

    ceilings: Ceilings
    geometry: ModelGeometry | None = None
    dtype: str = "bfloat16"
    rows: int = 1
    context: int = 1024
    tokens: int = 0
    moved_bytes: float = 0.0
    messages: int = 1
    instructions: float = 0.0
    """That sampling takes per logit."""
    penalised: bool = False

    @property
    def model(self) -> ModelGeometry:
        if self.geometry is None:
            raise ValueError("this line needs a model")
        return self.geometry


def _fp8_share(facts: Facts) -> float:
    numbers_s = _MULTIPROCESSORS * _SM_INTEGERS * 1.785e9 / _FP8_OPERATIONS
    return min(_KV_SHORT, numbers_s / facts.ceilings.bandwidth)


def _kernels_s(facts: Facts) -> float:
    return (_KERNELS_A_LAYER * facts.model.num_layers + 8) * _RAMP_S


def _recorded_s(facts: Facts) -> float:
    slower = Ceilings(0, _PRODUCT_BYTES * facts.ceilings.bandwidth, _PRODUCT_RATE * facts.ceilings.matrix)
    products = bounds.products_s(facts.model, facts.dtype, facts.rows, facts.rows, slower)
    share = _KV_LONG if facts.context >= 8192 else 0.5 * (_KV_LONG + _KV_SHORT)
    attention = bounds.attention_s(facts.model, facts.dtype, facts.rows, facts.context, facts.ceilings) / share
    return products + attention + _kernels_s(facts)


def _prefill_s(facts: Facts) -> float:
    g, tokens = facts.model, facts.tokens
    products = bounds.products_s(
        g, facts.dtype, tokens, 1, Ceilings(0, facts.ceilings.bandwidth, facts.ceilings.matrix)
    )
    square = 2.0 * g.num_heads * g.head_dim * tokens * (tokens + 1) * g.num_layers
    passes = tokens * (10 * g.hidden_size + 3 * g.intermediate_size) * DTYPE_BYTES[facts.dtype] * g.num_layers
    return (
        products / _PRODUCT_RATE
        + square / (_FLASH_RATE * facts.ceilings.matrix)
        + passes / (0.8 * facts.ceilings.bandwidth)
    )


def _prefill_share(facts: Facts) -> float:
    g, tokens = facts.model, facts.tokens
    square = 2.0 * g.num_heads * g.head_dim * tokens * (tokens + 1) * g.num_layers
    layers = sum(2.0 * each.outputs * each.inputs * each.count for each in bounds.products(g)[:-1])
    return (layers * tokens + square) / facts.ceilings.matrix / _prefill_s(facts)


def _mixed_ms(facts: Facts) -> float:
    host = 11 * facts.model.num_layers * _LAUNCH_S
    decode = Facts(facts.ceilings, facts.model, facts.dtype, facts.rows, facts.context)
    attention = bounds.attention_s(facts.model, facts.dtype, facts.rows, facts.context, facts.ceilings) / _KV_SHORT
    products = bounds.products_s(facts.model, facts.dtype, facts.rows + facts.tokens, facts.rows + 1, facts.ceilings)
    return 1e3 * (max(host, products / _PRODUCT_RATE + attention + 2 * _kernels_s(decode)) + _AROUND_S)


def _mixed_recorded_ms(facts: Facts) -> float:
    """`rows` and `tokens` are the class's: its padding is computed as well."""
    g, ceilings = facts.model, facts.ceilings
    slower = Ceilings(0, _PRODUCT_BYTES * ceilings.bandwidth, _PRODUCT_RATE * ceilings.matrix)
    products = bounds.products_s(g, facts.dtype, facts.rows + facts.tokens, facts.rows, slower)
    decode = bounds.attention_s(g, facts.dtype, facts.rows, facts.context, ceilings) / _KV_SHORT
    square = 2.0 * g.num_heads * g.head_dim * facts.tokens * (facts.tokens + 1) * g.num_layers
    kernels = (_MIXED_KERNELS_A_LAYER * g.num_layers + 8) * _RAMP_S
    return 1e3 * (products + decode + square / (_PAGED_RATE * ceilings.matrix) + kernels + _AROUND_S)


def _sampler_ms(facts: Facts) -> float:
    """One program a row, one at a time on a multiprocessor; not faster than the logits come from memory once."""
    rounds, vocabulary = -(-facts.rows // _MULTIPROCESSORS), facts.model.vocab_size
    computed_s = rounds * vocabulary * facts.instructions / _SM_INSTRUCTIONS_S
    read_s = 4.0 * facts.rows * vocabulary / facts.ceilings.bandwidth
    return 1e3 * (max(computed_s, read_s) + facts.penalised * _EDITS_S + 4 * _RAMP_S + 2e-5)


def _pipeline_tokens_per_s(facts: Facts) -> float:
    """`context` prompt and `tokens` output tokens of `rows` users."""
    decode = Facts(facts.ceilings, facts.model, facts.dtype, facts.rows, facts.context + facts.tokens // 2)
    prompt = Facts(facts.ceilings, facts.model, facts.dtype, tokens=facts.context)
    whole_s = facts.tokens * (_recorded_s(decode) + _AROUND_S) + facts.rows * _prefill_s(prompt)
    return facts.rows * facts.tokens / whole_s


def _transfer_share(facts: Facts) -> float:
    copy_s = 2 * facts.moved_bytes / facts.ceilings.copy
    return copy_s / (copy_s + _RENDEZVOUS_S * max(1.0, facts.messages / _RUNS_AT_ONCE) / 1.5)


@dataclass(frozen=True, slots=True)
class Line:
    words: str
    of: Callable[[Facts], float]


TABLE: dict[str, Line] = {
    "read of copy": Line("reading alone saves the bus turns of writing: 5 % over a copy", lambda f: 1.05),
    "attention, long": Line(
        f"two tiles under way per program and two programs per multiprocessor: {_KV_LONG:.0%} of the bandwidth from "
        "8,192 keys a row",
        lambda f: _KV_LONG,
    ),
    "attention, short": Line(
        f"start, end and merge weigh more below 8,192 keys a row: {_KV_SHORT:.0%} of the bandwidth", lambda f: _KV_SHORT
    ),
    "attention, FP8": Line(
        f"half of the bytes, but each becomes a number in about {_FP8_OPERATIONS} integer operations, of which a "
        f"multiprocessor issues {_SM_INTEGERS} a cycle at 1.785 GHz: the smaller of that rate and {_KV_SHORT:.0%} of "
        "the bandwidth; a guess",
        _fp8_share,
    ),
    "attention, sinks": Line("a load and an exponential a row more: no slower than without", lambda f: 1.0),
    "attention, caps": Line(
        "an exponential and a division a score more, hidden by waiting for keys: no slower than without", lambda f: 1.0
    ),
    "prefill, sinks": Line(f"{_PAGED_RATE:.0%} of the matrix rate, as without sinks", lambda f: _PAGED_RATE),
    "prefill, caps": Line(
        "three operations of the special unit a score instead of one, where one takes a third of the time: half of "
        f"{_PAGED_RATE:.0%} of the matrix rate; a guess",
        lambda f: 0.5 * _PAGED_RATE,
    ),
    "attention, directed": Line("the direction is known with the block: no slower than without", lambda f: 1.0),
    "attention, stride": Line(
        "a layer's share of a block is 64 KiB of 2 MiB: more pages are touched, at most 5 % slower", lambda f: 1.05
    ),
    "decode, recorded": Line(
        f"products at {_PRODUCT_BYTES:.0%} of the bandwidth or {_PRODUCT_RATE:.0%} of the matrix rate, keys and values "
        f"at 60 to 80 %, {_KERNELS_A_LAYER} kernels a layer with {_RAMP_S * 1e6:.1f} us of start and end each",
        lambda f: _recorded_s(f) / bounds.decode_s(f.model, f.dtype, f.rows, f.context, f.ceilings),
    ),
    "decode, whole": Line(
        f"the recorded step, and {_AROUND_S * 1e3:.2f} ms for copies, the graph's launch and waking up",
        lambda f: 1e3 * (_recorded_s(f) + _AROUND_S),
    ),
    "idle": Line(
        "the next step is launched before this one ends, so only the way from one graph to the next is idle: 1 %; "
        "about 10 % where each step is planned only after the one before",
        lambda f: 0.01,
    ),
    "gap, completed": Line(
        "as measured on two processor cores, 0.8 us a row: a token is appended, ends are looked for",
        lambda f: 0.008 + 0.00076 * f.rows,
    ),
    "gap, plan": Line(
        "as measured on two processor cores, 0.6 us a row where it is decided: budgets and blocks",
        lambda f: 0.01 + 0.0006 * f.rows,
    ),
    "gap, build": Line(
        "as measured on two processor cores, 0.13 us a row: block tables stand, only new entries are written",
        lambda f: 0.023 + 0.00013 * f.rows,
    ),
    "gap, hop": Line("a thread is woken, and takes the interpreter's lock", lambda f: 0.08),
    "gap, launch": Line("buffers filled, two copies, one graph, one copy out, one event", lambda f: 0.25),
    "gap, wake": Line("the driver wakes a sleeping thread", lambda f: 0.08),
    "gap, back": Line("the event loop is woken by the engine's thread", lambda f: 0.13),
    "ahead": Line(
        "no row ends, none comes and no block lacks while these steps are counted: each begins behind another",
        lambda f: 1.0,
    ),
    "ahead, chunks": Line(
        "this scheduler sizes chunks of prompts by times that it learns from the step before, so each is decided after "
        "it; where counts size them (continuous batching) all but the first and the last begin ahead",
        lambda f: 0.0,
    ),
    "sampler": Line(
        f"the assembler's instructions per logit (docs/benchmarks-gpu-kernels.md) at 60 % of the issue rate, one row "
        f"at a time on each of {_MULTIPROCESSORS} multiprocessors; or the logits read once, if that takes longer; the "
        f"tables' copy and launch; {_EDITS_S * 1e6:.0f} us where penalties are put in place",
        _sampler_ms,
    ),
    "product": Line(
        f"at {_PRODUCT_BYTES:.0%} of the larger bound, and {_RAMP_S * 1e6:.1f} us of start and end",
        lambda f: 1 / _PRODUCT_BYTES,
    ),
    "coded product": Line(f"at {_CODED_BYTES:.0%} of the larger bound: a guess", lambda f: 1 / _CODED_BYTES),
    "coded experts": Line(
        f"both products at {_CODED_BYTES:.0%} of the larger bound; sorting and the activation are four launches: a "
        "guess",
        lambda f: 1 / _CODED_BYTES,
    ),
    "mixed": Line(
        f"the longer of eleven launches a layer of {_LAUNCH_S * 1e6:.0f} us and the device's work", _mixed_ms
    ),
    "mixed, recorded": Line(
        f"the class's tokens and rows, padding included: products as in a recorded decode step, keys and values of "
        f"decode rows at {_KV_SHORT:.0%} of the bandwidth, prompts over the paged cache at {_PAGED_RATE:.0%} of the "
        f"matrix rate, {_MIXED_KERNELS_A_LAYER} kernels a layer with {_RAMP_S * 1e6:.1f} us of start and end each, and "
        f"{_AROUND_S * 1e3:.2f} ms around; no launches of the host's",
        _mixed_recorded_ms,
    ),
    "prefill": Line(
        f"products at {_PRODUCT_RATE:.0%} and attention at {_FLASH_RATE:.0%} of the matrix rate (FlashAttention-2), "
        "elementwise passes at 80 % of the bandwidth",
        _prefill_share,
    ),
    "transfer": Line(
        f"the copy, and {_RENDEZVOUS_S * 1e3:.1f} ms a rendezvous, {_RUNS_AT_ONCE} of which overlap", _transfer_share
    ),
    "pipeline": Line(
        "all users decode in one step and prompts take turns: output tokens over the steps' and the prompts' time",
        _pipeline_tokens_per_s,
    ),
    "compilations": Line("all variants are compiled before the worker is ready", lambda f: 0.0),
}


def expect(line: str, facts: Facts) -> Prediction:
    """The prediction of a line of `TABLE` under these circumstances."""
    return Prediction(TABLE[line].of(facts), f"{line}: {TABLE[line].words}")
