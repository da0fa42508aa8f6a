"""`cohort bench study`: how well lengths can be predicted for the model that is served.

`collect` asks a running server for an answer to every prompt (greedy by default) and keeps lengths and prompt tokens,
not the answers' texts, in the cache folder; it goes on where it was interrupted. `report` trains on one part and
judges on a held-out part against always saying the mean, the median or max_tokens; with `--states` (written by
`states`) also the second prediction from the model's last hidden state. `latency` measures one prediction, with
`--training` while a training runs beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Literal, assert_never

import msgspec

from cohort.common.paths import cache_dir, default_model_dir

Task = Literal["collect", "states", "report", "latency"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    folder = cache_dir() / "length_predictor"
    commands = parser.add_subparsers(dest="task", metavar="TASK", required=True)
    asking = commands.add_parser("collect", help="ask a running server for answers")
    asking.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt, or instruction and input")
    asking.add_argument("--server", default="http://127.0.0.1:8000")
    asking.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    asking.add_argument("--tokenizer", type=Path, default=default_model_dir(), help="folder of the served model")
    asking.add_argument("--count", type=int, help="the first so many prompts; all by default")
    asking.add_argument("--max-tokens", type=int, default=512)
    asking.add_argument("--temperature", type=float, default=0.0)
    asking.add_argument("--concurrency", type=int, default=16)
    asking.add_argument("--api-key", default="")
    stating = commands.add_parser("states", help="compute the hidden states in which the prompts end")
    stating.add_argument("--output", type=Path, default=folder / "states.npz", help="default: %(default)s")
    stating.add_argument("--preset", default="unified", help="whose engine options")
    stating.add_argument("--threads", type=int, default=0, help="0 = as a worker of the preset")
    judging = commands.add_parser("report", help="train on one part, judge on the other")
    judging.add_argument("--held-out", type=float, default=0.2, help="share that is judged on")
    judging.add_argument("--states", type=Path, help="judge the second prediction too, from these hidden states")
    judging.add_argument("--json", action="store_true")
    timing = commands.add_parser("latency", help="time of one prediction on this core")
    timing.add_argument("--rounds", type=int, default=5000)
    timing.add_argument("--training", action="store_true", help="while another process trains, as the service's does")
    for command in (asking, stating, judging, timing):
        answers = folder / "answers.jsonl"
        command.add_argument("--cache", type=Path, default=answers, help="file of the answers (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """One task, from parsed options. Raises `CohortError`."""
    task: Task = args.task
    match task:
        case "collect":
            _collect(args)
        case "states":
            from cohort.services.bench.study.states import write_states

            _say(f"{write_states(args.cache, args.output, args.preset, args.threads)} states: {args.output}")
        case "report":
            _report(args)
        case "latency":
            _latency(args)
        case _:
            assert_never(task)
    return 0


def _collect(args: argparse.Namespace) -> None:
    from cohort.services.bench.study.answers import Asker, read_prompts

    texts = read_prompts(args.prompts, args.count)
    asker = Asker(
        args.server,
        args.tokenizer,
        chat=args.endpoint == "chat",
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        api_key=args.api_key,
    )
    fresh = asyncio.run(asker.collect(texts, args.cache, concurrency=args.concurrency))
    _say(f"{fresh} new answers, {len(texts)} in all: {args.cache}")


def _report(args: argparse.Namespace) -> None:
    from cohort.services.bench.study.answers import read_answers
    from cohort.services.bench.study.judging import read_states, report

    answers = read_answers(args.cache)
    judgements = report(answers, args.held_out, read_states(args.states) if args.states else None)
    if args.json:
        _say(json.dumps([msgspec.to_builtins(judgement) for judgement in judgements], indent=1))
        return
    _say(f"{len(answers)} answers, {args.held_out:.0%} held out")
    for judgement in judgements:
        _say(judgement)


def _latency(args: argparse.Namespace) -> None:
    from cohort.services.bench.study.answers import made_up_answers, read_answers
    from cohort.services.bench.study.judging import fit
    from cohort.services.bench.study.latency import latency, training_beside

    answers = read_answers(args.cache) or made_up_answers(2000)
    model = fit(answers)
    with training_beside(answers, args.training):
        found = latency(model, args.rounds)
    beside = ", trainings beside it" if args.training else ""
    _say(
        f"one prediction: median {found.median_ms:.3f} ms, p99 {found.p99_ms:.3f} ms by the clock, "
        f"p99 {found.cpu_p99_ms:.3f} ms of processor; {len(answers)} answers learned{beside}"
    )


def _say(text: object) -> None:
    """A line for the person at the terminal."""
    sys.stdout.write(f"{text}\n")
