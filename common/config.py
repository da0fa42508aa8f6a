"""Configuration: frozen, typed, read once at start, every key checked.

Layers, later over earlier: built-in defaults (this file; `configs/default.yaml` shows all of them), a preset from
`configs/presets/`, the user's `--config` files, command-line options. Unknown or wrong keys are a `ConfigError` that
names file, key and what would be right. Whoever starts a pipeline writes the merged result to one file that all its
processes read, so that they cannot disagree.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from cohort.common.errors import ConfigError
from cohort.common.types import Role

Positive = Annotated[int, msgspec.Meta(gt=0)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
NotNegativeReal = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]

CONFIGS_DIR = Path(__file__).resolve().parent.parent / "configs"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ModelConfig(_Section, frozen=True):
    path: str = ""  # folder in Hugging Face format; "" = the default model made by the set-up
    served_name: str = ""  # name clients use; "" = the folder's name
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: NotNegative = 0  # tokens, prompt + output; 0 = what the model says
    weights: Literal["files", "random"] = "files"  # random = drawn, to measure a shape without having its weights


class GatewayConfig(_Section, frozen=True):
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    api_keys: tuple[str, ...] = ()  # accepted bearer tokens; empty = open. `env:NAME` reads an environment variable
    max_waiting_requests: Positive = 4096  # not yet placed; beyond: 429
    max_waiting_tokens: Positive = 4_000_000  # prompt + predicted output of those
    max_n: Positive = 128  # choices per request
    max_body_bytes: Positive = 33_554_432
    predictor_wait_s: Seconds = 0.005  # the longest a request waits for its prediction
    default_prediction_tokens: Positive = 256  # mean when the predictor is silent
    default_max_tokens: NotNegative = 0  # chat completions without max_tokens; 0 = what the context leaves
    default_class: Literal["rt", "be"] = "rt"
    rt_ttft_slo_s: Seconds = 2.0  # promised when a real-time request names none
    rt_tpot_slo_s: Seconds = 0.2
    request_timeout_s: Seconds = 3600.0  # the longest a request may live, queueing included
    stall_timeout_s: Seconds = 600.0  # placed but no token for so long: resubmitted
    max_attempts: Positive = 8  # placements before a request fails with 503
    write_timeout_s: Seconds = 60.0  # a client that takes nothing of its stream for so long is given up
    drain_s: Seconds = 30.0  # on SIGTERM: the longest to wait for running requests


class BatchConfig(_Section, frozen=True):
    """Files and batch jobs of the gateway (/v1/files, /v1/batches), kept on its disk."""

    folder: str = ""  # database and files, for one gateway alone; "" = one per gateway port inside the cache folder
    concurrency: Positive = 128  # lines of all batches in work at once
    busy_concurrency: Positive = 1  # no further line starts beyond this while an online request waits for a worker
    max_file_bytes: Positive = 209_715_200  # one uploaded file; beyond: 413
    max_lines: Positive = 50_000  # requests in one batch; beyond: the batch fails
    max_unfinished: Positive = 256  # batches not ended; beyond: 429
    storage_bytes: Positive = 21_474_836_480  # all files together; beyond: no uploads (413)
    retention_s: Seconds = 2_592_000.0  # files and ended batches are deleted after so long
    upload_idle_s: Seconds = 60.0  # an upload that sends nothing for so long is given up


class PredictorConfig(_Section, frozen=True):
    state_path: str = ""  # where the learned state persists; "" = inside the cache folder
    buffer_size: Positive = 20_000  # finished requests kept for training
    retrain_every: Positive = 64  # finished requests between trainings
    min_observations: Positive = 32  # below: the default prediction
    save_every_s: Seconds = 30.0
    refine_after_prefill: bool = False  # workers send the prompt's last hidden state for a second, better prediction


class ManagerConfig(_Section, frozen=True):
    report_timeout_s: Seconds = 3.0  # no report for so long: the worker is dead, its requests are displaced
    settle_s: Seconds = 2.0  # after a restart, until requests that no worker holds are displaced
    load_interval_s: Seconds = 0.2  # between two ClusterLoad messages
    dispatch_ahead_tokens: Positive = 8192  # prefill tokens sent ahead to a worker; the rest waits here
    max_waiting_requests: Positive = 100_000


class MonitorConfig(_Section, frozen=True):
    heartbeat_s: Seconds = 0.5
    silence_s: Seconds = 3.0  # no heartbeat for so long: reported as down
    push_interval_s: Seconds = 0.5  # figures pushed to the manager
    history_s: Seconds = 900.0  # what the live page can show
    host: str = "127.0.0.1"  # of the live page and the aggregated /metrics
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8001


class KvConfig(_Section, frozen=True):
    block_size: Literal[8, 16, 32, 64] = 16  # tokens per block
    memory_bytes: NotNegative = 0  # cache of one worker (a GPU: at most); 0 = what is free, or cpu_memory_bytes
    memory_fraction: Fraction = 0.9  # of a GPU's memory for weights, cache and steps together (B3 keeps 10 %)
    cpu_memory_bytes: Positive = 536_870_912  # cache of one CPU worker when memory_bytes is 0
    host_memory_bytes: NotNegative = 268_435_456  # host pool for swapped KV
    prefix_caching: bool = True


class TransferConfig(_Section, frozen=True):
    links: tuple[Literal["ucx", "zmq"], ...] = ("ucx", "zmq")  # best first; one not installed is skipped with a warning
    checksum: Literal["off", "crc32"] = "crc32"  # of the bytes of every run, compared on arrival
    offer_timeout_s: Seconds = 30.0  # the longest a sender waits for blocks at the receiver
    stall_timeout_s: Seconds = 5.0  # caches that wait for each other's blocks this long give a hand-over back
    run_timeout_s: Seconds = 5.0  # the longest one run may take on the link
    chunked: bool = True  # push the blocks of a chunk while the next one computes; false = all when the segment is done
    lease_s: Seconds = 5.0  # a receiver frees granted blocks that nobody renewed for so long


class EngineConfig(_Section, frozen=True):
    device: str = "auto"  # cpu, cuda, cuda:1 …
    threads: NotNegative = 0  # CPU threads of one worker; 0 = cores divided by workers, at least 2
    max_rows: Positive = 256  # requests in one iteration
    max_step_tokens: Positive = 2048  # tokens in one iteration, prefill and decode together
    prefill_chunk: Positive = 512  # prompt tokens of one request in one iteration
    preemption: Literal["swap", "recompute"] = "recompute"
    cuda_graph_memory_bytes: NotNegative = 2_147_483_648  # GPU memory for recorded decode steps; 0 = none is recorded
    workers_per_gpu: NotNegative = 0  # that share a GPU's memory; 0 = this configuration's workers over the GPUs seen
    report_interval_s: Seconds = 0.2
    drain_s: Seconds = 30.0
    state_dir: str = ""  # folder where what schedulers learn of this machine is kept; "" = inside the cache folder
    record_dir: str = ""  # folder for a recording of everything a worker decides, to replay it; "" = none


class PolicyConfig(_Section, frozen=True):
    """One policy per seat; `common/policies/compose.py` knows the names."""

    admission: str = "bounded"
    placement: str = "disaggregated"
    prefill_order: str = "fcfs"
    iteration: str = "continuous_batching"
    allocation: str = "paged"
    waiting_kv: str = "none"


class BucketServeConfig(_Section, frozen=True):
    """Buckets and safe batches of `policies.prefill_order: buckets` (docs/papers.md, B1-B11)."""

    memory_reserve: Fraction = 0.1  # share of the remaining KV memory that no batch may be promised
    max_batch: Positive = 256  # requests in one batch at most, whatever memory allows
    split_share: Fraction = 0.5  # a crowded bucket splits when more than this share is below its midpoint
    max_buckets: Positive = 64  # buckets at most
    splitter: Literal["bisection", "optimal"] = "bisection"  # of a crowded bucket: halves, or least expected waste
    fill: Literal["oldest", "sjf", "ljf"] = "sjf"  # offline batches after their first: oldest, shortest, longest
    output_estimate: Literal["mean", "p50", "p90", "p99", "max"] = "mean"  # of the prediction, in a request's memory
    padding: Literal["none", "longest"] = "none"  # of prefill batches; longest needs policies.iteration: padded_prefill
    priority_step_s: Seconds = 10.0  # seconds of waiting that one level of priority is worth
    offline_delay_s: Seconds = 60.0  # seconds an offline request lets online ones pass before it counts like them
    demand_horizon_s: Seconds = 1.0  # offline batches leave room for the online requests forecast for so long
    forecast_max_age_s: Seconds = 3.0  # the monitor's older figures are not used
    figures_max_age_s: Seconds = 1.0  # a worker whose last report is older gets no batch
    staging_share: Fraction = 1.0  # of the prefill workers' caches, for computed prompts that wait for a decode worker
    activation_bytes: NotNegative = 65_536  # device memory beside the KV cache per token of a forward; 0 = not bounded


class DynaServeConfig(_Section, frozen=True):
    """`policies.placement: split` and `policies.iteration: slo_batching` (docs/papers.md, D1-D9)."""

    tbt_slo_s: Seconds = 0.1  # between two tokens, for requests without a promise of their own
    headroom: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05  # share of that bound that iterations leave free
    search_probes: Positive = 6  # K: split points tried for a request
    search_tolerance: Fraction = 0.05  # the two ends may differ by this share; a split must gain more than it
    balance: Literal["work", "end"] = "work"  # what the search balances: seconds of work there, or predicted ends
    margin_tokens: NotNegative = 20  # added to every predicted length
    hand_over_s: NotNegativeReal = 0.005  # a split must bring the end forward by more than this
    await_arrivals: bool = True  # of a split's gain only what no next request would fill counts; false = all (Alg. 1)
    least_segment: Positive = 32  # tokens; a shorter segment is not worth a hand-over
    least_prefill: Positive = 16  # prompt tokens in every iteration that prompts wait for, whatever decodes take
    profile: str = ""  # file of `cohort profile` that a worker without learned times starts from; "" = none


class AlignedServeConfig(_Section, frozen=True):
    """`policies.placement: late_bound`, `policies.waiting_kv: aligned` and `policies.iteration: aligned_batching`
    (docs/papers.md, A1-A10). The KV pool is the prefill workers' host memory: kv.host_memory_bytes."""

    batch_share: Fraction = 0.4  # B_max: a batch's KV as a share of a decode worker's blocks
    least_requests: NotNegative = 0  # R_min: a smaller batch is widened; 0 = from engine.max_rows (36 of 256)
    longest_prefix: Positive = 65_536  # tokens the quad-tree covers; longer prefixes count as this long
    leaf_tokens: Positive = 64  # width of a leaf of the quad-tree
    slack: Fraction = 0.25  # a prefix matches the running batch within this share beyond its shortest and longest
    buffer_share: Fraction = 0.4  # of a prefill worker's blocks, for the candidate batch and candidate requests
    starvation_s: Seconds = 10.0  # a request that waited so long in the pool goes first
    starvation_share: Fraction = 0.5  # or so much of the time that its TPOT promise gives its whole answer, if less
    prefetch: bool = True  # bring the next batch to the prefill device ahead; false = from the host when it is bound
    aligned: bool = True  # false = first come, first served out of the same pool
    fill_memory: bool = True  # matching requests join while there is room; false = up to B_max: shorter iterations


class BaselinesConfig(_Section, frozen=True):
    """Options of the baseline policies (docs/papers.md, Baselines); each says which policy reads it."""

    batch_size: Positive = 8  # orca, mlfq, srtf: requests in one iteration, as EcoServe §2.1 gives ORCA and FastServe
    target_forward_tokens: NotNegative = 0  # chunked_prefill, multires: tokens that fill the device; 0 = a full step
    prediction_padding: NotNegativeReal = 0.15  # allocation predicted: share added to the predicted output
    queue_levels: Positive = 5  # mlfq: feedback queues
    queue_quantum_s: NotNegativeReal = 0.0  # mlfq: quantum of the first queue, doubled from queue to queue; 0 = learned
    queue_starvation_s: Seconds = 60.0  # mlfq: who got nothing for so long moves to the first queue
    batch_spread: Annotated[float, msgspec.Meta(ge=1)] = 1.5  # predicted_batches: outputs within this factor
    padded: bool = False  # predicted_batches: prompts of an iteration are computed as long as the longest
    rectangular_kv: bool = False  # predicted_batches: memory of a batch is rows times longest prompt and answer


class BrosConfig(_Section, frozen=True):
    """Packing of `policies.iteration: slack_packing`, best with `policies.allocation: bidirectional` (docs/papers.md,
    R1-R15). Targets are the request's own (gateway.rt_ttft_slo_s, rt_tpot_slo_s when it names none)."""

    group_tokens: Positive = 1  # tokens after the first that share one deadline, of as many TPOT targets
    first_batch: Positive = 32  # requests in an iteration at the start and after a deadline cut one short
    batch_step: Positive = 8  # requests more after every iteration that no deadline cut short
    cut_prompts: bool = True  # late and best-effort prompts are computed in pieces that deadlines leave room for
    rt_starvation_s: Seconds = 5.0  # a real-time request that got nothing for so long goes first
    be_starvation_s: Seconds = 60.0  # likewise a best-effort one
    starving_every: Positive = 10  # at most one iteration in so many begins with who starves
    best_effort_share: Fraction = 0.2  # of cache and rows, that the oldest best-effort requests keep whatever waits
    profile: str = ""  # file of `cohort profile` that iteration costs are fitted to at the start; "" = learned online


class EcoServeConfig(_Section, frozen=True):
    """Groups of `policies.iteration: time_synced`, best with `policies.allocation: nested` (docs/papers.md, E1-E11)."""

    target_forward_tokens: NotNegative = 0  # tokens that fill the device, as `cohort profile` finds; 0 = a full step
    reserve: Fraction = 0.03  # share of the cache that answers leave to prompts and to whoever outlives its prediction
    waiting_share: Fraction = 0.1  # share of the cache that answers may hold which wait to run, before prompts wait
    padding: NotNegativeReal = 0.15  # share added to predicted lengths, at the start
    tune_padding: bool = True  # padding follows what answers turn out to need
    under_cost: NotNegativeReal = 3.0  # cost of an answer that stops too early, to one that was allocated too much
    group_tokens: Positive = 8  # predicted lengths are rounded up to this; equal ones form a group
    buffer: NotNegativeReal = 0.15  # a borrower must be done by its predicted length and this share more
    slo_scale: NotNegativeReal = 2.0  # deadline of who has no promise: this times the measured time of its tokens
    deadline_ranges_s: tuple[Seconds, ...] = (0.5, 2.0)  # bounds of the ranges of time left that waiting is ordered by
    overdue_range_s: Seconds = 2.0  # width of the ranges of deadlines that have passed
    occupied_range_tokens: Positive = 128  # width of the ranges of KV held while waiting
    patience_s: NotNegativeReal = 30.0  # nobody overtakes who is overdue by more
    decoupled: bool = True  # prompts and answers are admitted apart; false = a prompt takes its answer's KV with it
    synced: bool = True  # the batch of answers is formed when a group ends; false = in every iteration
    ordered: bool = True  # by deadline, KV held and length; false = first come, first served
    pipelined: bool = True  # KV that is allocated and unused is lent
    lending: Literal["halves", "forecast"] = "halves"  # the second half of one to one; or all of it to all, by forecast


class WorkerGroup(_Section, frozen=True):
    role: Role
    count: Positive = 1
    threads: NotNegative = 0  # overrides engine.threads


class EndpointsConfig(_Section, frozen=True):
    """Where the processes' inboxes are. "" = a Unix socket in the pipeline's run folder (one host).

    For several hosts or containers: tcp://HOST:PORT; a process binds the port on `bind_host`.
    """

    manager: str = ""
    predictor: str = ""
    monitor: str = ""
    gateway: str = ""
    worker: str = ""  # what a worker advertises; "tcp://HOST:0" picks a port
    bind_host: str = "127.0.0.1"


class SecurityConfig(_Section, frozen=True):
    """CURVE encryption of the control bus. Both files as written by `zmq.auth.create_certificates`."""

    curve_secret_key_file: str = ""  # "" = no encryption


class LoggingConfig(_Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal, else JSON


class MetricsConfig(_Section, frozen=True):
    host: str = "127.0.0.1"
    base_port: Annotated[int, msgspec.Meta(ge=0, le=65000)] = 8010  # predictor, manager, then one per worker; 0 = any


class Config(_Section, frozen=True):
    name: str = "cohort"  # of the preset, shown in /version and metrics
    model: ModelConfig = ModelConfig()
    workers: tuple[WorkerGroup, ...] = (WorkerGroup(Role.PREFILL), WorkerGroup(Role.DECODE))
    policies: PolicyConfig = PolicyConfig()
    bucketserve: BucketServeConfig = BucketServeConfig()
    dynaserve: DynaServeConfig = DynaServeConfig()
    alignedserve: AlignedServeConfig = AlignedServeConfig()
    baselines: BaselinesConfig = BaselinesConfig()
    ecoserve: EcoServeConfig = EcoServeConfig()
    bros: BrosConfig = BrosConfig()
    gateway: GatewayConfig = GatewayConfig()
    batch: BatchConfig = BatchConfig()
    predictor: PredictorConfig = PredictorConfig()
    manager: ManagerConfig = ManagerConfig()
    monitor: MonitorConfig = MonitorConfig()
    kv: KvConfig = KvConfig()
    transfer: TransferConfig = TransferConfig()
    engine: EngineConfig = EngineConfig()
    endpoints: EndpointsConfig = EndpointsConfig()
    security: SecurityConfig = SecurityConfig()
    logging: LoggingConfig = LoggingConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def instance_roles(self) -> dict[str, Role]:
        """Workers by instance id: prefill-0, decode-0, decode-1 …"""
        return {name: group.role for name, group in self._instances()}

    def worker_threads(self, instance: str, cores: int) -> int:
        """CPU threads of a worker: its group's, else the engine's, else `default_threads`."""
        group = dict(self._instances()).get(instance)
        return (group.threads if group else 0) or self.default_threads(cores)

    def default_threads(self, cores: int) -> int:
        """The engine's, else an equal share of the cores, but at least two where there are two: prefill and decode
        workers are seldom both busy (measured: docs/benchmarks.md)."""
        return self.engine.threads or max(min(2, cores), cores // max(1, len(self.instance_roles)))

    def _instances(self) -> list[tuple[str, WorkerGroup]]:
        counts: dict[Role, int] = {}
        named = []
        for group in self.workers:
            for _ in range(group.count):
                index = counts.get(group.role, 0)
                counts[group.role] = index + 1
                named.append((f"{group.role.value}-{index}", group))
        return named


def load_config(files: Sequence[Path] = (), *, preset: str = "", overrides: Mapping[str, Any] | None = None) -> Config:
    """Merge preset, files and overrides over the defaults and check every key.

    `overrides` is a nested mapping like a file's. Raises `ConfigError`.
    """
    merged: dict[str, Any] = {}
    if preset:
        path = CONFIGS_DIR / "presets" / f"{preset}.yaml"
        if not path.is_file():
            known = sorted(p.stem for p in (CONFIGS_DIR / "presets").glob("*.yaml"))
            raise ConfigError(f"no preset named {preset!r}; there are: {', '.join(known)}")
        _merge(merged, _read(path))
    for path in files:
        _merge(merged, _read(path))
    if overrides:
        _check(overrides, "command line")
        _merge(merged, overrides)
    return msgspec.convert(merged, Config)


def dump_config(config: Config) -> str:
    """YAML of the whole configuration, readable by `load_config`."""
    return str(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    _check(data, str(path))
    return data


def _check(data: Mapping[str, Any], origin: str) -> None:
    _check_keys(data, Config, origin, "")
    try:
        msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_readable(str(error))}") from error


def _readable(message: str) -> str:
    """msgspec writes "… - at `$.kv.block_size`"; put the key first."""
    text, at, where = message.partition(" - at `$")
    return f"{where.rstrip('`').lstrip('.')}: {text}" if at else message


def _check_keys(data: Any, struct: type[msgspec.Struct], origin: str, prefix: str) -> None:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{origin}: {prefix or 'top level'} must be a mapping, found {type(data).__name__}")
    hints = typing.get_type_hints(struct)
    for key, value in data.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(hints)}"
            raise ConfigError(f"{origin}: unknown option {name!r}; {hint}")
        target = hints[key]
        if isinstance(target, type) and issubclass(target, msgspec.Struct):
            _check_keys(value, target, origin, name)
        elif typing.get_origin(target) is tuple and isinstance(value, list | tuple):
            element = typing.get_args(target)[0]
            if isinstance(element, type) and issubclass(element, msgspec.Struct):
                for index, item in enumerate(value):
                    _check_keys(item, element, origin, f"{name}[{index}]")


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Mappings merge key by key; lists and scalars replace."""
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value
