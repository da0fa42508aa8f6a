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
from cohort.services.bench.gpu_check.engine import golden, invariant, kv_transfer, model
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.guard import Guard
from cohort.services.bench.gpu_check.frame.report import (
    Findings,
    Prediction,
    Row,
    checked,
    exit_status,
    markdown,
    measured,
    read_rows,
    table,
)
from cohort.services.bench.gpu_check.frame.shapes import (
    LLAMA_3_8B,
    QWEN25_14B,
    TINY,
    decode_bytes,
    matrix_elements,
    prefill_operations,
    shape_folder,
)
from cohort.services.bench.gpu_check.frame.spans import Place, Spans, spanned
from cohort.services.bench.gpu_check.kernels import attention, coded, experts, kernels, products, smoke

CPU = torch.device("cpu")
native.keep_in(cache_dir())


def check_in(folder: Path) -> Check:
    found = Findings("section", None)
    return Check(CPU, False, folder, found, Guard(found, CPU, 3600, patience=50), folder)


def test_verdicts() -> None:
    assert measured("s", "n", 0.75, "x", at_least=0.75).verdict == "pass"
    assert measured("s", "n", 0.74, "x", at_least=0.75).verdict == "miss"
    assert measured("s", "n", 1.25, "x", at_most=1.25).verdict == "pass"
    assert measured("s", "n", float("nan"), "x", at_most=1.25).verdict == "miss"
    assert measured("s", "n", float("inf"), "x", at_most=1.25).figure is None
    assert measured("s", "n", 3.0, "x").verdict == "info"
    assert checked("s", "n", False).verdict == "fail"


def test_a_metric_far_off_its_prediction_shows() -> None:
    row = measured("s", "n", 3.0, "ms", expect=Prediction(2.0, "line: two reads"))
    assert row.off == 0.5 and "+50%" in table([row])
    assert markdown([row, row]).count("line: two reads") == 1
    assert measured("s", "n", 3.0, "variants", expect=Prediction(0.0, "none")).off is None


def test_exit_status() -> None:
    good = [measured("s", "n", 1.0, "x"), checked("s", "n", True)]
    assert exit_status(good) == 0
    for verdict in ("miss", "fail", "not run"):
        assert exit_status([*good, Row(section="s", name="n", verdict=verdict)]) == 1  # type: ignore[arg-type]
    assert exit_status([*good, Row(section="s", name="does not fit")]) == 0


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


SECTIONS: dict[str, Callable[[Check], None]] = {
    "smoke": smoke.run,
    "kernels": kernels.run,
    "attention": attention.run,
    "coded-products": coded.run,
    "coded-experts": experts.run,
    "batch-invariant": invariant.run,
    "products": products.run,
    "model-8b": model.run_8b,
    "model-14b": model.run_14b,
    "golden": golden.run,
    "golden-presets": golden.run_presets,
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
        assert list((tmp_path / "profiles").iterdir())
        names = " ".join(row.name for row in check.found.rows)
        assert all(part in names for part in ("GPU idle", "build", "hop", "launch", "sampling", "prefill"))


def test_a_wrong_kernel_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that misses the last key: every attention line must fail, and only those."""

    def short(right: Callable[..., None]) -> Callable[..., None]:
        def wrong(query, kv, layer, meta, *others, **options) -> None:  # type: ignore[no-untyped-def]
            kept, meta.context_lens = meta.context_lens, (meta.context_lens - 1).clamp(min=1)
            right(query, kv, layer, meta, *others, **options)
            meta.context_lens = kept

        return wrong

    monkeypatch.setattr(kernels, "paged_attention", short(kernels.paged_attention))
    monkeypatch.setattr(kernels, "latent_attention", short(kernels.latent_attention))
    check = check_in(tmp_path)
    kernels.run(check)
    failed = {row.name for row in check.found.rows if row.verdict == "fail"}
    assert failed == {row.name for row in check.found.rows if row.name.startswith("attention")}


def test_an_item_that_throws_hides_none_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = check_in(tmp_path)
    kernels.run(whole)
    right = kernels.paged_attention
    calls: list[int] = []

    def once(query, kv, layer, meta, scale, out, **options) -> None:  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no kernel image is available")
        right(query, kv, layer, meta, scale, out, **options)

    monkeypatch.setattr(kernels, "paged_attention", once)
    check = check_in(tmp_path)
    kernels.run(check)
    assert [row.name for row in check.found.rows] == [row.name for row in whole.found.rows]
    assert [row.verdict for row in check.found.rows] == ["fail"] + ["pass"] * (len(whole.found.rows) - 1)


def test_a_dead_device_ends_the_model_but_not_its_report(tmp_path: Path) -> None:
    """The context dies in the first item after the load: what was found stays, the rest is named as not run."""
    check = check_in(tmp_path)
    dead: list[int] = []

    def probe(_: torch.device) -> None:
        if dead:
            raise RuntimeError("an illegal memory access was encountered")

    check.guard = Guard(check.found, CPU, 3600, patience=50, probe=probe)
    check.guard.item("first", lambda: check.found.checked("first", True))
    dead.append(1)
    check.guard.item("illegal", lambda: check.dtype.no_such_attribute)  # type: ignore[attr-defined]
    smoke.run(check)
    assert [(row.name, row.verdict) for row in check.found.rows[:2]] == [("first", "pass"), ("illegal", "fail")]
    rest = check.found.rows[2:]
    assert rest and all(row.verdict == "not run" and "illegal memory access" in row.note for row in rest)


def test_spans_find_functions_and_the_ways_between() -> None:
    class Machine:
        def plan(self) -> int:
            return 1

        def build(self) -> int:
            return 2

    machine = Machine()
    places = [Place(Machine, "plan", "plan"), Place(Machine, "build", "build"), Place(Machine, "gone", "launch")]
    with spanned(places) as spans:
        for _ in range(3):
            machine.plan()
            machine.build()
    machine.plan()
    assert len(spans.lengths("plan")) == 3 and spans.missing == ["launch"] and not spans.lengths("launch")
    assert len(spans.after("plan", "build")) == 3 and all(each >= 0 for each in spans.after("plan", "build"))
    made = Spans({"a": [(0.0, 1.0), (5.0, 6.0)], "b": [(2.0, 3.0), (6.5, 7.0)]})
    assert made.after("a", "b") == [1.0, 0.5]
    assert made.between(1.0, 6.0).found == {"a": [(5.0, 6.0)], "b": [(2.0, 3.0)]}


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


def test_the_tiny_shape_is_a_model(tmp_path: Path) -> None:
    geometry = read_geometry(shape_folder(tmp_path, TINY))
    assert (geometry.family, geometry.num_layers) == ("llama", 2)
