"""Checks before anything is started: model folder, memory, ports, what strangers could reach, open-file limit. Each
failure is one sentence with its cure.

Called by the launcher and `cohort doctor`; the processes check their own share again. Never loads a model.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterable
from pathlib import Path

import jinja2
import msgspec

from cohort.common.config import Config
from cohort.common.engine.config.architecture import check_architecture
from cohort.common.engine.config.lora_checkpoint import check_lora
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.config.safetensors_header import read_header, read_index
from cohort.common.errors import ConfigError, ModelError
from cohort.common.http import exposure, tls
from cohort.common.http.ports import port_problem
from cohort.common.hub.model_source import TOKENIZER_FILES
from cohort.common.json_files import read_json_object
from cohort.common.paths import GGUF_FILE
from cohort.services.launcher.box import check_host
from cohort.services.launcher.plan import ProcessPlan

_GATEWAY_REMEDY = "choose another with --port"
_AGAIN = "fetch the model again: its download is not complete"
_TEMPLATES = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
_TOKENIZER_BYTES, _TEMPLATE_BYTES = 64 << 20, 1 << 16
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""Marks of assistant text, which gateways render as nothing."""
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin", GGUF_FILE)


class _TokenizerFile(msgspec.Struct):
    model: msgspec.Raw


def check(config: Config, model: Path, *, api: bool = True, workers: bool = True) -> None:
    """Check a resolved configuration, of a host with gateways (`api`), workers or both. Raises `ConfigError`,
    `ModelError`."""
    check_adapters(config, model)
    check_exposure(config, api=api)
    if api:
        check_certificate(config)
    if workers:
        check_host(config, model)


def check_model(folder: Path, *, with_weights: bool = True) -> None:
    """Raise `ModelError` unless the folder has a model in Hugging Face format, complete, whose architecture, tokeniser
    and chat template can be used; weights may be drawn instead."""
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
        raise ModelError(f"{folder}: no weights ({' or '.join(WEIGHT_PATTERNS)}); {_AGAIN}")
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(f"{folder}: no tokenizer ({', '.join(TOKENIZER_FILES)}); {_AGAIN}")
    check_architecture(folder)
    read_geometry(folder)
    _check_text_files(folder)
    if with_weights and (missing := missing_parts(folder)):
        more = " …" if len(missing) > 3 else ""
        raise ModelError(f"{folder}: {'; '.join(missing[:3])}{more}; {_AGAIN}")


def _check_text_files(folder: Path) -> None:
    """Check that the tokeniser's file is whole, and that the chat template can be read: files of a length that takes no
    noticeable time; the process that bounds what they cost judges longer ones."""
    file = folder / "tokenizer.json"
    try:
        if _is_short(file, _TOKENIZER_BYTES):
            msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{file}: no tokenizer can be read from it ({error}); {_AGAIN}") from None
    template = folder / "chat_template.jinja"
    try:
        if _is_short(template, _TEMPLATE_BYTES):
            _TEMPLATES.parse(_GENERATION.sub("", template.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, jinja2.TemplateSyntaxError) as error:
        raise ModelError(
            f"{template}: no chat template ({error}); mend it, or remove it to serve without chats"
        ) from None


def _is_short(file: Path, most_bytes: int) -> bool:
    return file.is_file() and file.stat().st_size <= most_bytes


def missing_parts(folder: Path) -> list[str]:
    """Return weight files that an index names and are absent, or that are shorter than their header says."""
    found = []
    for index in sorted(folder.glob("*.index.json")):
        found += [
            f"{part} is missing" for part in sorted(set(read_index(index).values())) if not (folder / part).is_file()
        ]
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                read_header(path, file)
        except ModelError as error:
            found.append(f"{path.name} is cut off or damaged: {error}")
    return found


def check_adapters(config: Config, model: Path) -> None:
    """Raise `ModelError` with option, file and tensor for a LoRA adapter that a worker would refuse."""
    if config.model.lora:
        base = config.model.served_name or model.name
        check_lora(config.model.lora, read_geometry(model), base)


def check_exposure(config: Config, *, api: bool = True) -> None:
    """Raise `ConfigError` for openings that an oversight leaves to strangers on other machines. `api`: it is served
    from here."""
    if api:
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
