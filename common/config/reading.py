"""Reads configuration: merges its layers, checks every key, says what is wrong and what would be right."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from cohort.common.command_line import did_you_mean
from cohort.common.config.device_defaults import Machine, device_layer, on_gpu, settled
from cohort.common.config.root import Config
from cohort.common.errors import ConfigError

CONFIGS_DIR = Path(__file__).resolve().parent.parent.parent / "configs"

AUTO = "auto"
"""Value of `workers` that keeps the roles of the layers below and leaves their counts to the machine (count 0)."""


def load_config(
    files: Sequence[Path] = (),
    *,
    preset: str = "",
    overrides: Mapping[str, Any] | None = None,
    machine: Callable[[], Machine] | None = None,
) -> Config:
    """Merge device defaults, preset, files and overrides over the built-in defaults and check every key.

    `overrides` is a nested mapping like a file's. `machine` is asked where `engine.device` may be a GPU and an option
    that depends on it is open; None, as in the simulator: `engine.device` alone counts. Raises `ConfigError`.
    """
    presets: dict[str, Any] = {}
    if preset:
        path = CONFIGS_DIR / "presets" / f"{preset}.yaml"
        if not path.is_file():
            known = sorted(p.stem for p in (CONFIGS_DIR / "presets").glob("*.yaml"))
            raise ConfigError(f"no preset named {preset!r}; there are: {', '.join(known)}")
        _merge(presets, _read(path))
    given: dict[str, Any] = {}
    for path in files:
        _merge(given, _read(path), presets)
    if overrides:
        _check(overrides, "command line")
        _merge(given, overrides, presets)
    merged = _device_defaults(presets, given, machine)
    _merge(merged, presets)
    _merge(merged, given)
    return msgspec.convert(merged, Config)


def _device_defaults(
    presets: dict[str, Any], given: Mapping[str, Any], machine: Callable[[], Machine] | None
) -> dict[str, Any]:
    """Return the lowest layer. A preset's host pool is what its policies need; a GPU's worker takes the larger."""
    device = str((given.get("engine") or {}).get("device", (presets.get("engine") or {}).get("device", "auto")))
    if device == "cpu" or settled(given) or (machine is None and device == "auto"):
        return {}
    known = machine() if machine is not None else Machine()
    if not on_gpu(device, known):
        return {}
    layer = device_layer(known)
    kv, least = layer.get("kv", {}), (presets.get("kv") or {}).get("host_memory_bytes")
    if least is not None and "host_memory_bytes" in kv:
        presets["kv"] = {**presets["kv"], "host_memory_bytes": max(least, kv["host_memory_bytes"])}
    return layer


def dump_config(config: Config) -> str:
    """Return the whole configuration as YAML that `load_config` reads."""
    return str(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False))


def nested(flat: Mapping[str, Any], origin: str, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return `{"kv.block_size": 32}` as a nested mapping for `load_config`, within `base` if that is given. Raises
    `ConfigError` naming `origin` where one key gives a value to what another key uses as a section, or `base` has the
    option as well."""
    result = {} if base is None else base
    for dotted, value in flat.items():
        *sections, key = dotted.split(".")
        target = result
        for section in sections:
            inner = target.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{origin} {dotted}: {section} is not a section")
            target = inner
        if base is not None and key in target:
            raise ConfigError(f"{origin} {dotted} is given twice")
        target[key] = value
    return result


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML with the booleans of version 1.2: `off`, `on`, `yes` and `no` are words, as the options take them. A section
    that stands twice is an error: of two the first would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(str(key.value))
        return dict(super().construct_mapping(node, deep))


_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")


def parse_yaml(text: str) -> Any:
    """Parse a file, or the value of an option on the command line. Raises `yaml.YAMLError`."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except ValueError as error:  # of what looks like a date and is none
        raise yaml.YAMLError(str(error)) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    data = nested({key: data.pop(key) for key in list(data) if "." in str(key)}, f"{path}:", data)
    _check(data, str(path))
    return data


def _check(data: Mapping[str, Any], origin: str) -> None:
    if data.get("workers") == AUTO:
        data = {**data, "workers": []}
    _check_keys(data, Config, origin, "")
    try:
        msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {readable(str(error))}") from error


def meant(key: str, known: Collection[str]) -> str:
    """Return the end of a sentence: the key that was meant instead of `key`, or all."""
    return did_you_mean(key, known) or f"; known: {', '.join(known)}"


def _elsewhere(key: str) -> str:
    """Return the end of a sentence that names the section whose option `key` is; "" if none or several have it."""
    sections = typing.get_type_hints(Config).items()
    found = [name for name, kind in sections if key in getattr(kind, "__struct_fields__", ())]
    return f"; did you mean {found[0]}.{key}?" if len(found) == 1 else ""


def readable(message: str) -> str:
    """Move the key to the front, which msgspec writes last: "… - at `$.kv.block_size`"."""
    text, at, where = message.partition(" - at `$")
    return f"{where.rstrip('`').lstrip('.')}: {text}" if at else message


def _check_keys(data: Any, struct: type[msgspec.Struct], origin: str, prefix: str) -> None:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{origin}: {prefix or 'top level'} must be a mapping, found {type(data).__name__}")
    hints = typing.get_type_hints(struct)
    for key, value in data.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if key not in hints:
            raise ConfigError(f"{origin}: unknown option {name!r}{_elsewhere(str(key)) or meant(str(key), hints)}")
        target = hints[key]
        if isinstance(target, type) and issubclass(target, msgspec.Struct):
            _check_keys(value, target, origin, name)
        elif typing.get_origin(target) is tuple and isinstance(value, list | tuple):
            element = typing.get_args(target)[0]
            if isinstance(element, type) and issubclass(element, msgspec.Struct):
                for index, item in enumerate(value):
                    _check_keys(item, element, origin, f"{name}[{index}]")


def _merge(into: dict[str, Any], new: Mapping[str, Any], below: Mapping[str, Any] | None = None) -> None:
    """Merge mappings key by key; lists and scalars replace. `below`: the layers under `into`."""
    for key, value in new.items():
        if key == "workers" and value == AUTO:
            groups = into.get(key) or (below or {}).get(key) or msgspec.to_builtins(Config().workers)
            into[key] = [{**group, "count": 0} for group in groups]
        elif isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value
