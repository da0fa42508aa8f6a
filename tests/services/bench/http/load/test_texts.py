"""The texts of `--workload`: made by a seed, and each repeats what its name says."""

from __future__ import annotations

import re

import pytest

from cohort.services.bench.http.arguments import add_arguments
from cohort.services.bench.http.load.texts import TEXT_WORKLOADS, rows_of


@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_a_seed_makes_the_same_texts_and_another_does_not(name: str) -> None:
    assert name in TEXT_WORKLOADS
    rows = rows_of(name, 1)
    assert rows == rows_of(name, 1)
    assert len({row.text for row in rows}) == len(rows) == 32
    assert {row.category for row in rows} == {name}
    assert (rows == rows_of(name, 2)) is (name == "chat")  # questions are listed, all else is drawn


def test_the_answer_stands_in_the_prompt() -> None:
    for row in rows_of("retrieval", 0):
        asked = row.text.split("\n\n")[1].split(". What", 1)[0]
        assert len(re.findall(re.escape(asked), row.text)) == 2  # in its passage, and in the question
    for row in rows_of("edit", 0):
        assert row.text.count("return found") == 5
        compile(row.text.split("```")[1].removeprefix("python\n"), "edit", "exec")
    assert all("word for word" in row.text for row in rows_of("quote", 0))


def test_the_command_line_offers_them_all() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name in TEXT_WORKLOADS:
        assert parser.parse_args(["--workload", name]).workload == name
    with pytest.raises(SystemExit):
        parser.parse_args(["--workload", "other"])
