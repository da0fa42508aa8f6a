"""The GPU check: its table, its arithmetic, and every section that can run on the processor with tiny shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.device import compiled_kernels
from cohort.common.paths import cache_dir
from cohort.kernels.cpu import native
from cohort.services.bench.gpu_check.engine import kv_transfer, model
from cohort.services.bench.gpu_check.engine.timelines import busy_share
from cohort.services.bench.gpu_check.frame.context import LLAMA_3_8B, QWEN25_14B, TINY, Check, shape_folder
from cohort.services.bench.gpu_check.frame.guard import Guard
from cohort.services.bench.gpu_check.frame.rates import matrix_elements, prefill_operations
from cohort.services.bench.gpu_check.frame.report import Findings, Row, exit_status, read_rows, table
from cohort.services.bench.gpu_check.kernels import attention, experts, library, matrices

CPU = torch.device("cpu")
native.keep_in(cache_dir())


def check_in(folder: Path) -> Check:
    found = Findings("section", None)
    return Check(CPU, False, folder, found, Guard(found, CPU, 3600, deadline_factor=50), folder)


def test_verdicts() -> None:
    found = Findings("s", None)
    found.measured("n", 0.75, "x", at_least=0.75)
    found.measured("n", 0.74, "x", at_least=0.75)
    found.measured("n", 1.25, "x", at_most=1.25)
    found.measured("n", float("nan"), "x", at_most=1.25)
    found.measured("n", float("inf"), "x", at_most=1.25)
    found.measured("n", 3.0, "x")
    found.checked("n", False)
    assert [row.verdict for row in found.rows] == ["pass", "miss", "pass", "miss", "miss", "info", "fail"]
    assert found.rows[4].figure is None and found.rows[4].note == "inf"


def test_cases_that_passed_are_one_line() -> None:
    """Those that did not keep theirs, and so do metrics."""
    found = Findings("kernels", None)
    for name, holds in (("t.py::a[1]", True), ("t.py::a[2]", False), ("t.py::a[3]", True), ("t.py::b", True)):
        found.checked(name, holds)
    text = table(found.rows)
    assert text.count("t.py::a") == 2 and "2 cases" in text and "t.py::a[2]" in text and text.count("t.py::b") == 1


def test_exit_status() -> None:
    found = Findings("s", None)
    found.measured("n", 1.0, "x")
    found.checked("n", True)
    assert exit_status(found.rows) == 0
    for verdict in ("miss", "fail", "not run"):
        assert exit_status([*found.rows, Row(section="s", name="n", verdict=verdict)]) == 1  # type: ignore[arg-type]
    assert exit_status([*found.rows, Row(section="s", name="does not fit")]) == 0


def test_rows_survive_a_killed_section(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    found = Findings("kernels", file)
    found.checked("first", True)
    found.measured("second", 2.5, "ms", at_most=3.0, note="a | b")
    with file.open("ab") as out:
        out.write(b'{"section":"kern')
    assert read_rows(file) == found.rows
    assert read_rows(tmp_path / "absent") == []
    assert "≤ 3 ms" in table(found.rows)


def test_bytes_and_operations_of_known_models(tmp_path: Path) -> None:
    """8.03 and 14.77 thousand million parameters, embeddings included, as their makers say; biases and norms apart."""
    for config, parameters in ((LLAMA_3_8B, 8.03e9), (QWEN25_14B, 14.77e9)):
        geometry = read_geometry(shape_folder(tmp_path / config["model_type"], config))
        assert geometry.family == "llama"
        vocabulary = 2 * geometry.vocab_size * geometry.hidden_size
        assert matrix_elements(geometry) + vocabulary == pytest.approx(parameters, rel=2e-3)
    llama = read_geometry(tmp_path / "llama")
    # 6.98e9 matrix elements twice, and half a square of scores and of sums in 32 layers of 4096 columns
    least = 8192 * 2 * 6.98e9 + 2 * 2 * 4096 * 8192**2 / 2 * 32
    assert prefill_operations(llama, 8192) == pytest.approx(least, rel=2e-3)


SECTIONS: dict[str, Callable[[Check], None]] = {
    "attention": attention.run,
    "library-products": library.run,
    "coded-products": matrices.run_coded,
    "coded-experts": experts.run,
    "batch-invariant": model.run_invariant,
    "products": matrices.run,
    "model-8b": model.run_8b,
    "model-14b": model.run_14b,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_on_the_processor(section: str, tmp_path: Path) -> None:
    if section == "batch-invariant":
        compiled_kernels.keep_in_cache()
        if native.implementation() != "native":
            pytest.skip("torch multiplies, and nothing can be promised")
    check = check_in(tmp_path)
    with torch.inference_mode():
        SECTIONS[section](check)
    assert check.found.rows
    assert [row for row in check.found.rows if row.verdict in ("fail", "not run")] == []
    if section == "model-8b":
        assert list(tmp_path.glob("*.kernels.json"))
        names = " ".join(row.name for row in check.found.rows)
        assert all(part in names for part in ("GPU idle", "begun ahead", "sampling", "prefill"))


def test_a_dead_device_ends_the_model_but_not_its_report(tmp_path: Path) -> None:
    """The context dies in the first item after the load: what was found stays, the rest is named as not run."""
    check = check_in(tmp_path)
    dead: list[int] = []

    def probe(_: torch.device) -> None:
        if dead:
            raise RuntimeError("an illegal memory access was encountered")

    check.guard = Guard(check.found, CPU, 3600, deadline_factor=50, probe=probe)
    check.guard.item("first", lambda: check.found.checked("first", True))
    dead.append(1)
    check.guard.item("illegal", lambda: check.dtype.no_such_attribute)  # type: ignore[attr-defined]
    model.run_8b(check)
    attention.run(check)
    assert [(row.name, row.verdict) for row in check.found.rows[:2]] == [("first", "pass"), ("illegal", "fail")]
    rest = check.found.rows[2:]
    assert rest and all(row.verdict == "not run" and "illegal memory access" in row.note for row in rest)


def test_transports_are_read_from_what_ucx_says() -> None:
    log = """
[1.0] [vm:1:0]   | ucp_context_0 intra-node cfg#1 | tagged message by ucp_tag_send* from cuda memory |
[1.0] [vm:1:0]   |                 93..8191 | eager copy-in copy-out                    | sysv/memory |
[1.0] [vm:1:0]   |                  8K..inf | (?) rendezvous zero-copy read from remote | cuda_ipc/cuda  |
[1.0] [vm:1:0]   |                  8K..inf | (?) rendezvous zero-copy read from remote | cuda_ipc/cuda  |
[1.0] [vm:1:0]   |                   0..inf | rendezvous copy-in copy-out               | 50% on tcp/eth0 and tcp/lo |
"""
    assert kv_transfer.transports(log) == [
        "rendezvous zero-copy read from remote by cuda_ipc/cuda",
        "rendezvous copy-in copy-out by 50% on tcp/eth0 and tcp/lo",
    ]


def test_how_much_of_a_timeline_is_computed() -> None:
    """Kernels beside one another count once; the host's part does not."""
    spans = [("kernel", 10, 20), ("gpu_memcpy", 15, 10), ("kernel", 16, 4), ("kernel", 90, 20), ("cpu_op", 0, 500)]
    events = [{"cat": cat, "ts": at, "dur": taken} for cat, at, taken in spans] + [{"ph": "M"}]
    assert busy_share(events) == pytest.approx(0.4)
    assert busy_share(events[-2:]) is None


def test_the_tiny_shape_is_a_model(tmp_path: Path) -> None:
    geometry = read_geometry(shape_folder(tmp_path, TINY))
    assert (geometry.family, geometry.num_layers) == ("llama", 2)
