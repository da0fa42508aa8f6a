"""The command that measures a whole manager runs and says what it should; how fast is not tested."""

from __future__ import annotations

import json

import pytest

from cohort.services.bench.__main__ import main
from tests.examples import another_of_its_kind

SMALL = ["--workers", "2", "40", "--waiting", "10", "60", "--seconds", "0.1"]


@pytest.mark.parametrize(
    "preset",
    [
        "cohort",
        *(pytest.param(name, marks=another_of_its_kind()) for name in ("disaggregated", "bucketserve", "unified")),
    ],
)
def test_every_width_is_measured(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decisions", "width", "--preset", preset, *SMALL, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["workers"], row["waiting"]) for row in rows] == [(2, 10), (2, 60), (40, 10), (40, 60)]
    assert all(0.0 < row["decision_us"] <= row["decision_p99_us"] and row["core_share"] > 0.0 for row in rows)


@another_of_its_kind()
def test_the_exit_status_tells_whether_it_is_flat(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--workers", "2", "4", "--waiting", "10", "--seconds", "0.1"]
    assert main(["decisions", "width", *few, "--within", "1000000"]) == 0
    assert main(["decisions", "width", *few, "--within", "0.5"]) == 1
    assert "largest median / smallest" in capsys.readouterr().err
