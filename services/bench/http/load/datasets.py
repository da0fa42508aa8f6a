"""Reads real prompts (JSON lines, plain or gzip) for `--dataset`.

Called once at start. Understands the fields that public prompt sets use and refuses a row without any, naming its line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from cohort.common.errors import ConfigError
from cohort.common.workloads.files import reading


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One conversation: (role, content) pairs. `output_tokens` 0: the row does not say how long the answer should
    be."""

    messages: tuple[tuple[str, str], ...]
    output_tokens: int = 0
    category: str = ""

    @property
    def text(self) -> str:
        """For endpoints without roles."""
        return "\n\n".join(content for _, content in self.messages)


class _Message(msgspec.Struct):
    role: str
    content: str


class _Row(msgspec.Struct):
    """`prompt`, `text`, `instruction` (+ `input`), `turns` (the first is asked) or `messages`; one of them."""

    prompt: str | None = None
    text: str | None = None
    instruction: str | None = None
    input: str | None = None
    turns: list[str] | None = None
    messages: list[_Message] | None = None
    output_tokens: int | None = None
    ref_output_tokens_approx: int | list[int] | None = None  # a list holds one length per turn
    category: str | None = None


def read_dataset(path: Path, limit: int | None = None) -> tuple[DatasetRow, ...]:
    decoder = msgspec.json.Decoder(_Row)
    rows: list[DatasetRow] = []
    with reading(path) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                rows.append(_row(decoder.decode(text)))
            except (msgspec.MsgspecError, ValueError) as error:
                raise ConfigError(f"{path}:{line}: not a prompt: {error}") from error
            if limit is not None and len(rows) >= limit:
                break
    if not rows:
        raise ConfigError(f"{path}: no prompt in it")
    return tuple(rows)


def _row(row: _Row) -> DatasetRow:
    reference = row.ref_output_tokens_approx
    if isinstance(reference, list):
        reference = reference[0] if reference else None
    output_tokens = row.output_tokens or reference or 0
    if output_tokens < 0:
        raise ValueError("output_tokens must not be negative")
    if row.messages:
        messages = tuple((message.role, message.content) for message in row.messages)
    else:
        question = row.prompt or row.text or row.instruction or (row.turns[0] if row.turns else None)
        if not question:
            raise ValueError("needs one of prompt, text, instruction, turns, messages")
        messages = (("user", f"{question}\n\n{row.input}" if row.input else question),)
    return DatasetRow(messages, output_tokens, row.category or "")
