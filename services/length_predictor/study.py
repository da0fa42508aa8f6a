"""How well lengths can be predicted for the model that is served, measured: collect answers, train, judge.

    python -m cohort.services.length_predictor.study collect --prompts alpaca.jsonl.gz --server http://127.0.0.1:8000
    python -m cohort.services.length_predictor.study report
    python -m cohort.services.length_predictor.study latency

`collect` asks a running server for an answer to every prompt (greedy by default) and keeps lengths and prompt tokens,
not the answers' texts, in the cache folder; it goes on where it was interrupted. `report` trains on one part and
judges on a held-out part against always saying the mean, the median or max_tokens; with `--states` (written by
`cohort.services.prefill_worker.answer_states`) also the second prediction from the model's last hidden state. `latency`
measures one prediction, with `--training` while a training runs beside it. Never part of serving; the service learns by
itself from what it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import math
import multiprocessing
import os
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cohort.common.errors import CohortError, ConfigError
from cohort.common.paths import cache_dir, default_model_dir
from cohort.common.types import Prediction
from cohort.services.length_predictor.buffer import Observation, ObservationBuffer
from cohort.services.length_predictor.features import Facts, extract
from cohort.services.length_predictor.judgement import Judgement, judge
from cohort.services.length_predictor.model import LengthModel, to_prediction
from cohort.services.length_predictor.refinement import Refiner
from cohort.services.length_predictor.trainer_process import NICENESS

Floats = NDArray[np.float64]
States = dict[int, NDArray[np.float16]]

_FOLDS = 5
_TRAINER_START_S = 300.0

ALPACA_TEMPLATE = (
    "Below is an instruction that describes a task{context}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The wording Alpaca models are trained with (about 63 tokens around the instruction)."""


class Answer(msgspec.Struct, frozen=True):
    """One line of the cache: a prompt as tokens, and how long its answer was."""

    index: int
    tokens: list[int]
    output_tokens: int
    max_tokens: int
    truncated: bool
    text_bytes: int
    temperature: float = 0.0
    chat: bool = True

    @property
    def facts(self) -> Facts:
        return Facts(self.tokens, self.chat, self.max_tokens, self.temperature, 0, self.text_bytes)


class _Prompt(msgspec.Struct):
    """A line of a prompt set: `prompt`, or `instruction` with an optional `input`."""

    prompt: str = ""
    instruction: str = ""
    input: str = ""

    @property
    def text(self) -> str:
        if self.prompt:
            return self.prompt
        context = ", paired with an input that provides further context" if self.input else ""
        given = f"### Input:\n{self.input}\n\n" if self.input else ""
        return ALPACA_TEMPLATE.format(context=context, instruction=self.instruction, input=given)


def read_prompts(path: Path, count: int | None) -> list[str]:
    """Raises `ConfigError` naming the line."""
    decoder = msgspec.json.Decoder(_Prompt)
    texts: list[str] = []
    for number, line in enumerate(_lines(path), 1):
        if count is not None and len(texts) == count:
            break
        try:
            prompt = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        if not (prompt.prompt or prompt.instruction):
            raise ConfigError(f"{path}:{number}: neither `prompt` nor `instruction`")
        texts.append(prompt.text)
    return texts


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def read_answers(path: Path) -> list[Answer]:
    """What `collect` has so far; a last line cut off by an interruption is left out. Raises `ConfigError`."""
    decoder = msgspec.json.Decoder(Answer)
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    answers = []
    for number, line in enumerate(lines, 1):
        if line:
            try:
                answers.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                if number < len(lines):
                    raise ConfigError(f"{path}:{number}: {error}") from error
    return answers


class Asker:
    """How answers are asked for: endpoint, limits, and the tokenizer that turns prompts into features."""

    def __init__(
        self, server: str, tokenizer: Path, *, chat: bool, max_tokens: int, temperature: float, api_key: str = ""
    ) -> None:
        self._url = server.rstrip("/") + ("/v1/chat/completions" if chat else "/v1/completions")
        self._chat = chat
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tokenizer = _tokenizer(tokenizer)

    async def collect(self, texts: Sequence[str], cache: Path, *, concurrency: int) -> int:
        """Ask for what is missing in `cache`; the number of new answers. Raises `ConfigError` when one is refused."""
        known = {answer.index for answer in read_answers(cache)}
        missing = [index for index in range(len(texts)) if index not in known]
        cache.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(cache)
        pending = iter(missing)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
        with cache.open("ab", buffering=0) as file:
            async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:

                async def user() -> None:
                    for index in pending:
                        file.write(msgspec.json.encode(await self._ask(session, index, texts[index])) + b"\n")

                try:
                    async with asyncio.TaskGroup() as tasks:
                        for _ in range(min(concurrency, len(missing))):
                            tasks.create_task(user())
                except* ConfigError as errors:
                    raise errors.exceptions[0] from None
        return len(missing)

    async def _ask(self, session: aiohttp.ClientSession, index: int, text: str) -> Answer:
        limits = {"max_tokens": self._max_tokens, "temperature": self._temperature}
        prompt = {"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text}
        try:
            async with session.post(self._url, json={**prompt, **limits}) as response:
                if response.status != 200:
                    raise ConfigError(f"{self._url}: {response.status} {(await response.text())[:200]}")
                reply: dict[str, Any] = await response.json()
        except aiohttp.ClientError as error:
            raise ConfigError(f"{self._url}: {error}") from error
        return Answer(
            index,
            self._tokenizer.encode(text).ids,
            reply["usage"]["completion_tokens"],
            self._max_tokens,
            reply["choices"][0]["finish_reason"] == "length",
            len(text.encode()),
            self._temperature,
            self._chat,
        )


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise ConfigError(f"--tokenizer {folder}: {error}") from error


def _end_last_line(cache: Path) -> None:
    """After an interruption in the middle of a line: drop that line."""
    data = cache.read_bytes() if cache.is_file() else b""
    if data and not data.endswith(b"\n"):
        cache.write_bytes(data[: data.rfind(b"\n") + 1])


def split(answers: Sequence[Answer], held_out: float, seed: int = 0) -> tuple[list[Answer], list[Answer]]:
    """Training and held-out part, drawn at random but the same for a seed."""
    order = np.random.default_rng(seed).permutation(len(answers))
    first = round(len(answers) * (1.0 - held_out))
    return [answers[i] for i in order[:first]], [answers[i] for i in order[first:]]


def fit(answers: Sequence[Answer]) -> LengthModel:
    """The model the service would have after these answers."""
    from cohort.services.length_predictor.training import train

    buffer = ObservationBuffer(len(answers))
    for answer in answers:
        length = max(1, answer.output_tokens)
        buffer.add(Observation(extract(answer.facts), length, answer.max_tokens, answer.truncated))
    return train(buffer.dataset(), version=1)


def report(answers: Sequence[Answer], held_out: float, states: States | None = None) -> list[Judgement]:
    """The model against three guesses that need none, on answers it has not seen; with `states` also the refined
    prediction. Raises `ConfigError`."""
    if states is not None:
        answers = [answer for answer in answers if answer.index in states]
    known, unseen = split(answers, held_out)
    if len(known) < 20 or len(unseen) < 5:
        raise ConfigError(f"{len(answers)} answers are too few to learn and judge from")
    model = fit(known)
    predictions = [to_prediction(model.predict_log(extract(answer.facts)), answer.max_tokens) for answer in unseen]
    real = np.array([answer.output_tokens for answer in unseen], dtype=np.float64)
    seen = np.array([answer.output_tokens for answer in known], dtype=np.float64)
    count = len(unseen)

    def guess(value: float, p90: float) -> tuple[Floats, Floats]:
        return np.full(count, value), np.full(count, p90)

    p90 = float(np.quantile(seen, 0.9))
    limit = np.array([float(answer.max_tokens) for answer in unseen])
    ours = np.array([p.mean for p in predictions]), np.array([p.p90 for p in predictions])
    refined: list[Judgement] = []
    if states is not None:
        second = refine(known, unseen, [math.log(p.mean) for p in predictions], states)
        p90s = np.array([p.p90 for p in second])
        refined = [
            judge("refined", np.array([p.mean for p in second]), p90s, real),
            judge("refined median", np.array([p.p50 for p in second]), p90s, real),
        ]
    return [
        judge("model", *ours, real),
        judge("model's median", np.array([p.p50 for p in predictions]), ours[1], real),
        *refined,
        judge("mean", *guess(float(seen.mean()), p90), real),
        judge("median", *guess(float(np.median(seen)), p90), real),
        judge("max_tokens", limit, limit, real),
    ]


def refine(
    known: Sequence[Answer], unseen: Sequence[Answer], base_log_means: Sequence[float], states: States
) -> list[Prediction]:
    """E4 · what the second prediction says of the unseen after all known requests have finished, in any order.

    Live it learns from first predictions made before the answer was known; so here a known answer's first prediction
    comes from a model that was fitted without it.
    """
    refiner = Refiner(len(states[known[0].index]))
    for fold in range(_FOLDS):
        model = fit([answer for i, answer in enumerate(known) if i % _FOLDS != fold])
        for answer in known[fold::_FOLDS]:
            base = to_prediction(model.predict_log(extract(answer.facts)), answer.max_tokens)
            state = states[answer.index].astype(np.float64)
            length = max(1, answer.output_tokens)
            refiner.learn(math.log(base.mean), state, length, answer.max_tokens, answer.truncated)
    return [
        to_prediction(refiner.predict_log(base, states[answer.index].astype(np.float64)), answer.max_tokens)
        for answer, base in zip(unseen, base_log_means, strict=True)
    ]


def read_states(path: Path) -> States:
    """Hidden states by the index of their prompt. Raises `ConfigError`."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            return dict(zip(saved["index"].tolist(), saved["states"], strict=True))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"--states {path}: {error}") from error


class Latency(msgspec.Struct, frozen=True):
    """Of one prediction, features included, in milliseconds: by the clock and in processor time of this thread."""

    median_ms: float
    p99_ms: float
    cpu_p99_ms: float


def latency(model: LengthModel, rounds: int = 5000, prompt_tokens: int = 512) -> Latency:
    """One prediction after the other on this core, for prompts of `prompt_tokens`."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 50_000, size=prompt_tokens).tolist() for _ in range(64)]
    wall, cpu = [], []
    for index in range(rounds):
        facts = Facts(prompts[index % len(prompts)], True, 1024, 1.0, 0, 4 * prompt_tokens)
        started, started_cpu = time.perf_counter(), time.thread_time()
        to_prediction(model.predict_log(extract(facts)), facts.max_tokens)
        cpu.append(1e3 * (time.thread_time() - started_cpu))
        wall.append(1e3 * (time.perf_counter() - started))
    return Latency(float(np.median(wall)), float(np.quantile(wall, 0.99)), float(np.quantile(cpu, 0.99)))


@contextmanager
def training_beside(answers: Sequence[Answer], wanted: bool) -> Iterator[None]:
    """Within, if wanted, another process trains over and over, at the priority the service gives it."""
    if not wanted:
        yield
        return
    spawn = multiprocessing.get_context("spawn")
    trains = spawn.Event()
    trainer = spawn.Process(target=_train_for_ever, args=(answers, trains), daemon=True)
    trainer.start()
    try:
        if not trains.wait(_TRAINER_START_S):
            raise ConfigError(f"no training began within {_TRAINER_START_S:.0f} s")
        yield
    finally:
        trainer.kill()
        trainer.join()


def _train_for_ever(answers: Sequence[Answer], trains: Event) -> None:
    os.nice(NICENESS)
    while True:
        fit(answers)
        trains.set()  # from the second on; the first also loads the libraries


def made_up_answers(count: int, seed: int = 0) -> list[Answer]:
    """For a measurement without a collection: lengths that depend on one token of the prompt."""
    draw = np.random.default_rng(seed)
    answers = []
    for index in range(count):
        kind = int(draw.integers(0, 4))
        tokens = [kind, *draw.integers(10, 30_000, size=int(draw.integers(5, 60))).tolist()]
        length = max(1, round(20 * 3**kind * float(np.exp(draw.normal(0.0, 0.3)))))
        answers.append(Answer(index, tokens, min(length, 1024), 1024, length > 1024, 4 * len(tokens)))
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    cache = options.cache or cache_dir() / "length_predictor" / "answers.jsonl"
    try:
        match options.command:
            case "collect":
                texts = read_prompts(options.prompts, options.count)
                asker = Asker(
                    options.server,
                    options.tokenizer,
                    chat=options.endpoint == "chat",
                    max_tokens=options.max_tokens,
                    temperature=options.temperature,
                    api_key=options.api_key,
                )
                fresh = asyncio.run(asker.collect(texts, cache, concurrency=options.concurrency))
                _say(f"{fresh} new answers, {len(texts)} in all: {cache}")
            case "report":
                answers = read_answers(cache)
                states = read_states(options.states) if options.states else None
                judgements = report(answers, options.held_out, states)
                if options.json:
                    _say(json.dumps([msgspec.to_builtins(judgement) for judgement in judgements], indent=1))
                else:
                    _say(f"{len(answers)} answers, {options.held_out:.0%} held out")
                    for judgement in judgements:
                        _say(judgement)
            case _:
                answers = read_answers(cache) or made_up_answers(2000)
                model = fit(answers)
                with training_beside(answers, options.training):
                    found = latency(model, options.rounds)
                beside = ", trainings beside it" if options.training else ""
                _say(
                    f"one prediction: median {found.median_ms:.3f} ms, p99 {found.p99_ms:.3f} ms by the clock, "
                    f"p99 {found.cpu_p99_ms:.3f} ms of processor; {len(answers)} answers learned{beside}"
                )
    except CohortError as error:
        sys.stderr.write(f"study: {error}\n")
        return 2
    return 0


def _say(text: object) -> None:
    """A line for the person at the terminal."""
    sys.stdout.write(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cohort.services.length_predictor.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
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
    judging = commands.add_parser("report", help="train on one part, judge on the other")
    judging.add_argument("--held-out", type=float, default=0.2, help="share that is judged on")
    judging.add_argument("--states", type=Path, help="judge the second prediction too, from these hidden states")
    judging.add_argument("--json", action="store_true")
    timing = commands.add_parser("latency", help="time of one prediction on this core")
    timing.add_argument("--rounds", type=int, default=5000)
    timing.add_argument("--training", action="store_true", help="while another process trains, as the service's does")
    for command in (asking, judging, timing):
        command.add_argument("--cache", type=Path, help="file of the answers; default: in Cohort's cache folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
