"""The parser of every command: help that names each default, and the nearest option where one is wrong."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

_UNKNOWN = "unrecognized arguments: "


class _Help(argparse.RawDescriptionHelpFormatter):
    """Text as it is written; behind an option's help its default, unless the help names it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = action.default in (None, False, "", 0, argparse.SUPPRESS) or isinstance(action.default, list)
        if silent or not action.option_strings or "default" in text or text == argparse.SUPPRESS:
            return action.help
        return f"{text} (default: %(default)s)".lstrip()


class Parser(argparse.ArgumentParser):
    equivalents: Mapping[str, str] = {}
    """Options here for those of another program; "": for a word that belongs to no option."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **{"formatter_class": _Help} | options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; an unknown option is an error of the command that it was written behind, not of the one before it."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(_UNKNOWN + " ".join(rest))
        return found, rest

    def error(self, message: str) -> NoReturn:
        """End with status 2, the usage, and what may have been meant."""
        if message.startswith(_UNKNOWN):
            wrong = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            here = self.equivalents.get(wrong if wrong.startswith("-") else "")
            message += f"; in Cohort: {here}" if here else did_you_mean(wrong, self._option_string_actions)
        super().error(message)


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the nearest known word; "" if none is near."""
    near = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
