"""Checks of what a configuration names: the model's files, certificates, profiles, packages, devices.

Called by `doctor.py`. Loads no model and, itself, no torch.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cohort.common.config import Config
from cohort.common.devices import inventory
from cohort.common.devices.refusal import TorchFacts, missing_toolchain, unusable_gpu
from cohort.common.errors import ConfigError, ModelError, TransferError
from cohort.common.http.tls import TlsFiles, load
from cohort.common.transport import ucx_devices
from cohort.common.transport.ucx_devices import UcxChoice
from cohort.services.cli.checks.finding import Finding, fine, problem, refused, size, skipped, warning
from cohort.services.launcher.models.default_model import is_complete
from cohort.services.launcher.models.gguf_folder import gguf_file
from cohort.services.launcher.preflight import WEIGHT_PATTERNS, check_model
from cohort.services.simulator.hardware.profile_note import ProfileNote, warnings

CERTIFICATE_DAYS = 14
_TORCH = """\
import json, torch
works = torch.cuda.is_available()
complaint = ""
if not works:
    try:
        torch.cuda.init()
    except Exception as error:
        complaint = str(error).splitlines()[0][:200]
print(json.dumps([torch.__version__, torch.version.cuda or "", works, complaint]))
"""
_TORCH_TIMEOUT_S = 120.0

HasModule = Callable[[str], bool]


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent
        return False


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern))


def model(config: Config, folder: Path) -> Finding:
    """Check that the model is present, and complete by its own index."""
    name = "model"
    if not config.model.path and not is_complete(folder):
        if not folder.exists():
            return fine(name, "the default model will be made at the first start")
        return problem(name, f"{folder} was not made to its end", f"rm -r {folder}; the next start makes it")
    try:
        if (file := gguf_file(folder)) is not None:
            return fine(name, f"{file.name}, {size(file.stat().st_size)} of weights in GGUF")
        check_model(folder, with_weights=config.model.weights == "files")
    except (ModelError, OSError, ValueError) as error:
        return refused(name, error, "name a local folder in Hugging Face format: --model FOLDER")
    shown = config.model.served_name or folder.name
    kept = f"{size(weights_bytes(folder))} of" if config.model.weights == "files" else "random"
    return fine(name, f"{shown}, {kept} weights")


def certificate(config: Config, now_s: float | None = None) -> Finding:
    name = "certificate"
    try:
        files = TlsFiles.of(config.gateway.tls_cert, config.gateway.tls_key)
        if files is None:
            return skipped(name, "the gateway serves http")
        remaining_s = load(files).expires_s - (time.time() if now_s is None else now_s)
    except ConfigError as error:
        return problem(name, str(error), "name the two files that belong together: --tls-cert, --tls-key")
    renew = "renew it; the gateway reads the files again when they change"
    if remaining_s <= 0:
        return problem(name, "it has expired, or its end cannot be told", renew)
    says = f"valid for {remaining_s / 86_400:.0f} days"
    return warning(name, says, renew) if remaining_s < CERTIFICATE_DAYS * 86_400 else fine(name, says)


def ucx(
    config: Config,
    moves_kv: bool,
    has: HasModule = installed,
    usable: Callable[[UcxChoice], list[str]] = ucx_devices.resources_of,
) -> Finding:
    """Check UCX, the fast link for KV, else ZeroMQ carries it. `usable`: what UCX may use, as `local_resources`."""
    name = "UCX"
    if not moves_kv or "ucx" not in config.transfer.links:
        return skipped(name, "not used by this configuration")
    if has("ucxx"):
        chosen = UcxChoice(config.transfer.ucx.tls, config.transfer.ucx.net_devices)
        try:
            return fine(name, f"may use {', '.join(usable(chosen))}")
        except ConfigError as error:
            return problem(name, str(error), "name what is there, or nothing: UCX then chooses (docs/guide/links.md)")
        except TransferError as error:
            return warning(name, f"{error}: KV moves over ZeroMQ", "ucx_info -d says what UCX finds")
    cure = "pip install 'cohort-serve[ucx12]' or [ucx13], by the driver's CUDA; or --set transfer.links=[zmq]"
    if config.transfer.links == ("ucx",):
        return problem(name, "not installed, and no other link is configured", cure)
    return warning(name, "not installed: KV moves over ZeroMQ, with more copies", cure)


def traces(config: Config, has: HasModule = installed) -> Finding:
    name = "traces"
    if not config.tracing.endpoint:
        return skipped(name, "off (tracing.endpoint)")
    if not has("opentelemetry.exporter.otlp.proto.http"):
        return problem(name, "wanted, and OpenTelemetry is not installed", "pip install 'cohort-serve[otel]'")
    return fine(name, f"to {config.tracing.endpoint}")


def gpu(
    config: Config,
    torch: Callable[[], TorchFacts | None],
    sources: inventory.Sources = inventory.HOST,
    toolchain: Callable[[], str] = missing_toolchain,
) -> Finding:
    """Check the GPU as a worker does before it loads anything. `torch` is called only if there is a driver."""
    name = "GPU"
    if not inventory.driver_present(sources):
        if config.on_gpu:
            cure = "load the driver, hand the GPU to this container (--gpus all), or --set engine.device=cpu"
            return problem(name, f"engine.device is {config.engine.device}, and no NVIDIA driver is here", cure)
        return skipped(name, "no NVIDIA driver here")
    if not (config.on_gpu or config.engine.device == "auto"):
        return skipped(name, f"engine.device is {config.engine.device}")
    facts = torch()
    if facts is None:
        return problem(name, "torch cannot be imported", "run scripts/setup")
    if refused := unusable_gpu(config.engine.device, facts, sources):
        says, _, cure = refused.removeprefix("engine.device: ").partition(". ")
        return problem(name, says, cure)
    if not facts.works:
        return skipped(name, "hidden from this process (CUDA_VISIBLE_DEVICES)")
    if lacking := toolchain():
        return problem(name, *lacking.split(": ", 1)) if ": " in lacking else problem(name, lacking, "scripts/setup")
    return fine(name, f"usable by torch {facts.version}")


def probe_torch(python: str = sys.executable) -> TorchFacts | None:
    """Ask torch in a process of its own: it takes seconds and memory. None if it cannot be imported."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", _TORCH],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        version, cuda, works, complaint = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return TorchFacts(version, cuda, works, complaint)


def profiles(config: Config, notes: Iterable[tuple[str, ProfileNote | None]], now_s: float | None = None) -> Finding:
    """Check the profile files. `notes`: by device that `cohort profile --save` wrote; None if it has none."""
    name = "profiles"
    named = config.engine.profile
    if named and not Path(named).is_file():
        return problem(
            name, f"engine.profile: no file {named}", "cohort profile writes one; or leave engine.profile empty"
        )
    known: Sequence[tuple[str, ProfileNote | None]] = list(notes)
    old = [line for device, note in known for line in warnings(device, note)]
    if old:
        says, _, cure = old[0].partition("; ")
        return warning(name, says, cure)
    return fine(name, f"{len(known)} of this user, none outdated") if known else skipped(name, "none was made")
