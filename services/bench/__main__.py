"""`python -m cohort.services.bench`, and what `cohort bench` runs: finds what is to be measured and hands over to it.

The first word says what; where there is none, a server is measured over HTTP. To add a measurement: a module with
`add_arguments(parser)` and `run(args) -> int`, and a line in `COMMANDS`. Called by `services/cli/__main__.py`.

Exit status: 0 measured, 1 nothing could be, 2 wrong options or no usable server, 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from cohort.common.command_line import Parser, did_you_mean
from cohort.common.errors import CohortError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

HTTP = "http"
_ROOT = "cohort.services.bench"
COMMANDS = {
    HTTP: (f"{_ROOT}.http.command", "any OpenAI-style server (the same as without a command)", ""),
    "chaos": (
        f"{_ROOT}.chaos.command",
        "processes broken under clients that compare (the same as `cohort chaos`)",
        "--kill gateway decode --json chaos.json",
    ),
    "engine": (f"{_ROOT}.engine.command", "the CPU engine's steps against their floors, and taken apart", "--quick"),
    "host-time": (f"{_ROOT}.engine.host_time_command", "the host's part of a decode step, by rows", "--rows 1 8 32"),
    "token-cost": (
        f"{_ROOT}.tokens.command",
        "processor time per streamed token and short request, around an engine that costs nothing",
        "--streams 64 256 --tokens-per-s 4000",
    ),
    "mixed-lengths": (
        f"{_ROOT}.engine.mixed_lengths_command",
        "what mixed prefix lengths cost in one step",
        "--rounds 3",
    ),
    "links": (f"{_ROOT}.links", "the KV links of this machine against ucx_perftest", "--quick"),
    "decisions": (f"{_ROOT}.decisions.command", "what one decision of a policy costs", "placement"),
    "operators": (
        f"{_ROOT}.fit.operators_command",
        "the simulator's operators of GPUs beside measured ones",
        "FOLDER --fit",
    ),
    "gpu-check": (f"{_ROOT}.gpu_check.frame.runner", "prove and measure everything that needs a GPU", "--dry-run"),
}


def main(arguments: Sequence[str] | None = None, prog: str = "") -> int:
    """Run `cohort bench` with these words; its exit code. `prog`: its name in help, if it was called by another."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        name = _named(words)
        command = importlib.import_module(COMMANDS[name][0])
        _, summary, example = COMMANDS[name]
        parser = Parser(
            prog=prog or (f"cohort bench {name}" if words[:1] == [name] else "cohort bench"),
            description=f"Measure {summary}.",
        )
        parser.epilog = f"example:\n  {parser.prog} {example}"
        command.add_arguments(parser)
        if words[:1] != [name]:
            parser.epilog = f"{parser.epilog}\n{_others()}"
        code: int = command.run(parser.parse_args(words[1:] if words[:1] == [name] else words))
        return code
    except CohortError as error:
        _complain(error)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _named(words: Sequence[str]) -> str:
    """Return the command's name. Raises `CohortError` for a first word that is none."""
    first = words[0] if words else ""
    if not first or first.startswith("-"):
        return HTTP
    if first not in COMMANDS:
        near = did_you_mean(first, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise CohortError(f"cohort bench {first}: no such measurement{near}")
    return first


def _others() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  cohort bench {name:<{width}}  {summary}" for name, (_, summary, _) in COMMANDS.items()]
    return "\n".join(["what else can be measured (each with --help):", *lines])


def _complain(error: CohortError) -> None:
    """Print an error in colour, where there is one: a wrong option is what a person most often meets here."""
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
