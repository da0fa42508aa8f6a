"""Tables of policies: the fields of an entry, and the check of a configuration against all of them.

`compose.py` holds the tables. Nothing here knows a policy by name. A policy from outside the tree is named by its
import path, "package.module:function"; the function is called as the table's builders are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from cohort.common.config import Config
from cohort.common.errors import ConfigError

Builder = TypeVar("Builder")


@dataclass(frozen=True, slots=True)
class Rule:
    """About another option, by its dotted name: the values that are needed, or those that are refused, and why."""

    option: str
    values: tuple[object, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Policy(Generic[Builder]):
    """One entry of a table. Not built unless all of `requires` and none of `refuses` hold."""

    build: Builder
    requires: tuple[Rule, ...] = ()
    refuses: tuple[Rule, ...] = ()


def chosen(interface: str, name: str, table: Mapping[str, Policy[Builder]]) -> Policy[Builder]:
    """The entry of this name, or one for an import path. Raises `ConfigError` with the option, and the known names or
    what was wrong with the import."""
    if name in table:
        return table[name]
    if ":" in name:
        return Policy(cast(Builder, _imported(f"policies.{interface} {name}", *name.split(":", 1))))
    raise ConfigError(
        f"policies.{interface}: no policy named {name!r}; there are: {', '.join(table)}, "
        "and any import path module:function"
    )


def _imported(subject: str, module: str, attribute: str) -> object:
    try:
        found: object = getattr(import_module(module), attribute)
    except Exception as error:  # the module is not the project's: importing it may raise anything
        raise ConfigError(f"{subject}: cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{subject}: {attribute} is of type {type(found).__name__}, not a function")
    return found


def check(config: Config, tables: Mapping[str, Mapping[str, Policy[Any]]]) -> None:
    """`tables`: by the option of section `policies` that names one of the entries. Raises `ConfigError` for an unknown
    name, else for the first rule that is broken, naming both options."""
    names = {interface: str(getattr(config.policies, interface)) for interface in tables}
    entries = {interface: chosen(interface, name, tables[interface]) for interface, name in names.items()}
    for interface, policy in entries.items():
        subject = f"policies.{interface} {names[interface]}"
        for rule in policy.requires:
            if _value(config, rule) not in rule.values:
                needed = " or ".join(_shown(value) for value in rule.values)
                raise ConfigError(f"{subject} needs {rule.option} {needed}: {rule.why}")
        for rule in policy.refuses:
            if (value := _value(config, rule)) in rule.values:
                raise ConfigError(f"{subject} does not go with {rule.option} {_shown(value)}: {rule.why}")


def _value(config: Config, rule: Rule) -> object:
    return reduce(getattr, rule.option.split("."), config)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
