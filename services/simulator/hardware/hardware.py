"""Models, devices, links and clusters as data: YAML files in configs/, checked key by key.

    configs/models/NAME.yaml     a decoder's shape, or what it has otherwise than another (`like`)
    configs/devices/NAME.yaml    a device: peaks, fitted efficiencies, the stacks measured on it
    configs/hardware/links.yaml  bandwidth and latency by kind of link
    configs/hardware/exchanges.yaml  measured all-reduces by kind of link
    configs/clusters/NAME.yaml   which devices, how many, how they are connected

Beside the shipped ones those that `cohort profile --save` wrote (`data_files.py`). Read by the commands of the
simulator; every mistake in them is a `ConfigError` that names file and field. Knows nothing of requests or policies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from cohort.common.config import CONFIGS_DIR, Config
from cohort.common.errors import ConfigError
from cohort.common.policies.cost_model import DecodeAttention, DeviceShape, ModelShape, StackShape
from cohort.common.policies.operators import Between, Curve, Decodes, Matrices, Operators, Prompts
from cohort.common.types import FP8_SCALE_BYTES
from cohort.services.simulator.hardware.data_files import converted, locate, mapping, names, read_yaml
from cohort.services.simulator.hardware.profile_note import ProfileNote

SCATTER_LASTS_STEPS = 30.0
"""Iterations after which a lasting deviation is 1/e of what it was: about 0.4 s of decodes, as recorded."""

_FITTED = ("compute_efficiency", "memory_efficiency", "attention_efficiency", "exchange_bytes_per_s")
"""Fields that a device without operators has instead of them."""

_Positive = Annotated[int, msgspec.Meta(gt=0)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Rate = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_NotNegativeShare = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class _ModelFile(_File, frozen=True):
    name: str
    layers: _Positive
    hidden: _Positive
    heads: _Positive
    kv_heads: _Positive
    head_dim: _Positive
    intermediate: _Positive
    gated_mlp: bool
    vocabulary: _Positive
    tied_embeddings: bool
    max_positions: _Positive
    weight_bytes: _Positive
    kv_bytes: _Positive
    window: int = 0
    full_layers: int = 0
    experts: _Count = 0
    experts_per_token: _Count = 0
    expert_intermediate: _Count = 0
    shared_intermediate: _Count = 0
    dense_layers: _Count = 0
    expert_bits: _NotNegative = 0.0
    attention_weights: _Count = 0
    pair_dim: _Count = 0


class _StackFile(_File, frozen=True):
    launch_s: _NotNegative
    step_s: _NotNegative
    row_s: _NotNegative
    parallel_step_s: _NotNegative = 0.0
    parallel_row_s: _NotNegative = 0.0
    mixed_share: _NotNegative = 0.0
    prompt_launch_s: _NotNegative = 0.0
    ahead: bool = False


class _OperatorsFile(_File, frozen=True):
    """Operators of a device without their exchange; None: not measured on it."""

    matrices: Matrices | None = None
    between: Between | None = None
    prompts: Prompts | None = None
    decodes: Decodes | None = None


class _DeviceFile(_File, frozen=True):
    name: str
    kind: Literal["gpu", "cpu"]
    flops_per_s: _Rate
    memory_bytes_per_s: _Rate
    memory_bytes: _Positive
    reserve_bytes: Annotated[int, msgspec.Meta(ge=0)]
    units: _Positive
    unit_speedup: _Rate
    host_bytes_per_s: _Rate
    within: str
    stacks: dict[str, _StackFile] = {}
    compute_efficiency: _Share = 1.0
    memory_efficiency: _Share = 1.0
    attention_efficiency: _Share = 1.0
    exchange_bytes_per_s: _Rate = 1.0
    exchange_latency_s: _NotNegative = 0.0
    layer_s: _NotNegative = 0.0
    kv_efficiency: _Share | None = None
    operators: _OperatorsFile | None = None
    scaled_from: str = ""
    scatter: _NotNegative = 0.0
    scatter_lasting: _NotNegativeShare = 0.0
    scatter_prompts: _NotNegative | None = None
    profile: ProfileNote | None = None


class LinkShape(_File, frozen=True):
    """One direction of a link between two instances. `run_s`: what one run of blocks takes its two ends beside its
    bytes, one run after the other."""

    bytes_per_s: _Rate
    latency_s: _NotNegative
    run_s: _NotNegative = 0.0


class _ClusterFile(_File, frozen=True):
    device: str
    instances: _Positive
    tensor_parallel: _Positive = 1
    per_host: Annotated[int, msgspec.Meta(ge=0)] = 0
    within: str = ""
    across: str = "rdma"
    stack: str = ""
    decode_attention: DecodeAttention = "split_kv"
    host_memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    control_latency_s: _NotNegative = 0.0003
    cores: Annotated[int, msgspec.Meta(ge=0)] = 0
    service_step_s: _NotNegative = 0.0
    service_row_s: _NotNegative = 0.0
    core_contention: _NotNegative = 0.0
    memory_contention: _NotNegative = 0.0
    cache_contention: _NotNegative = 0.0
    mixed_share: _NotNegative | None = None
    scatter: _NotNegative | None = None
    scatter_lasting: _NotNegativeShare | None = None
    scatter_prompts: _NotNegative | None = None
    nics_per_host: Annotated[int, msgspec.Meta(ge=0)] = 0
    workers_per_device: _Positive = 1
    pace: _Rate = 1.0


class _PartsFile(_File, frozen=True):
    """Instances of several kinds: each part as `--cluster` takes it."""

    parts: Annotated[list[str], msgspec.Meta(min_length=2)]
    across: str = ""


class Cluster(msgspec.Struct, frozen=True):
    """Hardware: instances of `tensor_parallel` devices, `per_host` of them (0 = all) on one machine; equal ones, or
    `parts` of equal ones.

    `stack` is a property of the serving software on this device (graphs replayed, eager …); `mixed_share` in the
    cluster's file stands in for the stack's. `control_latency_s` is what a control message takes
    between two processes.

    `cores`: number of cores that engines of one thread share with each other, with the other processes of the pipeline
    and with its clients; 0: every instance has hardware of its own. `service_step_s`, `service_row_s`:
    processor time that those others, and changing between them, take for an iteration, and for each of its rows.
    `core_contention`: how much longer, as a share, an iteration takes for each one beside it (cores are threads of one
    core, say); `memory_contention`: how much more two iterations take beside each other that only read memory;
    `cache_contention`: how much longer one that only reads takes for each one beside it, whatever that does (it fills
    the cache that both have).

    `nics_per_host`: network cards that the instances of a machine share for KV transfers to other machines, each one
    transfer out and one in at a time; 0: every instance has one of its own.

    `workers_per_device`: instances that compute on the same device (or the same `tensor_parallel` ones) in turn, as
    processes without any partition of it do: while n of them run, each takes n times as long. They divide its memory,
    and each holds the weights.

    `scatter`: coefficient of variation of an iteration's time about what the cost model states, as measured live; 0:
    none. `scatter_lasting`: the share of its variance that many iterations have in common. `scatter_prompts`: the same
    coefficient of an iteration with prompts that takes a second, of others by the root of their time; None: as of all.
    `profile`: of a device that `cohort profile` measured.
    """

    name: str
    device: DeviceShape
    device_reserve_bytes: int
    cpu: bool
    instances: int
    tensor_parallel: int
    per_host: int
    within: LinkShape
    across: LinkShape
    stack: StackShape
    decode_attention: DecodeAttention
    host_memory_bytes: int = 0
    control_latency_s: float = 0.0003
    cores: int = 0
    service_step_s: float = 0.0
    service_row_s: float = 0.0
    core_contention: float = 0.0
    memory_contention: float = 0.0
    cache_contention: float = 0.0
    scatter: float = 0.0
    scatter_lasting: float = 0.0
    scatter_prompts: float | None = None
    profile: ProfileNote | None = None
    nics_per_host: int = 0
    workers_per_device: int = 1
    parts: tuple[Cluster, ...] = ()
    """Groups of equal instances, numbered through; the fields above are the first's. Empty: all are equal."""

    def of(self, number: int) -> Cluster:
        return self._place(number)[0]

    def _place(self, number: int) -> tuple[Cluster, int, int]:
        """Return an instance's part, that part's index, and the instance's number there."""
        for index, part in enumerate(self.parts):
            if number < part.instances:
                return part, index, number
            number -= part.instances
        return self, 0, number

    @property
    def hardware(self) -> str:
        each = self.parts or (self,)
        return " + ".join(f"{part.instances} x {part.tensor_parallel} {part.device.shown}" for part in each)

    def service_load(self, rows: int, alone_s: float) -> float:
        """Return the cores that other processes need for an iteration of `rows` rows, `alone_s` long if alone."""
        return (self.service_step_s + self.service_row_s * rows) / alone_s

    def slowdowns(self, engines: Sequence[tuple[float, float, float]]) -> list[float]:
        """Return the factors by which the iterations in flight are slower than alone; `engines`: the seconds of each
        alone, its `service_load`, and the share of it that reads memory.

        Engines share the cores equally. Time of the other processes comes from engines in proportion to the length of
        their iterations: a fair scheduler favours processes that slept last, and an engine sleeps between iterations.
        No process is left with less than half of an equal share. Every iteration takes longer beside others, as long as
        they run, what it reads more so, and more still beside others that read: in proportion to both shares.
        """
        waits = core_slowdowns(self.cores, [(alone_s, load) for alone_s, load, _ in engines])
        if not self.contended:
            return waits
        running = min(1.0, self.cores / max(1, len(engines)))
        reading, others = sum(share for *_, share in engines), len(engines) - 1

        def contended(share: float) -> float:
            slowing = others * (self.core_contention + self.cache_contention * share)
            return 1.0 + running * (slowing + self.memory_contention * share * (reading - share))

        return [wait * contended(share) for wait, (*_, share) in zip(waits, engines, strict=True)]

    @property
    def contended(self) -> bool:
        """Whether concurrent iterations take longer than by processor time alone."""
        return bool(self.core_contention or self.memory_contention or self.cache_contention)

    @property
    def shares(self) -> bool:
        """Whether an iteration's time depends on which others run, on cores or on a device."""
        return bool(self.cores) or any(part.workers_per_device > 1 for part in self.parts or (self,))

    def shared_slowdowns(self, running: Sequence[tuple[int, float, float, float]]) -> list[float]:
        """Return the factors by which the iterations in flight are slower than alone; `running`: instance, its seconds
        alone, its `service_load`, and the share of it that reads memory."""
        if self.cores:
            return self.slowdowns([engine for _, *engine in running])  # type: ignore[misc]
        devices = [self._device(number) for number, *_ in running]
        together = Counter(devices)
        return [float(together[device]) for device in devices]

    def _device(self, number: int) -> tuple[int, int]:
        part, index, within = self._place(number)
        return index, within // part.workers_per_device

    def host(self, number: int) -> tuple[int, int]:
        """Return the machine of an instance: its part's index, and the machine's number there."""
        part, index, within = self._place(number)
        return index, within // (part.per_host or part.instances)

    def link(self, first: int, second: int) -> LinkShape:
        """Return the link between two instances. Unlike ones are never on one machine."""
        if self.parts:
            (part, index, first), (_, other, second) = self._place(first), self._place(second)
            return part.link(first, second) if index == other else self.across
        per_host = self.per_host or self.instances
        return self.within if first // per_host == second // per_host else self.across


def core_slowdowns(cores: int, engines: Sequence[tuple[float, float]]) -> list[float]:
    """Return the factors by which iterations in flight are slower than alone, by the processor time that they and the
    services need on `cores` cores; `engines` as in `Cluster.slowdowns`, without memory."""
    if not engines:
        return []
    share = min(1.0, cores / len(engines))
    wanted = sum(1.0 + load for _, load in engines)
    if wanted * share <= cores:
        return [1.0 / share] * len(engines)
    equal = cores / wanted
    together_s = sum(alone_s for alone_s, _ in engines)
    parts = [alone_s / together_s for alone_s, _ in engines]
    missing = (wanted - cores / share) / sum(
        part * (1.0 + load) for part, (_, load) in zip(parts, engines, strict=True)
    )
    return [1.0 / max(share * (1.0 - missing * part), equal / 2.0) for part in parts]


def load_model(name: str) -> ModelShape:
    """Load a model of configs/models, of the user's profiles, or of a YAML file; one with `like` has what it does not
    name from the model of that name. Raises `ConfigError`."""
    found = mapping(name, "models")
    if "like" in found:
        found = mapping(found.pop("like"), "models") | found
    data = converted(found, _ModelFile, _origin(name, "models"))
    mixture = (data.experts, data.experts_per_token, data.expert_intermediate)
    if any(mixture) and (not all(mixture) or data.experts_per_token > data.experts or data.dense_layers >= data.layers):
        raise ConfigError(
            f"{_origin(name, 'models')}: a mixture has experts, at least as many as experts_per_token, an "
            "expert_intermediate, and layers that are not dense_layers"
        )
    return ModelShape(**{field: getattr(data, field) for field in _ModelFile.__struct_fields__})


def as_stored(model: ModelShape, config: Config, cluster: Cluster) -> ModelShape:
    """Return the model as the engine stores it on these devices: a processor widens experts in MXFP4 at load, keys and
    values are stored as `kv.cache_dtype` says. Attention is bound by their bytes or by a profile's share of the
    bandwidth, so its time follows them."""
    if model.expert_bits and cluster.of(0).cpu:
        model = replace(model, expert_bits=0.0)
    if config.kv.cache_dtype == "auto":
        return model
    return replace(model, kv_bytes=1, kv_scale_bytes=FP8_SCALE_BYTES["cpu" if cluster.of(0).cpu else "cuda"])


def load_device(name: str, near: Path | None = None) -> tuple[DeviceShape, _DeviceFile]:
    """Load a device. `near`: the file of the cluster that names it. Raises `ConfigError`."""
    data = converted(mapping(name, "devices", near), _DeviceFile, _origin(name, "devices"))
    names = {field.name for field in fields(DeviceShape)} & set(_DeviceFile.__struct_fields__) - {"operators"}
    device = DeviceShape(**{name: getattr(data, name) for name in names})
    if data.operators is None and not data.scaled_from:
        if missing := [name for name in _FITTED if getattr(data, name) == 1.0]:
            raise ConfigError(f"{_origin(name, 'devices')}: wants operators, scaled_from or {', '.join(missing)}")
        return device, data
    operators, scaled = _operators(data, near)
    if not data.stacks and data.scaled_from:
        data = msgspec.structs.replace(data, stacks=load_device(data.scaled_from, near)[1].stacks)
    return replace(device, operators=operators, scaled=scaled, memory_efficiency=operators.decodes.efficiency), data


def _operators(data: _DeviceFile, near: Path | None) -> tuple[Operators, str]:
    """Return a device's operators, those that it lacks from `scaled_from`, and which these are."""
    own = data.operators or _OperatorsFile()
    parts = {name: getattr(own, name) for name in _OperatorsFile.__struct_fields__}
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        origin = f"{data.name}: operators: {', '.join(missing)}"
        if not data.scaled_from:
            raise ConfigError(f"{origin}: missing, and no scaled_from names the device that has them")
        other = load_device(data.scaled_from, near)[0].operators
        if other is None:
            raise ConfigError(f"{origin}: {data.scaled_from} has no operators either")
        parts |= {name: getattr(other, name) for name in missing}
    exchanges = load_exchanges()
    if data.within not in exchanges:
        raise ConfigError(f"{data.name}: within: no all-reduce was measured over {data.within}")
    which = "" if len(missing) == len(parts) else f"{' and '.join(missing)} "
    return Operators(
        **parts, exchange=tuple(sorted(exchanges[data.within].items()))
    ), f"{which}scaled from {data.scaled_from}" if missing else ""


def load_cluster(text: str, overrides: Mapping[str, Any] | None = None) -> Cluster:
    """Load `NAME` of configs/clusters or of the user's profiles, a YAML file, or `DEVICE:COUNT` (all on one host);
    joined by `+`, a cluster of unlike instances, whose machines are the first's `across` apart. Raises
    `ConfigError`."""
    if "+" in text and not Path(text).is_file():
        return _joined(text, [load_cluster(part.strip(), overrides) for part in text.split("+")])
    device_name, colon, count = text.rpartition(":")
    if colon and not Path(text).exists():
        if not count.isdigit() or int(count) < 1:
            raise ConfigError(f"--cluster {text}: {count!r} is not a number of instances (DEVICE:COUNT)")
        data: dict[str, Any] = {"device": device_name, "instances": int(count)}
    else:
        known = Path(text).is_file() or locate(text, "clusters") is not None
        one_device = not known and text in names("devices")
        data = {"device": text, "instances": 1} if one_device else mapping(text, "clusters")
        if "parts" in data:
            joined = converted(data, _PartsFile, f"cluster {text}")
            across = {"across": joined.across} if joined.across else {}
            return _joined(text, [load_cluster(part, {**(overrides or {}), **across}) for part in joined.parts])
    data |= {key: value for key, value in (overrides or {}).items() if value is not None}
    file = converted(data, _ClusterFile, f"cluster {text}")
    device, device_file = load_device(file.device, Path(text).absolute() if Path(text).is_file() else None)
    stack_name = file.stack or next(iter(device_file.stacks), "")
    if stack_name not in device_file.stacks:
        known_stacks = ", ".join(device_file.stacks)
        raise ConfigError(f"cluster {text}: stack: {file.device} has no stack {stack_name!r}; known: {known_stacks}")
    stack = device_file.stacks[stack_name]
    if file.mixed_share is not None:
        stack = msgspec.structs.replace(stack, mixed_share=file.mixed_share)
    if file.per_host and file.instances > file.per_host and file.instances % file.per_host:
        raise ConfigError(f"cluster {text}: per_host: {file.instances} instances do not fill hosts of {file.per_host}")
    if file.instances % file.workers_per_device or (file.cores and file.workers_per_device > 1):
        wrong = "cores are shared already" if file.cores else f"{file.instances} instances do not fill the devices"
        raise ConfigError(f"cluster {text}: workers_per_device: {wrong}")
    scatter = ("scatter", "scatter_lasting", "scatter_prompts")
    measured = {name: getattr(device_file if getattr(file, name) is None else file, name) for name in scatter}
    others = set(Cluster.__struct_fields__) - {"device", "within", "across", "stack", *scatter}
    copied = {name: getattr(file, name) for name in _ClusterFile.__struct_fields__ if name in others}
    cluster = Cluster(
        name=text,
        device=device,
        device_reserve_bytes=device_file.reserve_bytes,
        cpu=device_file.kind == "cpu",
        within=load_link(file.within or device_file.within),
        across=load_link(file.across),
        stack=StackShape(stack_name, *(getattr(stack, field) for field in _StackFile.__struct_fields__)),
        profile=device_file.profile,
        **copied,
        **measured,
    )
    return paced(cluster, file.pace)


def paced(cluster: Cluster, pace: float) -> Cluster:
    """Return the machine on a day when everything it computes takes `pace` times as long; links stay as they are."""
    if pace == 1.0:
        return cluster
    device, stack = cluster.device, cluster.stack
    rates = ("flops_per_s", "memory_bytes_per_s", "exchange_bytes_per_s", "host_bytes_per_s")
    times = ("launch_s", "prompt_launch_s", "step_s", "row_s", "parallel_step_s", "parallel_row_s")
    return msgspec.structs.replace(
        cluster,
        device=replace(
            device,
            layer_s=device.layer_s * pace,
            exchange_latency_s=device.exchange_latency_s * pace,
            operators=device.operators and device.operators.paced(pace),
            **{rate: getattr(device, rate) / pace for rate in rates},
        ),
        stack=replace(stack, **{time: getattr(stack, time) * pace for time in times}),
        service_step_s=cluster.service_step_s * pace,
        service_row_s=cluster.service_row_s * pace,
    )


def _joined(text: str, parts: list[Cluster]) -> Cluster:
    if any(part.cores for part in parts):
        raise ConfigError(f"cluster {text}: cores: only equal instances can share cores")
    if any(part.tensor_parallel != parts[0].tensor_parallel for part in parts):
        raise ConfigError(f"cluster {text}: tensor_parallel: all instances want as many shards, for their KV transfers")
    instances = sum(part.instances for part in parts)
    return msgspec.structs.replace(parts[0], name=text, instances=instances, parts=tuple(parts))


@cache
def load_exchanges() -> dict[str, dict[int, Curve]]:
    """Return all-reduces between the devices of an instance by kind of link."""
    path = CONFIGS_DIR / "hardware" / "exchanges.yaml"
    return {name: converted(value, dict[int, Curve], f"{path}: {name}") for name, value in read_yaml(path).items()}


@cache
def _links() -> dict[str, LinkShape]:
    path = CONFIGS_DIR / "hardware" / "links.yaml"
    return {name: converted(value, LinkShape, f"{path}: {name}") for name, value in read_yaml(path).items()}


def load_link(name: str) -> LinkShape:
    links = _links()
    if name not in links:
        raise ConfigError(f"no link named {name!r}; there are: {', '.join(links)}")
    return links[name]


def _origin(name: str, folder: str) -> str:
    return name if Path(name).is_file() else f"{folder}/{name}"
