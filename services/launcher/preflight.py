"""Checks before anything is started: model folder, ports, what strangers could reach, open-file limit. Each failure is
one clear sentence.

Called by the launcher only; the processes check their own share again. Never loads a model.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

from cohort.common.config import Config
from cohort.common.engine.config.lora_checkpoint import check_lora
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.errors import ConfigError, ModelError
from cohort.common.http import exposure, tls
from cohort.common.http.ports import port_problem
from cohort.common.hub.model_source import TOKENIZER_FILES
from cohort.common.json_files import read_json_object
from cohort.common.paths import GGUF_FILE
from cohort.services.launcher.plan import ProcessPlan

_GATEWAY_REMEDY = "choose another with --port"
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin", GGUF_FILE)


def check_model(folder: Path, *, with_weights: bool = True) -> None:
    """Raise `ModelError` unless the folder looks like a model in Hugging Face format; weights may be drawn instead."""
    if folder.suffix == ".gguf" and folder.is_file():
        raise ModelError(
            f"{folder} is a GGUF file, and here a folder is needed; make one around it: "
            f"python -m cohort.services.launcher.models.gguf_folder {folder} {folder.with_suffix('')}"
        )
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder; --model wants a folder in Hugging Face format, a GGUF file, or a model's id"
        )
    config = folder / "config.json"
    try:
        read_json_object(config)
    except FileNotFoundError:
        raise ModelError(f"{folder}: no config.json there; --model wants a folder in Hugging Face format") from None
    if with_weights and not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise ModelError(f"{folder}: no weights ({' or '.join(WEIGHT_PATTERNS)})")
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(f"{folder}: no tokenizer ({', '.join(TOKENIZER_FILES)})")


def check_adapters(config: Config, model: Path) -> None:
    """Raise `ModelError` with option, file and tensor for a LoRA adapter that a worker would refuse."""
    if config.model.lora:
        base = config.model.served_name or model.name
        check_lora(config.model.lora, read_geometry(model), base)


def check_exposure(config: Config) -> None:
    """Raise `ConfigError` for openings that an oversight leaves to strangers on other machines."""
    exposure.check_api(config)
    exposure.check_endpoints(config)


def check_certificate(config: Config) -> None:
    """Raise `ConfigError` for TLS files that the gateway would refuse."""
    files = tls.TlsFiles.of(config.gateway.tls_cert, config.gateway.tls_key)
    if files is not None:
        tls.load(files)


def check_ports(plans: Iterable[ProcessPlan]) -> None:
    """Raise `ConfigError` with the first port that is taken, and the process it was meant for."""
    processes = list(plans)
    seen: dict[int, str] = {}
    for process in processes:
        if process.port in seen:
            raise ConfigError(f"port {process.port} is meant for both {seen[process.port]} and {process.instance}")
        seen[process.port] = process.instance
    for process in processes:
        problem = port_problem(process.host, process.port)
        if problem:
            raise ConfigError(f"{process.instance}: {problem}; {_remedy(process)}")
    for host, port in {process.shared for process in processes if process.shared is not None}:
        if port in seen:
            raise ConfigError(f"port {port} is meant for both {seen[port]} and the gateways")
        if problem := port_problem(host, port):
            raise ConfigError(f"gateway: {problem}; {_GATEWAY_REMEDY}")


def usable_cores() -> int:
    """Return the number of cores this process may use: its affinity, and its container's CPU quota if there is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2: the affinity is all there is
    return cores


def raise_open_file_limit() -> None:
    """Raise the limit for a socket per client, also in child processes; most shells set 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _remedy(process: ProcessPlan) -> str:
    if process.instance == "gateway" and process.shared is None:
        return _GATEWAY_REMEDY
    if process.instance == "monitor":
        return "choose another with --set monitor.port=PORT"
    return "choose other ones with --set metrics.base_port=PORT"
