"""Tables of operators: what was made with the model's own constants is fitted, and foreseen where it was held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cohort.services.bench.__main__ import main

pytest.importorskip("scipy")

from cohort.services.bench.fit.operators import LinearFit, fit_linear, fit_reads, linear_table, mixed_table
from cohort.services.bench.fit.published_mixing import fit, readings
from cohort.services.simulator.hardware.hardware import load_cluster, load_device

TRUE = LinearFit(0.6, 0.8, ((64, 1.0), (256, 1.3), (1024, 1.0)))
TOKENS = [*range(1, 17), *range(32, 4097, 32)]


def linear_csv(path: Path, hidden: int) -> Path:
    columns = "n_head,n_kv_head,n_embd,n_expanded_embd,use_gated_mlp,num_tokens,num_tensor_parallel_workers"
    times = [
        f"time_stats.{name}.median" for name in ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    ]

    def written(seconds: dict[int, float]) -> None:
        lines = [",".join([*times, columns])]
        for devices in (1, 2):  # rows of two devices do not count
            lines += [
                f"0,0,0,{1e3 * devices * seconds[count]},32,8,{hidden},{3 * hidden},True,{count},{devices}"
                for count in TOKENS
            ]
        path.write_text("\n".join(lines))

    written(dict.fromkeys(TOKENS, 1.0))
    shape, device = linear_table(path), load_device("a100-80")[0]
    written(dict(zip(TOKENS, TRUE.seconds(shape, device), strict=True)))
    return path


def mixed_csv(path: Path, group: int, reads: float) -> Path:
    lines = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    chunks, decodes = (16, 512), [(rows, context) for rows in (2, 32) for context in (4096, 16384)]
    lines += [f"{chunk},0,0,0,{chunk}" for chunk in chunks]
    lines += [f"0,0,{rows},{context},{rows * context / 100}" for rows, context in decodes]
    lines += [
        f"{chunk},0,{rows},{context},{chunk + rows * context / 100 * (1 + reads * (group - 1))}"
        for chunk in chunks
        for rows, context in decodes
    ]
    path.write_text("\n".join(lines))
    return path


def test_matrices_of_one_device_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [linear_csv(tmp_path / f"{hidden}.csv", hidden) for hidden in (4096, 6144, 8192)]
    device = load_device("a100-80")[0]
    tables = [linear_table(path) for path in paths]
    assert tables[0].parameters == 4096 * (48 * 128) + 4096 * 4096 + 9 * 4096 * 4096
    found = fit_linear(tables, device)
    assert (found.compute, found.memory) == pytest.approx((TRUE.compute, TRUE.memory), rel=0.03)
    assert dict(found.table)[256] == pytest.approx(1.3, abs=0.06)
    for table in tables:
        assert np.median(np.abs(found.seconds(table, device) / table.seconds - 1.0)) < 0.03
    assert main(["fit", "operators", "linear", *map(str, paths), "--device", "a100-80"]) == 0
    shown = capsys.readouterr().out
    assert "held out, all: bias" in shown and "tokens 65 to 256" in shown


def test_further_reads_of_groups_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [mixed_csv(tmp_path / f"{group}.csv", group, 0.4) for group in (4, 8)]
    tables = [mixed_table(path, group) for path, group in zip(paths, (4, 8), strict=True)]
    assert fit_reads(tables) == pytest.approx(0.4, abs=0.01)
    words = [f"{path}:{group}" for path, group in zip(paths, (4, 8), strict=True)]
    assert main(["fit", "operators", "mixed", *words]) == 0
    shown = capsys.readouterr().out
    assert "mixed_reads: 0.400" in shown and "held out, 0.400" in shown
    assert main(["fit", "operators", "mixed", str(paths[0])]) == 2
    assert "wants TABLE:GROUP" in " ".join(capsys.readouterr().err.split())


def test_published_mixing_is_explained_better_by_reads_and_the_test_reading_is_not_fitted() -> None:
    cluster = load_cluster("a100-80")
    found = readings(cluster)
    fitted = [each for each in found if each.fitted]
    (held,) = [each for each in found if not each.fitted]

    def off(share: float, reads: float) -> float:
        return sum((each.foreseen_s(cluster, share, reads) / each.seconds - 1.0) ** 2 for each in fitted)

    share, reads = fit(fitted, cluster, lambda value: (value, 0.0)), fit(fitted, cluster, lambda value: (0.0, value))
    assert off(0.0, reads) < off(share, 0.0) < off(0.0, 0.0)
    errors = [
        abs(held.foreseen_s(cluster, *form) / held.seconds - 1.0) for form in ((0.0, reads), (share, 0.0), (0.0, 0.0))
    ]
    assert errors == sorted(errors) and errors[0] < 0.05
    assert load_cluster("a100-80", {"stack": "varlen"}).stack.mixed_reads == pytest.approx(reads, abs=0.01)
