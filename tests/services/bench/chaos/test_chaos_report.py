"""Rows of a kill table find their places on a page that has one."""

from __future__ import annotations

import pytest

from cohort.common.errors import ConfigError
from cohort.services.bench.chaos.report import Row, as_markdown, merged


def row(preset: str, killed: str, requests: int = 800) -> Row:
    return Row(
        preset=preset,
        killed=killed,
        kills=1,
        requests=requests,
        failed=0,
        elsewhere=0,
        resumed=0,
        wrong=0,
        longest_pause_s=0.05,
        longest_ttft_s=0.06,
        back_s=1.0,
        seconds=9.0,
    )


def page(*rows: Row) -> str:
    other, table = "| other | table |\n|---|---|\n| bros | none |\n", as_markdown(rows)
    return f"# Kills\n\n{other}\n{table}\nWords.\n\n{table}"


def test_rows_stand_instead_of_their_likes_behind_their_presets_and_at_the_end() -> None:
    known = [row("cohort", "none"), row("cohort", "gateway"), row("bros", "none")]
    found = merged(page(*known), [row("bros", "none", 320), row("cohort", "decode"), row("unified", "none")])
    wanted = [known[0], known[1], row("cohort", "decode"), row("bros", "none", 320), row("unified", "none")]
    assert found == page(*wanted)[: page(*wanted).index("Words.")] + page(*known)[page(*known).index("Words.") :]


def test_a_second_time_changes_nothing() -> None:
    rows = [row("bros", "none"), row("bros", "gateway")]
    once = merged(page(row("cohort", "none")), rows)
    assert merged(once, rows) == once and merged(once, ()) == once


def test_a_page_without_such_a_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="no kill table"):
        merged("# Kills\n\n| preset | killed |\n|---|---|\n", ())
