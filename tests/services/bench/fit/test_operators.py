"""The shipped operators on measurements that no fit saw, and fits of made-up ones.

`tests/data/operators.csv.gz` holds them: medians of microsoft/vidur (commit e2d00e9 and later, MIT) and, of whole
iterations, Mutinifni/splitwise-sim (data/perf_model.csv, commit 8f99e7d, MIT), as `cohort bench operators --sample`
draws them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from cohort.common.policies.cost_model import DeviceShape
from cohort.common.policies.operators import Between, Decodes, Matrices, Operators, Prompts
from cohort.services.bench.__main__ import main
from cohort.services.bench.fit.operator_cells import Cell, held_out, read, sample, write
from cohort.services.bench.fit.operator_fit import fit_exchange, fit_host, fit_operators, predicted_s
from cohort.services.bench.fit.operators_command import errors
from cohort.services.simulator.hardware.hardware import load_cluster, load_exchanges

SAMPLE = Path(__file__).parents[3] / "data" / "operators.csv.gz"
SHA256 = "7a691cad53ebde63b451a57a3442a28905a2770eec21478786ed8d7c186db46b"
CELLS = read(SAMPLE)
ERRORS = errors(CELLS)


def test_the_sample_is_the_one_that_was_drawn_and_all_of_it_is_held_out() -> None:
    assert hashlib.sha256(SAMPLE.read_bytes()).hexdigest() == SHA256
    assert all(map(held_out, CELLS)) and len(CELLS) == len(set(CELLS)) > 2000


OPERATORS = [
    *((device, name) for device in ("a100-80", "h100-80") for name in ("matrices", "between", "whole iterations")),
    ("a100-80", "prompts"),
    ("a100-80", "decodes"),
    *((link, "exchange") for link in ("nvlink3", "nvlink4", "pcie4")),
]


@pytest.mark.parametrize("key", OPERATORS, ids=" ".join)
def test_what_was_held_out_is_met(key: tuple[str, str]) -> None:
    error = ERRORS[key]
    assert error.cells > 50
    assert error.median <= 0.10 and error.p90 <= 0.25
    assert abs(error.bias) <= 0.08


def test_what_is_not_met_is_known() -> None:
    """Prefills on the H100 take longer than their operators by an eighth; beyond 2,048 tokens on both, by a quarter and
    more."""
    assert -0.15 < ERRORS["h100-80", "prefill"].bias < -0.10
    assert (
        -0.45
        < ERRORS["h100-80", "prefill beyond 2048 tokens"].bias
        < ERRORS["a100-80", "prefill beyond 2048 tokens"].bias
        < -0.2
    )


PLAIN = Operators(
    Matrices((1, 4096), (1e6, 1e9), ((0.5, 0.5), (0.5, 0.5))),
    Between(20e-6, 0.5),
    Prompts(10e-6, 200.0, 0.3, 0.6),
    Decodes(12e-6, 0.8),
    (),
)


@pytest.fixture(scope="module")
def made_up() -> tuple[DeviceShape, list[Cell]]:
    cluster = load_cluster("a100-80", {"stack": "eager"})
    device = replace(cluster.device, operators=PLAIN)
    grids: dict[str, list[tuple[int, int, int, int]]] = {
        "matrices": [(tokens, 1 << k, 4096, 0) for tokens in (1, 50, 700, 4096) for k in range(9, 16)],
        "between": [(tokens, 4096, 5120, width) for tokens in (1, 60, 4000) for width in range(9000, 9040)],
        "prompts": [(64 * chunk, 64 * context, 32, 0) for chunk in range(1, 30, 3) for context in range(0, 40, 3)],
        "decodes": [(rows, 64 * context, 4, 0) for rows in range(1, 100, 7) for context in range(1, 30, 3)],
    }
    shapes = [Cell("a100-80", name, "", 1, *shape, 0.0) for name, grid in grids.items() for shape in grid]
    return device, [each._replace(seconds=predicted_s(each, device, {}, cluster.stack)) for each in shapes]


def test_a_fit_finds_the_operators_that_cells_were_made_of(made_up: tuple[DeviceShape, list[Cell]]) -> None:
    device, cells = made_up
    found = fit_operators(cells, device)
    matrices = found.pop("matrices")
    assert isinstance(matrices, Matrices)
    assert {share for row in matrices.efficiency for share in row} == {0.5}
    assert found["between"] == Between(20e-6, 0.5)
    assert found["decodes"] == Decodes(12e-6, 0.8)
    prompts = found["prompts"]
    assert isinstance(prompts, Prompts)
    assert (prompts.floor_s, prompts.lead_pairs, prompts.own, prompts.context) == pytest.approx(
        (10e-6, 200.0, 0.3, 0.6), rel=0.02
    )


def test_cells_held_out_have_no_part_in_a_fit(made_up: tuple[DeviceShape, list[Cell]]) -> None:
    device, cells = made_up
    wrong = [each._replace(seconds=99.0) if held_out(each) else each for each in cells]
    assert sum(map(held_out, cells)) > 50
    assert fit_operators(wrong, device) == fit_operators(cells, device)


def test_more_bytes_never_exchange_in_less_time() -> None:
    sizes = range(300_000, 3_000_000, 1000)
    cells = [Cell("nvlink3", "exchange", "", 2, size, 0, 0, 0, 40e-6 if size < 900_000 else 25e-6) for size in sizes]
    seconds = [each for _, each in fit_exchange(cells, "nvlink3")[2]]
    assert seconds == sorted(seconds) and seconds[0] == pytest.approx(40e-6, rel=0.1)


def test_host_times_are_found_in_the_iterations_that_they_bind() -> None:
    cluster = load_cluster("a100-80", {"stack": "eager"})
    stack = replace(cluster.stack, launch_s=4e-4, prompt_launch_s=7e-4, row_s=2e-4)
    shapes = [
        Cell("a100-80", name, "llama-2-70b", 4, prompt, rows, 0, 0, 0.0)
        for name in ("decode", "prefill")
        for prompt, rows in ((128, 1), (256, 1), (512, 1), (512, 2), (512, 8), (512, 32))
    ]
    cells = [each._replace(seconds=predicted_s(each, cluster.device, {}, stack)) for each in shapes]
    found = fit_host(cells, cluster.device, cluster.stack)
    assert (found.launch_s, found.prompt_launch_s, found.row_s) == pytest.approx((4e-4, 7e-4, 2e-4), rel=0.03)


def test_a_sample_is_read_as_it_was_written(tmp_path: Path) -> None:
    few = sample(CELLS, 3)
    write(few, tmp_path / "few.csv.gz")
    assert read(tmp_path / "few.csv.gz") == few
    write(few, tmp_path / "again.csv.gz")
    assert (tmp_path / "few.csv.gz").read_bytes() == (tmp_path / "again.csv.gz").read_bytes()


def test_the_command_prints_errors_and_refuses_a_folder_without_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(sample(CELLS, 3), tmp_path / "few.csv.gz")
    assert main(["operators", str(tmp_path / "few.csv.gz")]) == 0
    assert "| a100-80 | matrices | 3 |" in capsys.readouterr().out
    assert main(["operators", str(tmp_path)]) == 2
    assert "no tables of operators" in " ".join(capsys.readouterr().err.split())
    assert set(load_exchanges()) == {"nvlink3", "nvlink4", "pcie4"}
