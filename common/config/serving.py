"""Sections of the other serving processes: model, manager, monitor, engine, KV and what connects them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from cohort.common.config.kinds import Fraction, NotNegative, Port, Positive, Seconds, Section
from cohort.common.types import Role


class ModelConfig(Section, frozen=True):
    # folder in Hugging Face format, GGUF file, or id of a model in Hugging Face's cache: org/name, org/name:FILE.gguf;
    # "" = the default model made by the set-up
    path: str = ""
    revision: str = ""  # of a model that is named by its id: branch, tag or commit; "" = main
    served_name: str = ""  # name clients use; "" = the id, or the folder's name
    # of weights and KV; auto = bfloat16 where the device computes it fast, else float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # auto, none, fp8, compressed-tensors, awq, gptq: what config.json must say; int8, int4: plain ones rounded at load
    quantization: str = "auto"
    max_model_len: NotNegative = 0  # tokens, prompt + output; 0 = what the model says
    # of requests that name none (temperature, top_p …): as the model's generation_config.json says, else its authors;
    # neutral = OpenAI's
    sampling_defaults: Literal["model", "neutral"] = "model"
    # form of reasoning and of calls of tools: auto = by the chat template's marks; or a family of docs/guide/api.md
    tool_format: str = "auto"
    weights: Literal["files", "random"] = "files"  # random = drawn, to measure a shape without having its weights
    # LoRA adapters beside it, {name: folder} in PEFT format; a request's `model` selects one (docs/guide/lora.md)
    lora: dict[str, str] = msgspec.field(default_factory=dict)


class PredictorConfig(Section, frozen=True):
    learns: bool = True  # false = it never trains: what was learned before, else the default prediction, for all


class ManagerConfig(Section, frozen=True):
    report_timeout_s: Seconds = 3.0  # no report for so long: the worker is dead, its requests are rescheduled
    load_interval_s: Seconds = 0.2  # between two ClusterLoad messages
    dispatch_ahead_tokens: Positive = 8192  # prefill tokens sent ahead to a worker; the rest waits here
    # managers beside the one that leads, which take over when it dies; 0 = it is started anew instead
    standbys: Annotated[int, msgspec.Meta(ge=0, le=7)] = 0


class MonitorConfig(Section, frozen=True):
    host: str = "127.0.0.1"  # of the live page and the aggregated /metrics
    port: Port = 8001  # port of both; 0 = any free one, chosen by the launcher
    allowed_hosts: tuple[str, ...] = ()  # as gateway.allowed_hosts, of the live page


class PlannerConfig(Section, frozen=True):
    """The monitor replays the last minutes of traffic on other shapes of this pipeline: how many workers, of which role
    and degree. docs/guide/planner.md."""

    # off; advise: decide and tell; act: add, drain and change the roles of workers, where something takes such orders:
    # `cohort serve` on one machine or on Ray, Kubernetes with the component `planner`
    mode: Literal["off", "advise", "act"] = "off"
    cpu_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.02  # of one core, on average, for simulations
    # that workers share which compute on processors; 0 = those of the monitor's machine, on Ray of all nodes
    cores: NotNegative = 0
    settle_s: Seconds = 120.0  # after a change: no other one, but more devices behind more; then it is judged
    min_workers: Positive = 1  # kept in any case
    max_workers: NotNegative = 0  # 0 = as many as are configured; to act on Kubernetes it has to be said
    # unified workers, or prefill workers beside decode workers
    shapes: tuple[Literal["colocated", "split"], ...] = ("colocated", "split")
    # what a device must earn: share of the requests served in time
    worker_cost: Fraction = 0.03
    start_timeout_s: Seconds = 300.0  # the longest a worker that is added may take to be ready


class KvConfig(Section, frozen=True):
    block_size: Literal[8, 16, 32, 64] = 16  # tokens per block
    # of keys and values: auto = the model's; fp8 (fp8_e4m3) = E4M3 with a scale of each token and head
    cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    memory_bytes: NotNegative = 0  # cache of one worker (a GPU: at most); 0 = what is free, on a processor 512 MiB
    memory_fraction: Fraction = 0.9  # of a GPU's memory for weights, cache and steps together
    host_memory_bytes: NotNegative = 268_435_456  # host pool for swapped KV; a GPU's worker: by the RAM, up to 64 GiB
    prefix_caching: bool = True  # keep KV of finished prompts and reuse it where a new prompt begins alike
    # with several API keys: one key's prompts may begin with what another's computed, and so learn what that one sent
    share_prefixes_between_keys: bool = False

    @property
    def cpu_bytes(self) -> int:
        """The cache of a worker on a processor."""
        return self.memory_bytes or 512 << 20


class UcxConfig(Section, frozen=True):
    """Transports and devices of UCX (docs/guide/links.md); lists as in UCX_TLS and UCX_NET_DEVICES, which these go
    before. An item that is not on the machine is an error at start."""

    tls: str = ""  # transports: "tcp", "rc,sm,self", "^tcp" (all but) …; "" = the environment's UCX_TLS, or all
    # "mlx5_0:1", "eth0,eth1", "^lo" …; "" = the environment's UCX_NET_DEVICES, or all; loopback while none is needed
    net_devices: str = ""


class TransferConfig(Section, frozen=True):
    """Links that move KV between workers; none is opened where the placement never moves any.

    ucx is fastest and knows neither encryption nor keys. While all endpoints are on this machine it uses shared memory
    and the loopback interface alone (UCX_NET_DEVICES in the environment wins); with endpoints beyond, it listens on
    every interface; with a CURVE key it is left out unless `plain_links_allowed`.
    """

    # best first; one not installed is skipped with a warning
    links: tuple[Literal["ucx", "zmq"], ...] = ("ucx", "zmq")
    plain_links_allowed: bool = False  # with a CURVE key: KV may also take links that do not encrypt it (ucx)
    run_timeout_s: Seconds = 5.0  # the longest one run may take on the link
    ucx: UcxConfig = UcxConfig()


class EngineConfig(Section, frozen=True):
    device: str = "auto"  # cpu, cuda, cuda:1 …; auto = cuda where there is a GPU, which then has to be usable
    threads: NotNegative = 0  # CPU threads of one worker; 0 = cores divided by workers, at least 2
    max_rows: Positive = 256  # requests in one iteration; a GPU: by its memory
    max_step_tokens: Positive = 2048  # tokens in one iteration, prefill and decode together; a GPU: by its memory
    # tokens that fill the device (`cohort profile` prints them); 0 = a full step, with time_synced as it learns
    target_forward_tokens: NotNegative = 0
    # tokens of an iteration that decodes, half or more for prompts; slack_packing, padded_prefill: of one prompt in it
    prefill_chunk: Positive = 512
    preemption: Literal["swap", "recompute"] = "recompute"  # of a preempted request's KV: to host memory, or again
    # a position gets the same bits in every batch, as prompt, drafted or decode row, on a GPU too, where it costs time;
    # on a CPU it does anyway. Refused at start where it cannot be (docs/adr/0014-bits-of-a-position.md)
    batch_invariant: bool = False
    # GPU memory for recorded steps, of each rank of a worker; 0 = none is recorded; by the GPU's memory
    cuda_graph_memory_bytes: NotNegative = 2_147_483_648
    workers_per_gpu: NotNegative = 0  # that share a GPU's memory; 0 = this configuration's workers over its GPUs
    gpus: NotNegative = 0  # GPUs that the workers of this host are divided over; 0 = all that are visible
    # folder in which the workers of a host claim GPUs, the same for all of them; "" = inside the cache folder
    claim_dir: str = ""
    claim_wait_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 10.0  # the longest a worker waits for a GPU's share
    max_loras: Positive = 8  # LoRA adapters that a worker holds at once; the one not used for longest goes first
    # workers: hosts: the longest that rank 0 and the ranks of other hosts wait for each other
    rank_join_s: Seconds = 300.0
    # name of the network interface over which such ranks exchange; "" = the one with endpoints.worker's address
    rank_interface: str = ""
    # slo_batching, slack_packing: file of `cohort profile` that a worker without learned times starts from; "" = none
    profile: str = ""


class WorkerGroup(Section, frozen=True):
    role: Role  # prefill, decode, unified
    count: NotNegative = 1  # workers of this group; 0 = as many as the GPUs want
    threads: NotNegative = 0  # overrides engine.threads; of all its ranks together
    # devices (on a CPU: processes) that compute as one worker, each with a share of the model and of the KV: what the
    # model's heads divide by; auto = the fewest GPUs that hold it, on a CPU 1
    tensor_parallel: Literal["auto"] | Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    # machines over which the ranks of one worker are spread, as many on each: the worker's own process is rank 0, the
    # others run `rank_host` and dial endpoints.ranks (docs/models.md)
    hosts: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1

    def __post_init__(self) -> None:
        if self.hosts > 1 and (self.tensor_parallel == "auto" or self.tensor_parallel % self.hosts):
            raise ValueError(
                f"hosts: {self.hosts}: tensor_parallel is {self.tensor_parallel}; write a number that divides by hosts"
            )

    @property
    def local_degree(self) -> int:
        """Ranks on each host."""
        return self.degree // self.hosts

    @property
    def degree(self) -> int:
        """`auto` counts as 1 until it is settled (`common/devices/degrees.py`)."""
        return 1 if self.tensor_parallel == "auto" else self.tensor_parallel


class SpeculationConfig(Section, frozen=True):
    """Several tokens of a decode row in one iteration: expected tokens are computed along and kept where they are what
    the model gives, so that answers stay the same (docs/guide/speculation.md)."""

    # lookup = what followed the last tokens where they stood before, in prompt or answer; model = that, and what a
    # smaller model expects; auto = lookup on a processor, off on a GPU, where it has not been measured yet
    mode: Literal["auto", "off", "lookup", "model"] = "auto"
    # expected tokens of one row in an iteration; how many it has is decided by what they bring, none under load
    max_drafts: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    draft_model: str = ""  # model: folder of the smaller model, with the same vocabulary, or of an EAGLE head
    draft_quantization: str = "auto"  # of it, as model.quantization

    @property
    def drafts(self) -> bool:
        """Whether anything is ever expected; `auto` counts as off until it is settled."""
        return self.mode not in ("auto", "off")

    def settled(self, device_type: str) -> SpeculationConfig:
        """Return the section with what `auto` stands for on a device of this type: `cpu` or `cuda`."""
        if self.mode != "auto":
            return self
        return msgspec.structs.replace(self, mode="lookup" if device_type == "cpu" else "off")


class EndpointsConfig(Section, frozen=True):
    """Addresses of the processes' inboxes. "" = a Unix socket in the pipeline's run folder (one host).

    For several hosts or containers: tcp://HOST:PORT; a process binds the port on `bind_host`.
    """

    manager: str = ""  # inbox of the bucketing manager
    predictor: str = ""  # inbox of the length predictor
    monitor: str = ""  # inbox of the global monitor
    gateway: str = ""  # inbox of the gateway
    worker: str = ""  # what a worker advertises; "tcp://HOST:0" picks a port
    ranks: str = ""  # workers: hosts above 1: where rank 0 awaits the ranks of other hosts, tcp://HOST:PORT
    bind_host: str = "127.0.0.1"  # address that processes with a tcp endpoint listen on
    standby_managers: tuple[str, ...] = ()  # inboxes of manager-1, manager-2 …, where manager.standbys are wanted
    # several hosts: where monitor and managers tell addresses, tcp://NAME:PORT, env:VARIABLE; docs/guide/seeds.md
    seeds: tuple[str, ...] = ()
    # under which other machines reach this process; "" = COHORT_HOST, else the host that a server listens on (this
    # machine's name where that is every interface), and with seeds the address that faces one
    host: str = ""


class SecurityConfig(Section, frozen=True):
    """CURVE encryption of the control bus and of KV over zmq. One key for the whole cluster (`cohort keys FILE`): its
    holders are members, no other peer is heard; members can take each other's names."""

    curve_secret_key_file: str = ""  # the cluster's key file, the same for every process; "" = no encryption
    allow_plain: bool = False  # true: tcp endpoints beyond this machine may do without a key
    # with a key: ranks of one worker may exchange what they compute between hosts, which neither gloo nor NCCL encrypts
    allow_plain_ranks: bool = False


class LoggingConfig(Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"  # least severe level that is written
    format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal, else JSON


class MetricsConfig(Section, frozen=True):
    host: str = "127.0.0.1"  # address of every process's /metrics and /health
    base_port: Annotated[int, msgspec.Meta(ge=0, le=65000)] = 8010  # predictor, manager, then one per worker; 0 = any


class RecordingConfig(Section, frozen=True):
    """Recording of what gateway, manager and workers receive and answer, for `cohort replay`."""

    folder: str = ""  # where each of these processes writes a file, for its owner alone; "" = none is written


class TracingConfig(Section, frozen=True):
    """One OpenTelemetry trace per request, over all processes; needs the extra `otel`. A client's `traceparent` is
    continued, and its flag says whether the request is traced."""

    endpoint: str = ""  # of a collector, OTLP over HTTP: http://HOST:4318/v1/traces; "" = no traces
    sample: Fraction = 1.0  # share of the requests without a traceparent that are traced
