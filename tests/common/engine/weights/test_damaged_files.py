"""Weight files that are cut, garbled or do not hold what they should: each is named with what is wrong, and a damaged
one before anything is read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cohort.common.engine.weights.weight_files import WeightFiles
from cohort.common.errors import ModelError

CPU = torch.device("cpu")
FILE = "model.safetensors"


def whole(folder: Path, name: str = FILE) -> bytes:
    save_file({"first": torch.arange(64.0), "second": torch.ones(4, 8)}, folder / name)
    return (folder / name).read_bytes()


def header_of(raw: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def damaged(raw: bytes) -> bytes:
        header, data = header_of(raw)
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    return damaged


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda raw: raw[:-5], r"it is truncated, its header names \d+ bytes and it has \d+"),
        (lambda raw: raw[:40], r"truncated or no safetensors file: a header of \d+ bytes in a file of 40"),
        (lambda raw: b"", r"truncated or no safetensors file: a header of 0 bytes in a file of 0"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\n", "truncated or no safetensors file"),
        (lambda raw: raw[:8] + b"?" + raw[9:], "cannot be read: Expecting value"),
        (lambda raw: struct.pack("<Q", 2) + b"[]" + raw, "its header is no JSON object"),
        (with_header(lambda h: h["second"].update(shape=[4, 9])), r"tensor second in its header.*128 bytes.*\(4, 9\)"),
        (with_header(lambda h: h["second"].update(data_offsets=[9, 3])), "tensor second in its header"),
        (with_header(lambda h: h["second"].pop("dtype")), "tensor second in its header.*dtype"),
    ],
)
def test_a_damaged_file_is_named_when_it_is_opened(damage: Callable[[bytes], bytes], told: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(damage(whole(tmp_path)))
    with pytest.raises(ModelError, match=rf"{FILE} cannot be read: .*{told}|{FILE} {told}"):
        WeightFiles(tmp_path)


def test_one_damaged_shard_of_several_is_named(tmp_path: Path) -> None:
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, shard in enumerate(shards):
        save_file({f"t{number}": torch.ones(16)}, tmp_path / shard)
    index = {"weight_map": {f"t{number}": shard for number, shard in enumerate(shards)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "t2" in WeightFiles(tmp_path)
    os.truncate(tmp_path / shards[1], (tmp_path / shards[1]).stat().st_size - 1)
    with pytest.raises(ModelError, match=rf"{shards[1]} cannot be read: it is truncated"):
        WeightFiles(tmp_path)
    save_file({"other": torch.ones(16)}, tmp_path / shards[1])
    with pytest.raises(ModelError, match=rf"{shards[1]} lacks tensor t1, which model\.safetensors\.index\.json says"):
        WeightFiles(tmp_path)
    (tmp_path / shards[1]).unlink()
    with pytest.raises(ModelError, match=rf"lacks {shards[1]}, which model\.safetensors\.index\.json names"):
        WeightFiles(tmp_path)


def test_a_dtype_that_is_not_served_is_named_where_it_is_asked_for(tmp_path: Path) -> None:
    raw = with_header(lambda h: h["second"].update(dtype="F4"))(whole(tmp_path))
    (tmp_path / FILE).write_bytes(raw)
    files = WeightFiles(tmp_path)
    assert len(files.read("first", (64,), torch.float32, CPU)) == 64
    with pytest.raises(ModelError, match=rf"{FILE}: tensor second has dtype F4, which is not served"):
        files.read("second", (4, 8), torch.float32, CPU)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    whole(tmp_path)
    files = WeightFiles(tmp_path)
    os.truncate(tmp_path / FILE, 100)
    with pytest.raises(ModelError, match=rf"{FILE} ends within tensor \w+: it was shortened while it was read"), files:
        files.read("second", (4, 8), torch.float32, CPU)
        files.read("first", (64,), torch.float32, CPU)
