"""Tensors read by several threads: the same bytes, bounded memory, a progress line, and what is wrong named."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.device.streams import HostStream, Mark
from cohort.common.engine.weights import weight_files, weight_reader
from cohort.common.engine.weights.weight_files import WeightFiles
from cohort.common.engine.weights.weight_reader import Progress, WeightReader
from cohort.common.engine.weights.weights import open_weights
from cohort.common.errors import ModelError
from tests.common.engine.driver import make_runner
from tests.quantised_models import write

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors are cut as large ones are."""
    monkeypatch.setattr(weight_reader, "CHUNK_BYTES", 64)
    monkeypatch.setattr(weight_reader, "_INLINE_BYTES", 16)


def save_shards(folder: Path, shards: list[dict[str, torch.Tensor]]) -> dict[str, str]:
    named = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file)
        named.update(dict.fromkeys(shard, file))
    write_index(folder, named)
    return named


def write_index(folder: Path, named: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


# -- the bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_the_same_values_from_many_chunks(tmp_path: Path, stored: torch.dtype, served: torch.dtype) -> None:
    first, second, vector = torch.randn(37, 9).to(stored), torch.randn(5, 9).to(stored), torch.randn(7).to(stored)
    save_shards(tmp_path, [{"first": first, "vector": vector}, {"second": second}])
    with WeightFiles(tmp_path) as files:
        fused = files.read_rows(["first", "second"], [37, 5], (9,), served, CPU)
        assert torch.equal(fused, torch.cat([first, second]).to(served))
        assert torch.equal(files.read("vector", (7,), served, CPU), vector.to(served))


def test_pytorch_files_likewise(tmp_path: Path) -> None:
    weight = torch.randn(24, 31).t()  # not contiguous in the file
    torch.save({"weight": weight}, tmp_path / "pytorch_model.bin")
    with WeightFiles(tmp_path) as files:
        assert torch.equal(files.read("weight", (31, 24), torch.bfloat16, CPU), weight.bfloat16())


def test_packed_weights_are_the_same(model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every packed and plain tensor of a model, read in chunks by threads and read whole."""
    folder = model_folder("qwen2")
    ours: Any = make_runner(folder)._model
    state = load_file(folder / "model.safetensors")

    class Whole:
        """The same files through safetensors' own reader."""

        def read_rows(self, names: Any, rows: Any, rest: Any, dtype: Any, device: Any) -> torch.Tensor:
            return torch.cat([state[name] for name in names]).to(dtype)

    monkeypatch.setattr(WeightFiles, "read_rows", Whole.read_rows)
    theirs: Any = make_runner(folder)._model
    for layer, other in zip(ours._layers, theirs._layers, strict=True):
        for mine, expected in zip(products(layer), products(other), strict=True):
            assert mine.panel_data is not None and torch.equal(mine.panel_data, expected.panel_data)
        assert torch.equal(layer.qkv.bias, other.qkv.bias) and torch.equal(layer.input_norm, other.input_norm)
    assert torch.equal(ours._lm_head.packed.data, theirs._lm_head.packed.data)


def products(layer: Any) -> tuple[Any, ...]:
    return layer.qkv, layer.attention_out, layer.mlp.gate_up, layer.mlp.down


# -- by way of page-locked memory --------------------------------------------------------------------------------


class LateStream(HostStream):
    """A device that copies as late as it may: when it is waited for."""

    made: list[LateStream]
    current = threading.local()

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.most = 0

    class _Late:
        def __init__(self, stream: LateStream, upto: int) -> None:
            self.stream, self.upto = stream, upto

        def wait(self) -> None:
            self.stream.perform(self.upto)

    def perform(self, upto: int) -> None:
        for index in range(upto):
            if self.copies[index]:
                place, chunk = self.copies[index]
                with torch.inference_mode():
                    place.copy_(chunk)
                self.copies[index] = ()  # type: ignore[call-overload]

    def use(self) -> Any:
        LateStream.current.stream = self
        return super().use()

    def mark(self) -> Mark:
        self.most = max(self.most, sum(bool(copy) for copy in self.copies))
        return self._Late(self, len(self.copies))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LateStream]]:
    made: list[LateStream] = []

    def launch(place: torch.Tensor, chunk: torch.Tensor) -> None:
        LateStream.current.stream.copies.append((place, chunk))

    def reader(device: torch.device, progress: Progress) -> WeightReader:
        def stream(_: torch.device) -> LateStream:
            made.append(LateStream())
            return made[-1]

        return WeightReader(device, progress, threads=3, staged=True, streams=stream)

    monkeypatch.setattr(weight_reader, "launch_copy", launch)
    monkeypatch.setattr(weight_files, "WeightReader", reader)
    yield made


@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_no_chunk_is_filled_again_before_the_device_has_read_it(
    tmp_path: Path, late: list[LateStream], served: torch.dtype
) -> None:
    tensors = {f"t{index}": torch.randn(50, 7) for index in range(6)}
    save_shards(tmp_path, [tensors])
    with WeightFiles(tmp_path) as files:
        places = {name: files.read(name, (50, 7), served, CPU) for name in tensors}
    for name, tensor in tensors.items():
        assert torch.equal(places[name], tensor.to(served))
    assert 1 <= len(late) <= 3 and all(stream.most <= 2 for stream in late)  # two chunks a thread, no more


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq-4"])
def test_codes_are_there_before_they_are_dequantised(
    tmp_path: Path, late: list[LateStream], model_folder: Callable[[str], Path], name: str
) -> None:
    """Also beside plain tensors that are still on their way."""
    written = write(model_folder("qwen3"), tmp_path, name)
    expected, read = written.weights, {}
    with open_weights(written.folder, "files", read_geometry(written.folder).quantization) as files:
        for full_name, tensor in expected.items():
            read[full_name] = files.read(full_name, tensor.shape, torch.float32, CPU)
    assert late and all(torch.equal(read[full_name], tensor) for full_name, tensor in expected.items())


def test_a_failure_in_a_thread_is_raised_where_it_is_awaited(tmp_path: Path, late: list[LateStream]) -> None:
    tensors = {f"t{index}": torch.randn(50, 7) for index in range(6)}
    save_shards(tmp_path, [tensors])
    path = tmp_path / "model-00001-of-00001.safetensors"

    def read_all() -> None:
        with WeightFiles(tmp_path) as files:
            with path.open("r+b") as file:  # after the size was looked at
                file.truncate(path.stat().st_size - 3000)
            for name in tensors:
                files.read(name, (50, 7), torch.float32, CPU)

    before = set(threading.enumerate())
    with pytest.raises(ModelError, match=r"model-00001-of-00001\.safetensors ends within tensor t\d"):
        read_all()
    assert set(threading.enumerate()) <= before


def test_one_reader_in_memory_of_its_own(tmp_path: Path) -> None:
    """Threads end with the context, also after an error."""
    save_shards(tmp_path, [{"a": torch.randn(50, 7)}])
    before = set(threading.enumerate())
    with WeightFiles(tmp_path) as files:
        files.read("a", (50, 7), torch.float32, CPU)
    assert set(threading.enumerate()) <= before
    with pytest.raises(ModelError, match="shape"), WeightFiles(tmp_path) as files:
        files.read("a", (50, 7), torch.float32, CPU)
        files.read("a", (50, 8), torch.float32, CPU)
    assert set(threading.enumerate()) <= before


# -- the progress line -------------------------------------------------------------------------------------------


def test_a_line_a_second_at_most_and_one_at_the_end() -> None:
    now = [10.0]
    with structlog.testing.capture_logs() as logs:
        progress = Progress(4_000_000_000, lambda: now[0])
        for _ in range(8):
            now[0] += 0.3
            progress.add(500_000_000)
        progress.end()
    assert [(entry["event"], entry.get("percent"), entry["gigabytes_per_s"]) for entry in logs] == [
        ("loading weights", 50, 1.67),
        ("loading weights", 100, 1.67),
        ("weights read", None, 1.67),
    ]
    assert (logs[-1]["gigabytes"], logs[-1]["seconds"]) == (4.0, 2.4)


def test_a_quick_load_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress.__init__, "__defaults__", (lambda: 10.0,))
    save_shards(tmp_path, [{"a": torch.randn(50, 7)}])
    with structlog.testing.capture_logs() as logs, WeightFiles(tmp_path) as files:
        files.read("a", (50, 7), torch.float32, CPU)
    assert [entry["event"] for entry in logs] == ["weights read"]


# -- what is wrong -----------------------------------------------------------------------------------------------


def header(tensors: dict[str, Any]) -> bytes:
    raw = json.dumps(tensors).encode()
    return len(raw).to_bytes(8, "little") + raw


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda whole: b"", "truncated or no safetensors file"),
    "cut in its header": (lambda whole: whole[:20], "truncated or no safetensors file"),
    "cut in its tensors": (lambda whole: whole[:-1], r"truncated, its header names \d+ bytes and it has \d+"),
    "no header": (lambda whole: (9).to_bytes(8, "little") + b"not JSON!" + whole[17:], "Expecting value"),
    "a header that is a list": (lambda whole: (2).to_bytes(8, "little") + b"[]", "no JSON object"),
    "no offsets": (lambda whole: header({"b": {"dtype": "F32", "shape": [1]}}), "tensor b in its header"),
    "a shape of other size": (
        lambda whole: header({"b": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}) + bytes(8),
        r"tensor b in its header.*8 bytes, shape \(3,\)",
    ),
    "offsets that go back": (
        lambda whole: header({"b": {"dtype": "F32", "shape": [0], "data_offsets": [8, 0]}}) + bytes(8),
        "tensor b in its header",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_shard_is_named_with_what_is_wrong(tmp_path: Path, damage: str) -> None:
    change, words = DAMAGED[damage]
    save_shards(tmp_path, [{"a": torch.randn(4, 7)}, {"b": torch.randn(4, 7)}])
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelError, match=rf"model-00002-of-00002\.safetensors cannot be read: .*{words}"):
        WeightFiles(tmp_path)


def test_a_damaged_pytorch_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read"):
        WeightFiles(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    named = save_shards(tmp_path, [{"a": torch.randn(4)}, {"b": torch.randn(4)}])
    write_index(tmp_path, {**named, "c": named["b"]})
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors lacks tensor c, which .*index\.json says"):
        WeightFiles(tmp_path)


def test_a_tensor_that_the_index_lacks_is_named(tmp_path: Path) -> None:
    named = save_shards(tmp_path, [{"a": torch.randn(4)}, {"b": torch.randn(4)}])
    write_index(tmp_path, {"a": named["a"]})
    with pytest.raises(ModelError, match=r"lacks 1 tensors .*: b; model\.safetensors\.index\.json does not name them"):
        WeightFiles(tmp_path).require(["a", "b"])


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json cannot be read"):
        WeightFiles(tmp_path)


def test_a_dtype_that_is_not_served_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({"a": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}) + bytes(8))
    with pytest.raises(ModelError, match="tensor a has dtype F4"), WeightFiles(tmp_path) as files:
        files.read("a", (16,), torch.float32, CPU)
