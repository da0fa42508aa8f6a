"""Settings of mechanisms: values that measurements and tests change, and that no operator could choose.

A record for each mechanism holds the options of its section, where it has one, and its settings, which only
`experiment` of the configuration changes: `--set experiment.bros.drops=false`. Builders of policies read their record;
machines, engine and simulator those of `engine` and `transfer`. Details: docs/papers/NAME.md, docs/cohort.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from cohort.common.config import Config, policies
from cohort.common.config.kinds import Fraction, NotNegative, NotNegativeReal, Positive, Seconds, Section
from cohort.common.config.reading import meant, readable
from cohort.common.errors import ConfigError

Record = TypeVar("Record", bound=Section)


class AlignedServeSettings(policies.AlignedServeConfig, frozen=True):
    least_requests: NotNegative = 0  # R_min: a smaller batch is widened; 0 = from engine.max_rows (36 of 256)
    leaf_tokens: Positive = 64  # width of a leaf of the quad-tree
    prefetch: bool = True  # bring the next batch to the prefill device ahead; false = from the host when it is bound
    aligned: bool = True  # false = first come, first served out of the same pool
    fill_memory: bool = True  # matching requests join while memory lasts; false = up to B_max: shorter iterations


class BaselinesSettings(policies.BaselinesConfig, frozen=True):
    prediction_padding: NotNegativeReal = 0.15  # allocation predicted: share added to the predicted output
    queue_starvation_s: Seconds = 60.0  # mlfq: a request that got nothing for so long moves to the first queue
    # readings of the compared systems that their papers leave open
    rectangular_kv: bool = False  # predicted_batches: memory of a batch is rows times longest prompt and output
    static_batches: bool = False  # predicted_batches: ended rows compute on until the batch ends; simulated time only
    headroom: bool = True  # vllm, chunked_prefill: newcomers leave blocks free; false = they may take the last one
    # placements of other routers (common/policies/routers), by their documented defaults
    balance_abs: NotNegative = 64  # longest_match: requests by which loads may differ before the fewest decide
    overlap_weight: NotNegativeReal = 1.0  # block_cost: of prompt blocks to compute beside blocks in use
    queue_weight: NotNegativeReal = 2.0  # weighted_scores: of a short queue
    kv_weight: NotNegativeReal = 2.0  # weighted_scores: of free blocks


class BrosSettings(policies.BrosConfig, frozen=True):
    group_tokens: Positive = 1  # tokens after the first that share one deadline, of as many TPOT targets (R15)
    first_batch: Positive = 32  # requests in an iteration at the start and after a deadline cut one short (R6)
    batch_step: Positive = 8  # requests more after every iteration that no deadline cut short (R6)
    cut_prompts: bool = True  # prompts are computed in chunks that deadlines leave time for; false = whole if on time
    drops: bool = True  # who finds no block takes those of others (R11); false = it is computed again itself


class BucketServeSettings(policies.BucketServeConfig, frozen=True):
    max_batch: Positive = 256  # requests in one batch at most, whatever memory allows
    output_estimate: Literal["mean", "p50", "p90", "p99", "max"] = "mean"  # of the prediction, in a request's memory
    priority_step_s: Seconds = 10.0  # seconds of waiting that one level of priority is worth
    activation_bytes: NotNegative = 65_536  # device memory beside the KV cache per token of a forward; 0 = not bounded
    max_buckets: Positive = 64  # buckets at most; 1 = no bucketing


class CohortSettings(policies.CohortConfig, frozen=True):
    ordered: bool = True  # prompts in the order that keeps most SLOs; false = first come, first served
    bounded: bool = True  # prompts as the strictest TPOT leaves time; false = engine.prefill_chunk tokens an iteration
    victims: Literal["slack", "youngest"] = "slack"  # without blocks: missed first, then most slack; or the youngest
    yielding: bool = True  # best-effort work gives blocks, rows and time to real-time work; false = blocks, to decodes
    stretched: bool = True  # an iteration may last as long as mean TPOTs allow; false = the strictest TPOT each time


class DynaServeSettings(policies.DynaServeConfig, frozen=True):
    headroom: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05  # share of the bound that iterations leave free
    search_tolerance: Fraction = 0.05  # the two ends may differ by this share; a split must gain more than it
    margin_tokens: NotNegative = 20  # added to every predicted length
    kv_transfer_s: NotNegativeReal = 0.005  # a split must bring the end forward by more than this
    least_segment: Positive = 32  # tokens; a shorter segment is not worth a KV transfer
    least_prefill: Positive = 16  # prompt tokens in every iteration that prompts wait for, whatever decodes take
    balance: Literal["work", "end"] = "work"  # what the search balances: seconds of work there, or predicted ends
    whole_where_idle: bool = True  # a request stays whole while an instance is idle; false = it may be split (Alg. 1)
    await_arrivals: bool = True  # of a split's gain only what no next request would fill counts; false = all (Alg. 1)


class EcoServeSettings(policies.EcoServeConfig, frozen=True):
    reserve: Fraction = 0.03  # share of the cache that answers leave to prompts and to answers beyond their prediction
    waiting_share: Fraction = 0.1  # share of the cache that answers may hold which wait to run, before prompts wait
    group_tokens: Positive = 8  # predicted lengths are rounded up to this; equal ones form a group
    buffer: NotNegativeReal = 0.15  # a borrower must be done by its predicted length and this share more
    patience_s: NotNegativeReal = 30.0  # a request that is overdue by more is not overtaken
    decoupled: bool = True  # prompts and answers are admitted apart; false = a prompt takes its answer's KV with it
    synced: bool = True  # the batch of answers is formed when a group ends; false = in every iteration
    ordered: bool = True  # by deadline, KV held and length; false = first come, first served
    pipelined: bool = True  # KV that is allocated and unused is lent
    tune_padding: bool = True  # padding follows what answers turn out to need; false = it stays as given


class EngineSettings(Section, frozen=True):
    plan_ahead: bool = True  # a decode step is planned and begun behind the one that runs, where its rows are certain
    decision_s: NotNegativeReal = 0.0  # simulated: what an iteration waits for its decision, unless it was run ahead,
    decision_row_s: NotNegativeReal = 0.0  # and for each of its rows; measured by `cohort bench decisions iteration`


class TransferSettings(Section, frozen=True):
    chunked: bool = True  # push the blocks of a chunk while the next one computes; false = all when the segment is done


class PlannerPace(Section, frozen=True):
    """docs/guide/planner.md"""

    interval_s: Seconds = 30.0  # least time between two rounds of simulations
    window_s: Seconds = 180.0  # of traffic that is replayed; at least settle_s
    max_requests: Positive = 400  # of it, the latest
    confirmations: Positive = 2  # rounds in succession that want fewer devices, or other roles; of more devices one


KINDS: Mapping[str, type[Section]] = {
    "alignedserve": AlignedServeSettings,
    "baselines": BaselinesSettings,
    "bros": BrosSettings,
    "bucketserve": BucketServeSettings,
    "cohort": CohortSettings,
    "dynaserve": DynaServeSettings,
    "ecoserve": EcoServeSettings,
    "engine": EngineSettings,
    "planner": PlannerPace,
    "transfer": TransferSettings,
}
"""Records by the mechanism's name, below `experiment`."""


def names(mechanism: str) -> tuple[str, ...]:
    """Return a mechanism's settings, without its options."""
    options = getattr(Config(), mechanism).__struct_fields__
    return tuple(name for name in KINDS[mechanism].__struct_fields__ if name not in options)


def settings_of(config: Config, kind: type[Record]) -> Record:
    """Return the options and settings of a mechanism. Raises `ConfigError` that names what is wrong."""
    mechanism = next(name for name, known in KINDS.items() if known is kind)
    section = getattr(config, mechanism)
    options = msgspec.to_builtins(section) if issubclass(kind, type(section)) else {}
    given = config.experiment.get(mechanism, {})
    for name in given:
        if name in section.__struct_fields__:
            raise ConfigError(f"experiment.{mechanism}.{name}: it is an option: {mechanism}.{name}")
        if name not in kind.__struct_fields__:
            raise ConfigError(f"unknown setting 'experiment.{mechanism}.{name}'{meant(name, names(mechanism))}")
    try:
        return msgspec.convert({**options, **given}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"experiment.{mechanism}.{readable(str(error))}") from error


def check(config: Config) -> None:
    """Raise `ConfigError` for a mechanism or a setting of `experiment` that does not exist, or of another type."""
    for mechanism in config.experiment:
        if mechanism not in KINDS:
            raise ConfigError(f"unknown mechanism 'experiment.{mechanism}'{meant(mechanism, KINDS)}")
        settings_of(config, KINDS[mechanism])


def placed(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides for `load_config` of sections in which settings stand beside options, each where it belongs."""
    found, experiment = dict(overrides), dict(overrides.get("experiment", {}))
    for mechanism in KINDS.keys() & found.keys():
        settings = names(mechanism)
        given = found[mechanism].items()
        found[mechanism] = {name: value for name, value in given if name not in settings}
        moved = {name: value for name, value in given if name in settings}
        experiment[mechanism] = {**experiment.get(mechanism, {}), **moved}
    return {**found, "experiment": experiment}
