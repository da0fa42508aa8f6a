"""`cohort bench train-head`: an EAGLE head for a model, from texts or from questions that the model asks itself.

The model's engine computes its final states in the texts, answers included, and keeps them in OUTPUT/states; a head is
trained to go on from them and written to OUTPUT, which `speculation.draft_model` takes. The same command again goes on:
with more texts, from the head that is there. Every twentieth text is held out, and says how often drafts are right.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.common.errors import ConfigError

if TYPE_CHECKING:
    from cohort.services.bench.heads.collecting import Collector, Text, Work
    from cohort.services.bench.heads.texts import Texts

EXAMPLES = """\
examples:
  cohort bench train-head --output ~/heads/smollm2 --chats 1000
  cohort bench train-head --output ~/heads/smollm2 --texts questions.jsonl docs/ --minutes 30
  cohort bench train-head --output ~/heads/smollm2 --epochs 4            # goes on with what was collected
  cohort serve --speculation model --set speculation.draft_model=$HOME/heads/smollm2"""

_HELD_OUT = 20
_QUESTION = 64
"""Tokens of a question, at most."""
_TEMPERATURES = (0.0, 0.7)
"""Of answers, in turn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = __doc__, EXAMPLES
    parser.add_argument("--output", type=Path, required=True, help="folder of the head, and of what is collected")
    parser.add_argument("--model", type=Path, help="folder of the model (default: the default model)")
    parser.add_argument("--config", type=Path, action="append", default=[], help="configuration file, repeatable")
    what = parser.add_argument_group("what it learns from")
    what.add_argument("--chats", type=int, default=0, help="questions that the model makes up and answers")
    what.add_argument(
        "--texts",
        type=Path,
        nargs="+",
        default=[],
        help=".txt .md .rst .py as they are; .jsonl with text, prompt or messages, what a user asks being answered",
    )
    what.add_argument("--length", type=int, default=256, help="tokens of a text (default %(default)s)")
    how = parser.add_argument_group("how")
    how.add_argument("--minutes", type=float, default=10.0, help="collecting and training, each at most (%(default)g)")
    how.add_argument("--epochs", type=int, default=8, help="0 = only collect (default %(default)s)")
    how.add_argument("--rows", type=int, default=4, help="texts of a step (default %(default)s)")
    how.add_argument("--rate", type=float, default=1e-3, help="learning rate (default %(default)g)")
    how.add_argument("--noise", type=float, default=0.1, help="on the states (default %(default)g)")
    how.add_argument("--cross-entropy", type=float, default=0.1, help="its weight in the loss (default %(default)g)")
    how.add_argument(
        "--tokens", type=int, default=16384, help="it drafts from the most frequent; 0 = from all (default %(default)s)"
    )
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--threads", type=int, default=0, help="0 = all cores")


def run(args: argparse.Namespace) -> int:
    """Raises `CohortError`."""
    import torch

    from cohort.common.config import load_config
    from cohort.common.engine.weights.linear import native_bfloat16
    from cohort.common.engine.worker.worker_process import load_runner, model_folder
    from cohort.services.bench.heads.collecting import Collector, read_texts, write_texts
    from cohort.services.bench.heads.texts import Texts
    from cohort.services.bench.heads.training import Head, Options, begin, frequent, judge, train

    model = {"model": {"path": str(args.model)}} if args.model else {}
    config = load_config(args.config, preset="unified", overrides={"kv": {"prefix_caching": False}, **model})
    runner = load_runner(config, args.threads or len(os.sched_getaffinity(0)))
    collector = Collector(config, runner)
    folder, geometry = model_folder(config), runner.geometry
    files = sorted((args.output / "states").glob("*.safetensors"))
    if args.chats or args.texts:
        collected = _collected(args, collector, Texts(folder, args.length), geometry.eos_token_ids, len(files))
        files.append(args.output / "states" / f"{len(files):04}.safetensors")
        write_texts(collected, files[-1])
    if not files:
        raise ConfigError(f"nothing to learn from in {args.output / 'states'}: give --chats or --texts")
    if not args.epochs:
        return 0
    texts = [text for file in files for text in read_texts(file, geometry.hidden_size) if len(text.tokens) > 2]
    held_out, learned = texts[::_HELD_OUT], [text for index, text in enumerate(texts) if index % _HELD_OUT]
    if not learned:
        raise ConfigError(f"{len(texts)} texts are too few to learn from: give more --chats or --texts")
    embedding, product = collector.outer()
    drafted = torch.arange(geometry.vocab_size)
    if 0 < args.tokens < len(drafted):
        drafted = frequent(learned, args.tokens, geometry.eos_token_ids, geometry.vocab_size)
        product = product[drafted].contiguous()
    head = Head(folder)
    if (args.output / "config.json").is_file():
        head.read(args.output)
        _say(f"goes on from the head in {args.output}")
    else:
        begin(head, embedding, learned)
    tokens = sum(len(text.tokens) for text in learned)
    _say(f"{len(learned)} texts, {tokens} tokens, drafts from {len(drafted)} of {geometry.vocab_size} tokens")
    options = Options(
        epochs=args.epochs,
        minutes=args.minutes,
        rows=args.rows,
        rate=args.rate,
        noise=args.noise,
        cross_entropy=args.cross_entropy,
        bfloat16=native_bfloat16(),
        seed=args.seed,
    )
    train(head, embedding, product, learned, options, _say)
    head.write(args.output, (drafted, product) if len(drafted) < geometry.vocab_size else None)
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
        shares = judge(head, embedding, product, drafted, held_out)
    shown = ", ".join([f"{share:.0%}" for share in shares])
    a_step = 1 + sum(itertools.accumulate(shares, lambda before, share: before * share))
    _say(f"held out: right at depth 1 to {len(shares)}, where drafts before are: {shown}; {a_step:.2f} tokens a step")
    _say(f"{args.output}: serve it with --speculation model --set speculation.draft_model={args.output}")
    return 0


def _collected(
    args: argparse.Namespace, collector: Collector, texts: Texts, ends: tuple[int, ...], before: int
) -> list[Text]:
    """As many as `--minutes` allow."""
    from cohort.common.types import SamplingParams
    from cohort.services.bench.heads.collecting import Work
    from cohort.services.bench.heads.texts import Prompt

    seeds = itertools.count((args.seed << 40) + (before << 24))
    began_s, said_s = time.monotonic(), 0.0
    what = "questions"

    def goes_on(tokens: int) -> bool:
        nonlocal said_s
        passed_s = time.monotonic() - began_s
        if passed_s - said_s > 10:
            said_s = passed_s
            _say(f"{what}: {tokens} tokens, {passed_s:.0f} s")
        return bool(passed_s < 60 * args.minutes)

    prompts = texts.read(args.texts)
    if args.chats:
        first, end = texts.question()
        ends = (*ends, end)
        asking = [
            SamplingParams(max_tokens=_QUESTION, seed=next(seeds), stop_token_ids=ends) for _ in range(args.chats)
        ]
        asked = collector.run([Work(first, params, 0) for params in asking], goes_on)
        words = {
            tuple(each.tokens[len(first) :].tolist()) for each in asked if len(each.tokens) < len(first) + _QUESTION - 1
        }
        prompts += [texts.asked(each) for each in sorted(words)]
    what = "texts"

    def work(each: Prompt, temperature: float) -> Work:
        room = args.length - len(each.tokens)
        if not each.answered or room < 1:
            return Work(each.tokens, SamplingParams(max_tokens=1, temperature=0.0), 0)
        params = SamplingParams(max_tokens=room, temperature=temperature, seed=next(seeds), stop_token_ids=ends)
        return Work(each.tokens, params, len(each.tokens))

    return collector.run([work(each, _TEMPERATURES[i % 2]) for i, each in enumerate(prompts)], goes_on)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
