"""`cohort advise --regret`: pairs are drawn alike each time, kept, and compared with every set-up."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest

from cohort.services.cli.__main__ import main
from cohort.services.simulator.advise import regret
from cohort.services.simulator.advise.regret import Pair, drawn
from tests.examples import nightly


def pair(number: int, asked: list[str], kept: float) -> Pair:
    return Pair(number, "traffic", asked, 7, "cohort (2 unified)", "unified (2 unified)", kept, 0.9, (1.0, 2.0))


def test_a_share_is_of_the_best() -> None:
    assert pair(0, [], 0.45).share == 0.5
    assert msgspec.structs.replace(pair(0, [], 0.0), most=0.0).share == 1.0


def test_known_pairs_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[int] = []

    def measure(number: int, asked: list[str], jobs: int) -> Pair:
        measured.append(number)
        return pair(number, asked, 0.9 - 0.3 * number)

    monkeypatch.setattr(regret, "_measured", measure)
    monkeypatch.setattr(regret, "drawn", lambda random: [str(random.random())])
    file = tmp_path / "pairs.jsonl"
    assert main(["advise", "--regret", "1", "--results", str(file)]) == 0
    assert main(["advise", "--regret", "2", "--results", str(file)]) == 0
    said = capsys.readouterr().out
    assert measured == [0, 1] and len(file.read_bytes().splitlines()) == 2
    assert "1 of 2 keep 0.98 of the best; lowest 0.667" in " ".join(said.split())


def test_a_pair_is_drawn_from_its_seed_alone() -> None:
    asked = drawn(Random("0/0"))
    assert asked == drawn(Random("0/0")) != drawn(Random("0/1"))
    options = regret._options(asked, 1)
    assert options.rate > 0 and options.slo.startswith("ttft=") and ",tpot=" in options.slo


@pytest.mark.slow
@pytest.mark.skipif(not nightly(), reason="an hour: scripts/test --nightly")
def test_the_advised_keeps_what_the_best_of_all_keeps() -> None:
    pairs = regret.measure(2, 0, 2, None, lambda line: None)
    assert all(each.share >= regret.ENOUGH for each in pairs), pairs
    assert all(each.setups > 20 and 0.0 < each.most <= 1.0 for each in pairs)
