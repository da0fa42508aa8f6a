"""The GPU check: its table, its arithmetic, and every section that can run on the processor with tiny shapes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from cohort.common.engine.model_config import read_geometry
from cohort.services.bench.gpu_check import attention, decode, fill, golden, kernels, prefill
from cohort.services.bench.gpu_check.context import Check
from cohort.services.bench.gpu_check.report import (
    Findings,
    Row,
    checked,
    exit_status,
    markdown,
    measured,
    read_rows,
    table,
)
from cohort.services.bench.gpu_check.shapes import (
    LLAMA_3_8B,
    QWEN25_14B,
    TINY,
    decode_bytes,
    matrix_elements,
    prefill_operations,
    shape_folder,
)


def test_verdicts() -> None:
    assert measured("s", "n", 0.75, "x", at_least=0.75).verdict == "pass"
    assert measured("s", "n", 0.74, "x", at_least=0.75).verdict == "miss"
    assert measured("s", "n", 1.25, "x", at_most=1.25).verdict == "pass"
    assert measured("s", "n", float("nan"), "x", at_most=1.25).verdict == "miss"
    assert measured("s", "n", 3.0, "x").verdict == "info"
    assert checked("s", "n", False).verdict == "fail"


def test_exit_status() -> None:
    good = [measured("s", "n", 1.0, "x"), checked("s", "n", True)]
    assert exit_status(good) == 0
    for verdict in ("miss", "fail", "not run"):
        assert exit_status([*good, Row(section="s", name="n", verdict=verdict)]) == 1  # type: ignore[arg-type]


def test_rows_survive_a_killed_section(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    found = Findings("kernels", file)
    found.checked("first", True)
    found.measured("second", 2.5, "ms", at_most=3.0, note="a | b")
    with file.open("ab") as out:
        out.write(b'{"section":"kern')
    assert read_rows(file) == found.rows
    assert read_rows(tmp_path / "absent") == []
    assert "≤ 3 ms" in table(found.rows) and "a / b" in markdown(found.rows)


def test_bytes_and_operations_of_known_models(tmp_path: Path) -> None:
    """8.03 and 14.77 thousand million parameters, embeddings included, as their makers say; biases and norms apart."""
    for config, parameters in ((LLAMA_3_8B, 8.03e9), (QWEN25_14B, 14.77e9)):
        geometry = read_geometry(shape_folder(tmp_path / config["model_type"], config))
        assert geometry.family == "llama"
        vocabulary = 2 * geometry.vocab_size * geometry.hidden_size
        assert matrix_elements(geometry) + vocabulary == pytest.approx(parameters, rel=2e-3)
    llama = read_geometry(tmp_path / "llama")
    # 131,072 bytes of KV a token; at batch 1 the weights without the embedding
    one, two = decode_bytes(llama, "bfloat16", 1, 1000), decode_bytes(llama, "bfloat16", 2, 1000)
    assert two - one == 131_072_000
    assert one == pytest.approx(2 * (8.03e9 - 128256 * 4096) + 131_072_000, rel=2e-3)
    # 6.98e9 matrix elements twice, and half a square of scores and of sums in 32 layers of 4096 columns
    least = 8192 * 2 * 6.98e9 + 2 * 2 * 4096 * 8192**2 / 2 * 32
    assert prefill_operations(llama, 8192) == pytest.approx(least, rel=2e-3)


@pytest.mark.parametrize(
    "section",
    [kernels.run, attention.run, lambda check: decode.run(check, "Llama-3-8B"), prefill.run, fill.run, golden.run],
    ids=["kernels", "attention", "decode", "prefill", "fill", "golden"],
)
def test_sections_on_the_processor(section, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    found = Findings("section", None)
    with torch.inference_mode():
        section(Check(torch.device("cpu"), False, tmp_path, found))
    assert found.rows
    assert [row for row in found.rows if row.verdict == "fail"] == []


def test_a_wrong_kernel_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions ignored: every attention line must fail, and only those."""
    right = kernels.paged_attention

    def wrong(query, kv, layer, meta, scale, out, *, sliding_window=0) -> None:  # type: ignore[no-untyped-def]
        tables, _ = meta.separate()
        forgetful = dataclasses.replace(meta, block_tables=tables)
        right(query, kv, layer, forgetful, scale, out, sliding_window=sliding_window)

    monkeypatch.setattr(kernels, "paged_attention", wrong)
    found = Findings("kernels", None)
    kernels.run(Check(torch.device("cpu"), False, tmp_path, found))
    failed = {row.name for row in found.rows if row.verdict == "fail"}
    assert failed == {row.name for row in found.rows if row.name.startswith("attention")}


def test_the_tiny_shape_is_a_model(tmp_path: Path) -> None:
    geometry = read_geometry(shape_folder(tmp_path, TINY))
    assert (geometry.family, geometry.num_layers) == ("llama", 2)
