"""The Ray cluster that a pipeline is to run on: joins it, and looks at every node before anything is placed there.

The only module that starts or ends Ray. Called by `main` and `serving`. What a node lacks (this version of Cohort, the
model) is one clear sentence here, not a process that ends there again and again.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cohort import __version__
from cohort.common.config.device_defaults import Machine
from cohort.common.devices.inventory import Gpu, this_machine, visible_gpus
from cohort.common.errors import CohortError, ConfigError, ModelError
from cohort.services.launcher.on_ray.placement import Node
from cohort.services.launcher.preflight import check_model

AUTO, LOCAL = "auto", "local"
LOCAL_CPUS = 256.0
"""CPUs of a Ray that is started here: enough that Ray limits nothing, as without it."""
LOCAL_STORE_BYTES = 80 << 20  # of objects; the least that Ray takes is little less
SURVEY_TIMEOUT_S = 60.0
_MISSING = (
    "--on ray needs Ray on every node: pip install 'cohort-serve[ray]', in a clone "
    ".venv/bin/pip install --require-hashes --no-deps -r scripts/requirements/ray.txt"
)
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}

_OF_OUR_OWN = {
    # Or it would start a process for each of these CPUs, for work that never comes;
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",  # and serve with what others leave (`agent.serve_first`).
}
"""A Ray that is started here."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a node reports of itself. `problem`: why nothing can run there; "" if it can."""

    version: str
    machine: Machine
    gpus: list[Gpu]
    problem: str


@dataclass(slots=True)
class Cluster:
    """A cluster that was joined. `ray`: the package, imported."""

    ray: Any
    local: bool = False
    _session: str = ""
    nodes: list[Node] = field(default_factory=list)

    def survey(self, model: Path | None = None, *, with_weights: bool = True) -> list[Facts]:
        """Return facts of every node, in the order of `nodes`; with `model`, whether that folder is there. Raises
        `ConfigError` for a node that cannot run this version."""
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        task = self.ray.remote(_facts)
        refs = []
        for node in self.nodes:
            affinity = strategy(node_id=node.node_id, soft=False)
            on_node = task.options(num_cpus=0, max_retries=0, scheduling_strategy=affinity)
            refs.append(on_node.remote(str(model) if model else "", with_weights))
        found: list[Facts] = []
        for node, ref in zip(self.nodes, refs, strict=True):
            try:
                facts: Facts = self.ray.get(ref, timeout=SURVEY_TIMEOUT_S)
            except Exception as error:
                last = str(error).strip().rpartition("\n")[2]
                raise ConfigError(
                    f"--on ray: node {node.ip} cannot run Cohort ({last}); Ray has to run in an environment with "
                    f"cohort-serve {__version__} on every node"
                ) from error
            if facts.version != __version__:
                raise ConfigError(f"--on ray: node {node.ip} has Cohort {facts.version}, this one {__version__}")
            if facts.problem:
                raise ModelError(f"--on ray: node {node.ip}: {facts.problem}")
            found.append(facts)
        return found

    def leave(self) -> None:
        """End what was started here. Actors and groups of this launcher end with it."""
        self.ray.shutdown()
        if self._session:
            shutil.rmtree(self._session, ignore_errors=True)


def join(address: str) -> Cluster:
    """Join the cluster at `address`: HOST:PORT of its head, `auto` for the one whose node this machine is, or `local`
    for a Ray of our own on this machine alone. Raises `ConfigError`."""
    if "://" in address:
        raise ConfigError(
            f"--on ray={address}: run `cohort serve` on a node of the cluster and name HOST:PORT or nothing"
        )
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if address == LOCAL:  # else Ray leaves a token in the home folder, and later clusters of this user ask for it
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), **_OF_OUR_OWN)
    ray = _imported()
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    session = tempfile.mkdtemp(prefix="cohort-ray-") if address == LOCAL else ""
    try:
        if address == LOCAL:
            ray.init(
                address=LOCAL,
                num_cpus=int(LOCAL_CPUS),
                object_store_memory=LOCAL_STORE_BYTES,
                include_dashboard=False,
                _temp_dir=session,
                **quiet,
            )
        else:
            ray.init(address=address or AUTO, **quiet)
    except Exception as error:  # of many kinds, none of them its own
        if session:
            shutil.rmtree(session, ignore_errors=True)
        raise ConfigError(
            f"--on ray: cannot join {f'the cluster at {address}' if address else 'a cluster'}: {_first_line(error)}. "
            "This machine has to be a node of it (`ray start --head`, on others `ray start --address=HOST:PORT`); "
            "--on ray=local starts a Ray on this machine alone"
        ) from error
    own_id = ray.get_runtime_context().get_node_id()
    nodes = [
        Node(
            each["NodeID"],
            each["NodeManagerAddress"],
            each["Resources"].get("CPU", 0.0),
            each["Resources"].get("GPU", 0.0),
            is_launcher_node=each["NodeID"] == own_id,
        )
        for each in ray.nodes()
        if each["Alive"]
    ]
    nodes.sort(key=lambda node: (not node.is_launcher_node, node.ip))
    return Cluster(ray, address == LOCAL, session, nodes)


def check_installed() -> None:
    """Raise `ConfigError` where Ray is missing; loads nothing of it."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(_MISSING)


def machine_of(facts: Sequence[Facts]) -> Machine:
    """Return the machine that sets the configuration's defaults: the smallest node, with a GPU if any has one."""
    with_gpu = [each.machine for each in facts if each.machine.gpus]
    if not with_gpu:
        return Machine(0, 0, min((each.machine.host_memory_bytes for each in facts), default=0))
    return Machine(
        min(machine.gpus for machine in with_gpu),
        min(machine.gpu_memory_bytes for machine in with_gpu),
        min(machine.host_memory_bytes for machine in with_gpu),
    )


def gpus_of(nodes: Sequence[Node], facts: Sequence[Facts]) -> list[Gpu]:
    """Return the GPUs that Ray has to give: a node may keep some back."""
    return [gpu for node, each in zip(nodes, facts, strict=True) for gpu in each.gpus[: int(node.gpus)]]


def _facts(model: str, with_weights: bool) -> Facts:
    """Run on a node, in a process of Ray's."""
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray's own; this task holds no GPU and looks at all
    try:
        machine, gpus, problem = this_machine(), visible_gpus(), ""
    finally:
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden
    if model:
        try:
            check_model(Path(model), with_weights=with_weights)
        except CohortError as error:
            problem = str(error)
    return Facts(__version__, machine, gpus, problem)


def _imported() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    return ray


def _first_line(error: Exception) -> str:
    with suppress(IndexError):
        return str(error).strip().splitlines()[0].rstrip(".")
    return type(error).__name__
