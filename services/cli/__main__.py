"""`cohort`: the one console command. Finds the subcommand, runs it, turns its errors into one line and an exit code.

Subcommands are listed here and imported when the command line names them (help needs only their summaries), so that
`cohort --help` answers at once and a part that is not installed breaks only itself.

To add one: a module beside this one with `add_arguments(parser)`, `run(options) -> int`, `DESCRIPTION` and `EPILOG`
where there is more to say; and a line in `COMMANDS`. What has `main(words) -> int` instead has commands of its own and
parses the words after its name itself (`bench`). Commands that need no running pipeline are programs of
`services/simulator/` and `services/bench/`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from cohort import __version__
from cohort.common.errors import CohortError

COMMANDS = {
    "serve": "start a whole pipeline on this machine and watch over it",
    "status": "what is running: throughput, latencies, SLOs, processes, queues, KV use",
    "doctor": "what is wrong with this machine or a running pipeline, and the cure",
    "log-level": "change what running processes write into their logs",
    "keys": "API keys of clients; and the key that a pipeline over TCP encrypts with",
    "restart": "restart the processes of a running pipeline one after the other, without a lost request",
    "chaos": "kill one process of each kind under clients, and tell what they saw",
    "bench": "measure any OpenAI-style server, and everything of ours that can be measured",
    "simulate": "replay traffic on a cluster that need not exist",
    "advise": "which preset, roles and settings suit a traffic and a cluster",
    "compare": "systems side by side over workloads, loads and seeds, simulated or live",
    "reproduce": "the papers' figures beside ours, from several seeds",
    "traces": "real traffic that comes with Cohort; other people's traces converted",
    "replay": "check or step through what live processes recorded",
    "profile": "measure this machine: a device and a cluster for the simulator",
}

_SIMULATED = ("advise", "compare", "replay", "reproduce", "simulate")
_MEASURED = {"bench": (), "chaos": ("chaos",)}
"""Commands of `services.bench`, and how it calls them."""

DESCRIPTION = """\
Cohort serves large language models as a pipeline of small processes: a gateway with the OpenAI API, workers that run
the model, and around them a length predictor, a bucketing manager and a monitor."""

EPILOG = """\
first steps:
  cohort serve                       serve the default model on http://127.0.0.1:8000
  cohort serve --model ~/models/Qwen2.5-7B-Instruct
  cohort status --watch              look at it, in another terminal (or open http://127.0.0.1:8001)
  cohort bench --help                measure it

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'

`cohort COMMAND --help` explains a command and its options.
Exit codes: 0 fine, 1 failed, 2 a wrong option or configuration, 3 no pipeline is running, 130 interrupted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the process's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given and not given[0].startswith("-") else ""
    try:
        if name not in COMMANDS:
            _top(name).parse_args(given)
            _top().print_help()
            return 0
        module = _module(name)
        if hasattr(module, "main"):
            code: int = module.main(given[1:])
        else:
            code = module.run(_parser(name, module).parse_args(given[1:]))
        return code
    except CohortError as error:
        print(f"cohort {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _top(wrong: str = "") -> argparse.ArgumentParser:
    """Return the parser of the command line without a command: its help. `wrong`: a word that is none."""
    parser = argparse.ArgumentParser(
        prog="cohort", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"cohort {__version__}")
    if wrong:
        from cohort.common.command_line import did_you_mean

        parser.error(f"there is no command {wrong}{did_you_mean(wrong, COMMANDS)}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


def _parser(name: str, module: Any) -> argparse.ArgumentParser:
    from cohort.common.command_line import Parser

    summary = COMMANDS[name]
    parser = Parser(
        prog=f"cohort {name}",
        description=getattr(module, "DESCRIPTION", f"{summary[0].upper()}{summary[1:]}."),
        epilog=getattr(module, "EPILOG", None),
    )
    module.add_arguments(parser)
    return parser


def _module(name: str) -> Any:
    """Return the subcommand's module, or a stand-in. Raises `CohortError` if this installation lacks a part."""
    try:
        if name in _MEASURED:
            from cohort.services.bench.__main__ import main

            first = _MEASURED[name]
            return SimpleNamespace(main=lambda words: main([*first, *words], f"cohort {name}" if first else ""))
        if name in _SIMULATED:
            from cohort.services.simulator import options

            return SimpleNamespace(
                add_arguments=getattr(options, f"add_{name}_arguments"),
                EPILOG=getattr(options, f"{name.upper()}_EPILOG", None),
                run=partial(_simulated, name),
            )
        return importlib.import_module(f"cohort.services.cli.{name.replace('-', '_')}")
    except ImportError as error:
        raise CohortError(
            f"`cohort {name}` is not usable in this installation: {error} "
            "(install the missing part, or run the repository's ./scripts/setup)"
        ) from error


def _simulated(name: str, options: argparse.Namespace) -> int:
    work = getattr(importlib.import_module("cohort.services.simulator.__main__"), f"run_{name}")
    if getattr(options, "live", False):  # `cohort compare --live`: pipelines run what the simulator would
        from cohort.services.bench.live.measured import measure

        work = partial(work, live=partial(measure, port=options.port))
    code: int = work(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
