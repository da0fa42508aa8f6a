"""Compiled kernels that outlive a run, on machines that are lent bare: Triton's, and the processor's library.

    FOLDER/triton, FOLDER/kernels    where they are found and made
    FOLDER/kernels.tar.gz.0 …        pieces that another run packed; `unpack` takes them in

A kernel's intermediate forms stay behind: they are most of the bytes, and nothing reads them. Where later pieces are
missing, so are the kernels in them, which are then compiled. Called by `runner`; standard library alone.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PIECE_BYTES = 15 << 20
MOST_PIECES = 3
"""Pieces at most: with the three files of a report they are six."""
_NAME = "kernels.tar.gz"
_FOLDERS = ("kernels", "triton")
_LEFT_BEHIND = frozenset({".ttir", ".ttgir", ".llir", ".ptx", ".source", ".lock", ".part"})
_GROUP = "__grp__"
"""Beginning of the name of the file by which Triton finds a kernel's other files."""


def unpack(folder: Path) -> str:
    """Make the cache folder, and take in the pieces that lie in it; what was done, in words. Raises `OSError`."""
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    pieces = _pieces(folder)
    if not pieces:
        return ""
    count, end = 0, "all of them"
    with tempfile.TemporaryFile() as whole:
        for piece in pieces:
            with piece.open("rb") as part:
                shutil.copyfileobj(part, whole)
        whole.seek(0)
        try:
            with tarfile.open(fileobj=whole, mode="r|gz") as archive:
                for member in archive:
                    archive.extract(member, folder, filter="data")
                    count += 1
        except (tarfile.ReadError, EOFError, zlib.error):
            end = "the rest is missing"
    groups = list((folder / "triton").glob(f"*/{_GROUP}*"))
    for group in groups:
        _move(group)
    return f"{count} files of {len(groups)} kernels taken from {len(pieces)} pieces: {end}\n"


def pack(folder: Path, out: Path) -> str:
    """Write the pieces to `out`; what was done, in words."""
    for piece in _pieces(out):
        piece.unlink()
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w:gz", compresslevel=6) as archive:
            for file in _files(folder):
                archive.add(file, str(file.relative_to(folder)), recursive=False)
        size = whole.tell()
        whole.seek(0)
        count = min(MOST_PIECES, -(-size // PIECE_BYTES))
        for number in range(count):
            _write(whole, out / f"{_NAME}.{number}")
    left = size - count * PIECE_BYTES
    lost = "" if left <= 0 else f"; {left / 2**20:.1f} MiB left out"
    return f"compiled kernels: {size / 2**20:.1f} MiB in {count} pieces of {out}{lost}\n"


def _pieces(folder: Path) -> list[Path]:
    """Return the pieces in `folder`, from the first to before one that is missing."""
    found = list[Path]()
    while (piece := folder / f"{_NAME}.{len(found)}").is_file():
        found.append(piece)
    return found


def _files(folder: Path) -> Iterator[Path]:
    """Yield what is packed: the processor's library, then Triton's kernels, each one's group last. One whose group is
    missing is compiled anew."""
    for name in _FOLDERS:
        files = [file for file in (folder / name).rglob("*") if file.is_file() and file.suffix not in _LEFT_BEHIND]
        yield from sorted(files, key=lambda file: (file.parent, file.name.startswith(_GROUP), file.name))


def _move(group: Path) -> None:
    """Let a kernel's group name the files where they are now: its paths are those of the folder it was made in."""
    content = json.loads(group.read_bytes())
    content["child_paths"] = {name: str(group.parent / name) for name in content["child_paths"]}
    group.write_text(json.dumps(content), encoding="utf-8")


def _write(source: IO[bytes], piece: Path) -> None:
    part = piece.with_name(f".{piece.name}.part")
    part.write_bytes(source.read(PIECE_BYTES))
    os.replace(part, piece)
