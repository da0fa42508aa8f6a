"""Measured operators as cells: what ran, on what, how long. Read from the tables of vidur and Splitwise, or a sample.

    matrices   a tokens times a matrix of b rows and c columns, on one of `devices`
    between    norms, rotation, activation and both residual sums of a layer: a tokens, hidden size b, rotated width c,
               width of the MLP d
    prompts    attention of one prompt's chunk: a tokens behind b of context, c query heads
    decodes    attention of a rows of context b, c heads of KV
    exchange   an all-reduce of a bytes; `device` is the kind of link
    prefill, decode    a whole iteration of b prompts of a tokens; of as many rows, each half of 128 answers later

Several measurements of a cell count once, as their median. `held_out` keeps a cell from every fit: a quarter of the
operators' by a checksum, and of whole iterations all but `FITTED`. Called by `operators_command.py` and the tests.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from cohort.common.errors import ConfigError

HEAD_DIM = 128
"""Width of a head in all measured models."""
ITERATIONS = ("prefill", "decode")
FITTED = ("llama-2-70b", 4)
"""Model and degree of the iterations to which the host's times are fitted; all others are held out."""
LONGEST = 2048
"""Tokens of a prefill, beyond which Splitwise's engine takes longer than any operator explains."""
_DEVICES = {"a100": "a100-80", "h100": "h100-80"}
_LINKS = {"a100_dgx": "nvlink3", "h100_dgx": "nvlink4", "a100_pairwise_nvlink": "pcie4"}
_SPLITWISE = {"a100-80gb": "a100-80", "h100-80gb": "h100-80"}
_MODELS = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
_LARGEST = 4096
"""Tokens of an iteration, which the tables of all models hold."""
_LARGEST_BYTES = 1 << 26
"""Bytes of an all-reduce that all nodes' tables hold."""


class Cell(NamedTuple):
    device: str
    operator: str
    model: str
    devices: int
    a: int
    b: int
    c: int
    d: int
    seconds: float


def held_out(cell: Cell) -> bool:
    if cell.operator in ITERATIONS:
        return (cell.model, cell.devices) != FITTED
    return zlib.crc32(repr(tuple(cell)[:-1]).encode()) % 4 == 0


def read(source: Path) -> list[Cell]:
    """Read all cells of a folder of tables, or of a sample. Raises `ConfigError` where there are none."""
    if source.is_file():
        return list(_sampled(source))
    readers = (_computed, _attention, _exchanged, _iterations)
    found: dict[Cell, list[float]] = defaultdict(list)
    for reader in readers:
        for cell in reader(source):
            found[cell._replace(seconds=0.0)].append(cell.seconds)
    if not found:
        raise ConfigError(f"{source}: no tables of operators (mlp_compute_*.csv.gz, *_allreduce.csv.gz …)")
    return [cell._replace(seconds=median(each)) for cell, each in found.items()]


def sample(cells: Iterable[Cell], most: int) -> list[Cell]:
    """Return cells that are held out, at most so many of a device's operator, drawn by the checksum."""
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in filter(held_out, cells):
        groups[cell.device, cell.operator].append(cell)
    return [
        cell
        for each in groups.values()
        for cell in sorted(sorted(each, key=lambda cell: zlib.crc32(repr(tuple(cell)).encode()))[:most])
    ]


def write(cells: Iterable[Cell], path: Path) -> None:
    """Write cells as CSV, in microseconds; the same cells are the same bytes."""
    lines = [",".join((*Cell._fields[:-1], "us"))]
    lines += [",".join((*map(str, cell[:-1]), f"{cell.seconds * 1e6:.6g}")) for cell in cells]
    path.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", mtime=0))


def _sampled(path: Path) -> Iterator[Cell]:
    for row in _rows(path):
        a, b, c, d = (int(row[name]) for name in "abcd")
        yield Cell(
            row["device"], row["operator"], row["model"], int(row["devices"]), a, b, c, d, float(row["us"]) * 1e-6
        )


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _milliseconds(row: dict[str, str], operator: str) -> float:
    return float(row[f"time_stats.{operator}.median"]) * 1e-3


def _computed(folder: Path) -> Iterator[Cell]:
    for path in sorted(folder.glob("mlp_compute_*_*.csv.gz")):
        gpu, _, model = path.name.removeprefix("mlp_compute_").removesuffix(".csv.gz").partition("_")
        for row in _rows(path):
            tokens, devices = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
            if tokens > _LARGEST or gpu not in _DEVICES:
                continue
            hidden, inner = int(row["n_embd"]), int(row["n_expanded_embd"]) // devices
            heads, kv_heads = int(row["n_head"]), int(row["n_kv_head"])
            width, kv_width = hidden // devices, kv_heads * hidden // heads // devices
            shapes = {
                "attn_pre_proj": (hidden, width + 2 * kv_width),
                "attn_post_proj": (width, hidden),
                "mlp_up_proj": (hidden, 2 * inner),
                "mlp_down_proj": (inner, hidden),
            }
            where = (_DEVICES[gpu], model, devices, tokens)
            for name, (rows, columns) in shapes.items():
                if row[f"time_stats.{name}.median"]:
                    yield _cell(where, "matrices", (rows, columns, 0), _milliseconds(row, name))
            between = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "add", "add")
            if all(row[f"time_stats.{name}.median"] for name in between):
                seconds = sum(_milliseconds(row, name) for name in between)
                yield _cell(where, "between", (hidden, width + kv_width, inner), seconds)


def _cell(where: tuple[str, str, int, int], operator: str, shape: tuple[int, int, int], seconds: float) -> Cell:
    device, model, devices, tokens = where
    return Cell(device, operator, model, devices, tokens, *shape, seconds)


def _attention(folder: Path) -> Iterator[Cell]:
    for path in sorted(folder.glob("attention_*.csv.gz")):
        device = _DEVICES[path.name.removeprefix("attention_").removesuffix(".csv.gz")]
        for row in _rows(path):
            devices, context = int(row["num_tensor_parallel_workers"]), int(float(row["kv_cache_size"] or 0))
            if row["is_prefill"] == "True":
                heads, chunk = int(row["n_q_head"]) // devices, int(float(row["prefill_chunk_size"]))
                seconds = _milliseconds(row, "attn_prefill")
                yield Cell(device, "prompts", "", devices, chunk, context, heads, 0, seconds)
            else:
                kv_heads = int(row["n_kv_head"]) // devices
                seconds = _milliseconds(row, "attn_decode")
                yield Cell(device, "decodes", "", devices, int(row["batch_size"]), context, kv_heads, 0, seconds)


def _exchanged(folder: Path) -> Iterator[Cell]:
    for name, link in _LINKS.items():
        path = folder / f"{name}_allreduce.csv.gz"
        for row in _rows(path) if path.is_file() else ():
            devices = int(row["num_workers"])
            one_host = devices == int(row["devices_per_node"]) and int(row["size"]) <= _LARGEST_BYTES
            if one_host and (link != "pcie4" or devices == int(row["max_devices_per_node"])):
                yield Cell(link, "exchange", "", devices, int(row["size"]), 0, 0, 0, _milliseconds(row, "all_reduce"))


def _iterations(folder: Path) -> Iterator[Cell]:
    for place in (folder, folder.parent):
        path = place / "profile_splitwise_a100_h100.csv.gz"
        if not path.is_file():
            continue
        for row in _rows(path):
            if row["hardware"] not in _SPLITWISE or int(row["token_size"]) != 128:
                continue
            device, model, devices = _SPLITWISE[row["hardware"]], _MODELS[row["model"]], int(row["tensor_parallel"])
            shape = (int(row["prompt_size"]), int(row["batch_size"]), 0, 0)
            yield Cell(device, "prefill", model, devices, *shape, float(row["prompt_time"]) * 1e-3)
            yield Cell(device, "decode", model, devices, *shape, float(row["token_time"]) * 1e-3)
        return
