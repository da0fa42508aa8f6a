"""Compiled kernels travel from one folder to another: without what nothing reads, and as far as their pieces came."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from cohort.services.bench.gpu_check.frame import kernel_cache


def compiled(folder: Path, kernels: int, size: int = 2000) -> None:
    """Write what Triton does: per kernel a folder with its forms, and a group that names them by their paths."""
    draw = random.Random(5)
    (folder / "kernels" / "key").mkdir(parents=True)
    (folder / "kernels" / "key" / "cohort_kernels.so").write_bytes(b"library")
    for number in range(kernels):
        kernel = folder / "triton" / f"KEY{number}"
        kernel.mkdir(parents=True)
        names = ("rope.cubin", "rope.json", "rope.ttgir", "rope.ptx")
        for name in names:
            (kernel / name).write_bytes(draw.randbytes(size) if name == "rope.cubin" else b"{}")
        group = {"child_paths": {name: str(kernel / name) for name in names}}
        (kernel / "__grp__rope.json").write_text(json.dumps(group))


def found(folder: Path) -> set[str]:
    """The kernels that Triton would find: whose group names files that exist."""
    there = set()
    for group in folder.glob("triton/*/__grp__*"):
        paths = json.loads(group.read_text())["child_paths"].values()
        if {"rope.cubin", "rope.json"} <= {Path(path).name for path in paths if os.path.exists(path)}:
            there.add(group.parent.name)
    return there


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Where they are made, packed to, and needed."""
    made, out, needed = tmp_path / "made", tmp_path / "out", tmp_path / "needed"
    out.mkdir()
    needed.mkdir()
    return made, out, needed


def test_kernels_are_found_where_they_were_unpacked(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out, needed = folders
    monkeypatch.setattr(kernel_cache, "PIECE_BYTES", 4000)
    compiled(made, 3)
    assert "2 pieces" in kernel_cache.pack(made, out)
    assert {file.name for file in out.iterdir()} == {"kernels.tar.gz.0", "kernels.tar.gz.1"}
    for piece in out.iterdir():
        assert piece.stat().st_size <= 4000
        piece.rename(needed / piece.name)
    for file in made.rglob("*.cubin"):
        file.unlink()  # the machine is gone
    assert "of 3 kernels" in kernel_cache.unpack(needed)
    assert found(needed) == {"KEY0", "KEY1", "KEY2"}
    assert (needed / "kernels" / "key" / "cohort_kernels.so").read_bytes() == b"library"
    assert not list(needed.rglob("*.ttgir")) and not list(needed.rglob("*.ptx"))


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_what_did_not_come_is_compiled_again(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Each piece has a kernel and the beginning of another, which is not found."""
    made, out, needed = folders
    monkeypatch.setattr(kernel_cache, "PIECE_BYTES", 3000)
    compiled(made, 4)
    kernel_cache.pack(made, out)
    for number in range(kept):
        (out / f"kernels.tar.gz.{number}").rename(needed / f"kernels.tar.gz.{number}")
    kernel_cache.unpack(needed)
    assert len(found(needed)) == kept
    for name in found(needed):
        ours, theirs = (folder / "triton" / name / "rope.cubin" for folder in (needed, made))
        assert ours.read_bytes() == theirs.read_bytes()


def test_no_more_files_than_come_back(folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made, out, _ = folders
    monkeypatch.setattr(kernel_cache, "PIECE_BYTES", 1000)
    compiled(made, 3)
    assert "left out" in kernel_cache.pack(made, out)
    assert len(list(out.iterdir())) == kernel_cache.MOST_PIECES
