"""Prompt sets: the fields public ones use; every wrong row is refused with its name and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.errors import ConfigError
from cohort.services.bench.http.load.datasets import DatasetRow, read_dataset


def write(folder: Path, text: str, name: str = "prompts") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_dataset_fields(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "\n".join(
            (
                '{"prompt": "a"}',
                '{"instruction": "b", "input": "c", "ref_output_tokens_approx": 9}',
                '{"turns": ["d", "later"], "category": "writing", "ref_output_tokens_approx": [4, 8]}',
                '{"messages": [{"role": "system", "content": "e"}, {"role": "user", "content": "f"}], '
                '"output_tokens": 3}',
            )
        ),
    )
    assert read_dataset(path) == (
        DatasetRow((("user", "a"),)),
        DatasetRow((("user", "b\n\nc"),), 9),
        DatasetRow((("user", "d"),), 4, "writing"),
        DatasetRow((("system", "e"), ("user", "f")), 3),
    )
    assert len(read_dataset(path, limit=2)) == 2


@pytest.mark.parametrize("bad", ["{", '{"answer": "x"}', '{"prompt": ""}', '{"prompt": 5}', '{"turns": []}'])
def test_wrong_dataset_rows_are_named(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path, '{"prompt": "fine"}\n' + bad, "prompts.jsonl")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: not a prompt"):
        read_dataset(path)
