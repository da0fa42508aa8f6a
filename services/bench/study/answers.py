"""Answers of the model that is served: asked for, kept, read again.

`collect` keeps lengths and prompt tokens, not the answers' texts, and goes on where it was interrupted. Called by
`command`; the predictor itself learns from what it serves.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from tokenizers import Tokenizer

from cohort.common.errors import ConfigError
from cohort.services.length_predictor.features import Facts

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
