"""A process uses the cores it may run on, and no more than its container's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.devices.cores import own_cores, usable_cores

ALL = len(own_cores())


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", ALL), ("100000 100000", 1), ("50000 100000", 1), ("999900000 100000", ALL), ("nonsense", ALL)],
)
def test_a_containers_limit_bounds_the_cores(tmp_path: Path, limit: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert usable_cores(tmp_path) == cores


def test_without_a_limit_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == ALL >= 1
