"""scripts/opponents: its help, which measurements count, and the table of those that do. No opponent is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.benchmarks.figures import ATTEMPTS, FOREIGN_LIMIT, Measurement, table

ROOT = Path(__file__).resolve().parents[2]


def measurement(server: str, number: int, rate: float, *, foreign: float = 0.0, attempt: int = 1, whole: int = 8):
    return Measurement(
        round=number,
        sampling="greedy",
        users=4,
        server=server,
        attempt=attempt,
        output_tokens_per_s=rate,
        ttft_p50_ms=50.0,
        tpot_p50_ms=10.0,
        sent=8,
        whole=whole,
        duration_s=5.0,
        foreign=foreign,
    )


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Where Cohort has no environment."""
    command = [str(ROOT / "scripts" / "opponents"), *arguments]
    environment = {**os.environ, "COHORT_VENV": "/nowhere"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_the_help_states_the_rule() -> None:
    done = script("--help")
    assert done.returncode == 0
    assert f"more than {FOREIGN_LIMIT:.0%} foreign load".replace("%", " %") in " ".join(done.stdout.split())
    assert "repeated at most twice" in " ".join(done.stdout.split()) and ATTEMPTS == 3


@pytest.mark.parametrize("arguments", [(), ("measured",), ("make",), ("make", "--force")])
def test_wrong_arguments_show_the_help(arguments: tuple[str, ...]) -> None:
    done = script(*arguments)
    assert done.returncode == 2
    assert "scripts/opponents make FOLDER" in done.stderr


@pytest.mark.parametrize(
    ("foreign", "attempt", "whole", "verdict", "repeat"),
    [
        (0.10, 1, 8, "keep", False),
        (0.11, 1, 8, "disturbed", True),
        (0.11, 2, 8, "disturbed", True),
        (0.11, 3, 8, "disturbed", False),
        (0.02, 1, 7, "failed", False),
    ],
)
def test_what_counts_and_what_is_repeated(foreign: float, attempt: int, whole: int, verdict: str, repeat: bool) -> None:
    found = measurement("cohort", 1, 100.0, foreign=foreign, attempt=attempt, whole=whole)
    assert (found.verdict, found.repeat) == (verdict, repeat)


def test_the_table_has_medians_and_ratios_of_rounds() -> None:
    rates = {"cohort": (200.0, 300.0, 240.0), "cohort, no drafts": (180.0, 190.0, 170.0), "other": (100.0, 100.0, 80.0)}
    found = [measurement(name, number, rate) for name, of in rates.items() for number, rate in enumerate(of, 1)]
    found += [measurement("slow", 1, 10.0, foreign=0.5), measurement("slow", 1, 50.0, attempt=2)]
    found += [measurement("slow", 2, 20.0, foreign=0.5, attempt=ATTEMPTS), measurement("broken", 1, 9.0, whole=0)]
    assert table(found, [*rates, "slow", "broken"]).splitlines()[2:] == [
        "| greedy | 4 | 240 (200–300) | 180 (170–190) | 100 (80–100) | 50 | – | 3.00 (2.00–3.00) | 4.00 | – |"
    ]
