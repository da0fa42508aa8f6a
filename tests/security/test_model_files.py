"""Files of a model folder that a stranger wrote: each that is malformed ends with one sentence that names it, in
bounded memory and processor time; and a valid one with any bytes changed loads, or ends so too."""

from __future__ import annotations

import json
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from cohort.common.engine.config.gguf_header import MOST_ELEMENTS, open_gguf
from cohort.common.engine.config.lora_checkpoint import read_checkpoint
from cohort.common.engine.config.model_config import ModelGeometry, read_geometry
from cohort.common.engine.weights.gguf_files import GgufFiles
from cohort.common.engine.weights.weight_files import WeightFiles
from cohort.common.errors import ModelError, RequestError
from cohort.services.gateway.text.template_process import TemplateLimits
from cohort.services.gateway.text.tokenizer import Tokenizer
from cohort.services.launcher.models import gguf_folder
from tests.examples import examples

MEMORY_BYTES, CPU_S = 512 << 20, 20.0
CPU = torch.device("cpu")
Change = Callable[[dict[str, Any]], Any]


@contextmanager
def limits() -> Iterator[None]:
    """Limit the address space to what there is and `MEMORY_BYTES`, and processor time."""

    def late(*_: object) -> NoReturn:
        raise AssertionError(f"more than {CPU_S} s of processor time")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, (soft, hard) = signal.signal(signal.SIGPROF, late), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def refused(load: Callable[[], object], complaint: str, file: Path) -> None:
    with limits(), pytest.raises(ModelError, match=complaint) as caught:
        load()
    text = str(caught.value)
    assert file.name in text or file.parent.name in text
    assert len(text) < 1000 + 2 * len(str(file))


def changed(base: dict[str, Any], change: Any) -> bytes:
    """`change`: bytes, or a function of a copy of `base`."""
    if not callable(change):
        return change if isinstance(change, bytes) else json.dumps(change).encode()
    copy = json.loads(json.dumps(base))
    change(copy)
    return json.dumps(copy).encode()


def put(**values: Any) -> Change:
    return lambda data: data.update(values)


# -- GGUF ------------------------------------------------------------------------------------------------------------


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def field(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def tensor(name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(shape)) + b"".join(u64(size) for size in shape) + u32(kind) + u64(offset)


FIELDS: dict[str, bytes] = {
    name: field(name, kind, value)
    for name, kind, value in (
        ("general.architecture", 8, text("llama")),
        ("llama.context_length", 4, u32(64)),
        ("llama.embedding_length", 4, u32(8)),
        ("llama.block_count", 4, u32(1)),
        ("llama.feed_forward_length", 4, u32(16)),
        ("llama.attention.head_count", 4, u32(2)),
        ("llama.attention.head_count_kv", 4, u32(1)),
        ("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        ("tokenizer.ggml.eos_token_id", 4, u32(2)),
    )
}
TENSORS = (tensor("token_embd.weight", (8, 10)), tensor("output_norm.weight", (8,), offset=320))


def gguf(
    *more: bytes,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensors: tuple[bytes, ...] = TENSORS,
    counts: tuple[int, int] | None = None,
    data: bytes = bytes(352),
    **fields: bytes | None,
) -> bytes:
    """A file; `fields` by their last names replace those of `FIELDS`."""
    own = {name.rpartition(".")[2]: value for name, value in FIELDS.items()}
    kept = [value for value in {**own, **fields}.values() if value is not None] + list(more)
    counted = (len(tensors), len(kept)) if counts is None else counts
    head = magic + u32(version) + u64(counted[0]) + u64(counted[1]) + b"".join(kept) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def array(inner: int, count: int, value: bytes = b"") -> bytes:
    return field("list", 9, u32(inner) + u64(count) + value)


def of(name: str, kind: int, value: bytes) -> dict[str, bytes]:
    return {name: field(next(each for each in FIELDS if each.endswith(f".{name}")), kind, value)}


def nested(depth: int) -> bytes:
    return field("list", 9, (u32(9) + u64(1)) * depth + u32(0) + u64(0))


GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a complete GGUF file"),
    "three bytes": (b"GGU", "its magic goes 1 bytes beyond its end at 3"),
    "another magic": (gguf(magic=b"GGML"), "does not begin with GGUF"),
    "version 1": (gguf(version=1), "version 1 is not served"),
    "version 2^31": (gguf(version=1 << 31), "of the other byte order"),
    "only a head": (b"GGUF" + u32(3), "its counts goes"),
    "2^63 tensors": (gguf(counts=(1 << 63, 9)), f"{1 << 63} tensors in a file of"),
    "2^63 fields": (gguf(counts=(0, 1 << 63)), f"{1 << 63} fields of metadata in a file of"),
    "one field too many": (gguf(counts=(2, 10)), "not a complete GGUF file"),
    "one tensor too many": (gguf(counts=(3, 9)), "not a complete GGUF file"),
    "an array of 2^60 bytes": (gguf(array(0, 1 << 60)), f"an array of {1 << 60} elements in a file of"),
    "an array of 2^60 strings": (gguf(array(8, 1 << 60)), f"an array of {1 << 60} elements"),
    "an array of 2^64 - 1 doubles": (gguf(array(12, (1 << 64) - 1)), f"an array of {(1 << 64) - 1} elements"),
    "an array of many bytes, all there": (
        gguf(array(0, MOST_ELEMENTS + 1, bytes(MOST_ELEMENTS + 1))),
        f"at most {MOST_ELEMENTS} in all are served",
    ),
    "arrays within arrays": (gguf(nested(20_000)), "list is an array of type 9"),
    "an array of an unknown type": (gguf(array(77, 1, bytes(8))), "list is an array of type 77"),
    "a field of an unknown type": (gguf(field("x", 77, bytes(8))), "x has type 77, which is unknown"),
    "a name beyond the end": (gguf(u64(1 << 40)), "the name of a field has 1099511627776 bytes"),
    "a name of 10 MB": (gguf(field("x" * 10_000_000, 0, b"1")), "the name of a field has 10000000 bytes"),
    "a string beyond the end": (gguf(field("x", 8, u64(1 << 62) + b"abc")), "x goes .* bytes beyond its end"),
    "a string of a list beyond the end": (gguf(array(8, 2, text("a") + u64(1 << 62))), "list goes .* beyond"),
    "a name that is no UTF-8": (gguf(field(b"\xff\xfe", 0, b"1")), "the name of a field is no UTF-8"),
    "a string that is no UTF-8": (gguf(field("x", 8, text(b"\xff\xfe"))), "x is no UTF-8"),
    "a list that is no UTF-8": (gguf(array(8, 1, text(b"\xff\xfe"))), "a list in its metadata is no UTF-8"),
    "a field twice": (gguf(FIELDS["llama.block_count"]), r"llama\.block_count occurs twice"),
    "a field of the reader's": (gguf(field("GGUF.version", 4, u32(1))), "Duplicate GGUF.version"),
    "alignment 0": (gguf(field("general.alignment", 4, u32(0))), "general.alignment is 0"),
    "alignment 3": (gguf(field("general.alignment", 4, u32(3))), "general.alignment is 3"),
    "alignment 2^31": (gguf(field("general.alignment", 4, u32(1 << 31))), "general.alignment is 2147483648"),
    "alignment as a string": (gguf(field("general.alignment", 8, text("32"))), "general.alignment is 0"),
    "a tensor without dimensions": (gguf(tensors=(tensor("x", ()),)), "x has 0 dimensions"),
    "2^32 - 1 dimensions": (gguf(tensors=(text("x") + u32((1 << 32) - 1) + bytes(64),)), "x has 4294967295 dimensions"),
    "a dimension of 0": (gguf(tensors=(tensor("x", (0, 8)),)), r"x of type 0 has shape \[0, 8\]"),
    "a dimension of 2^63": (gguf(tensors=(tensor("x", (1 << 63,)),)), "x ends at byte"),
    "a product of 2^64": (gguf(tensors=(tensor("x", (1 << 32, 1 << 32)),)), "x ends at byte"),
    "a tensor of an unknown type": (gguf(tensors=(tensor("x", (8,), 999),)), "999 is not a valid"),
    "a row that is no block": (gguf(tensors=(tensor("x", (8, 4), 8),)), r"x of type 8 has shape \[8, 4\]"),
    "a tensor beyond the end": (gguf(tensors=(tensor("x", (8,), offset=1 << 40),)), "x ends at byte"),
    "a tensor at 2^64 - 32": (gguf(tensors=(tensor("x", (8,), offset=(1 << 64) - 32),)), "x ends at byte"),
    "a tensor at an odd byte": (gguf(tensors=(tensor("x", (8,), offset=7),)), "at byte 7"),
    "tensors that overlap": (gguf(tensors=(tensor("a", (16,)), tensor("b", (8,), offset=32))), "a and b overlap"),
    "a tensor twice": (gguf(tensors=(TENSORS[0], TENSORS[0])), "token_embd.weight occurs twice"),
    "data cut": (gguf(data=bytes(351)), "output_norm.weight ends at byte"),
    "no architecture": (gguf(architecture=None), "architecture '' are not served"),
    "architecture as a number": (gguf(**of("architecture", 4, u32(7))), "architecture '7' are not served"),
    "no heads": (gguf(head_count=None), r"lacks llama\.attention\.head_count"),
    "0 heads": (gguf(**of("head_count", 4, u32(0))), r"head_count is 0, llama\.embedding_length 8"),
    "heads as a string": (gguf(**of("head_count", 8, text("many"))), "its metadata are no model's"),
    "an empty list of heads": (gguf(**of("head_count", 9, u32(4) + u64(0))), "differs from layer to layer"),
    "2^31 layers": (gguf(**of("block_count", 4, u32(1 << 31))), "num_hidden_layers is 2147483648; .* 1 to 1024"),
    "0 layers": (gguf(**of("block_count", 4, u32(0))), "num_hidden_layers is 0"),
    "-1 layers": (gguf(**of("block_count", 5, struct.pack("<i", -1))), "num_hidden_layers is -1"),
    "NaN layers": (gguf(**of("block_count", 6, struct.pack("<f", float("nan")))), "its metadata are no model's"),
    "infinite context": (gguf(**of("context_length", 6, struct.pack("<f", float("inf")))), "its metadata are no"),
    "2^32 - 1 wide": (gguf(**of("embedding_length", 4, u32((1 << 32) - 1))), "hidden_size is 4294967295"),
    "epsilon NaN": (gguf(**of("layer_norm_rms_epsilon", 6, struct.pack("<f", float("nan")))), "rms_norm_eps is nan"),
    "end of text as a string": (gguf(**of("eos_token_id", 8, text("end"))), "its metadata are no model's"),
    "rotary factors in 16 bits": (
        gguf(tensors=(*TENSORS[:1], tensor("rope_freqs.weight", (2,), 1, 320))),
        r"rope_freqs\.weight is no list of up to",
    ),
}


@pytest.mark.parametrize("case", GGUF)
def test_a_malformed_gguf_file(case: str, tmp_path: Path) -> None:
    raw, complaint = GGUF[case]
    file = tmp_path / "odd.gguf"
    file.write_bytes(raw)
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(lambda: gguf_folder.make_folder(file, tmp_path / "made"), complaint, file)
    with limits():
        _loads(lambda: GgufFiles(file))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["odd.gguf", "tokenizer.json"]


def test_a_file_of_eighty_bytes_ends_before_the_library_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "odd.gguf"
    file.write_bytes((b"GGUF" + u32(3) + u64(0) + u64(1) + array(0, 1 << 60)).ljust(80, b"\0"))
    reads: list[Path] = []
    monkeypatch.setattr("gguf.GGUFReader", reads.append)
    refused(lambda: open_gguf(file), f"list is an array of {1 << 60} elements in a file of 80 bytes", file)
    assert not reads


def test_the_process_that_reads_a_gguf_file_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits are set before it reads, they hold, and an end by them is one sentence."""
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "odd.gguf"
    file.write_bytes(gguf())
    asked: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: asked.append((what, limit)))
    monkeypatch.setattr(gguf_folder, "make_folder", lambda *_: asked.append((-1, (0, 0))))
    assert gguf_folder.main([str(file), str(tmp_path / "made")]) == 0
    assert [(what, limit[0]) for what, limit in asked] == [
        (resource.RLIMIT_AS, gguf_folder.ADDRESS_BYTES + 2 * len(gguf())),
        (resource.RLIMIT_DATA, 4 << 30),
        (resource.RLIMIT_CPU, 60),
        (resource.RLIMIT_CORE, 0),
        (-1, 0),
    ]
    monkeypatch.undo()
    for work, ends in (("bytearray(5 << 30)", "MemoryError"), ("mmap.mmap(-1, 40 << 30, flags=2)", "allocate memory")):
        lines = ("import mmap", f"from {gguf_folder.__name__} import limit_process", "limit_process(0)", work)
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
        assert ends in done.stderr
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path / "cache"))
    for status, complaint in (
        (-signal.SIGXCPU, "more than 60 s of processor"),
        (-6, "within 4 GiB of memory, signal 6"),
    ):
        monkeypatch.setattr(
            "subprocess.run", lambda *_, status=status, **__: type("Done", (), {"returncode": status, "stderr": ""})
        )
        with pytest.raises(ModelError, match=rf"odd\.gguf: its metadata .*{complaint}"):
            gguf_folder.served_folder(file)


# -- Safetensors -----------------------------------------------------------------------------------------------------

HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "b": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]},
}


def headed(header: bytes, data: bytes = bytes(64), length: int | None = None) -> bytes:
    return u64(len(header) if length is None else length) + header + data


def b_has(**values: Any) -> Change:
    return lambda header: header["b"].update(values)


SAFETENSORS: dict[str, tuple[Any, str]] = {
    "empty": (b"", "truncated or no safetensors file"),
    "a header of 2^63 bytes": (headed(b"{}", length=1 << 63), f"a header of {1 << 63} bytes in a file of 74"),
    "a header beyond the end": (headed(b"{}", b"", 100), "a header of 100 bytes in a file of 10"),
    "no JSON": (headed(b"no"), "Expecting value"),
    "no UTF-8": (headed(b'{"\xff": 1}'), "can't decode byte"),
    "a list": (headed(b"[]"), "its header is no JSON object"),
    "deep nesting": (headed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
    "a number of 10,000 digits": (headed(b'{"a": ' + b"9" * 10_000 + b"}"), "digits"),
    "a name twice": (headed(b'{"a": {}, "a": {}}'), "'a' occurs twice"),
    "a tensor that is a number": (put(b=7), "tensor b in its header"),
    "a tensor that is a list": (put(b=[]), "tensor b in its header"),
    "no dtype": (lambda header: header["b"].pop("dtype"), "tensor b in its header: KeyError"),
    "dtype a list": (b_has(dtype=["F32"]), "tensor b in its header"),
    "another dtype": (b_has(dtype="F64"), "tensor b in its header: .*needs others"),
    "shape a string": (b_has(shape="8"), "tensor b in its header"),
    "shape with a fraction": (b_has(shape=[8.0]), "tensor b in its header"),
    "shape with true": (b_has(shape=[8, True]), "tensor b in its header"),
    "a negative extent": (b_has(shape=[-8]), "tensor b in its header"),
    "extents whose product is huge": (b_has(shape=[1 << 40] * 60), "tensor b in its header"),
    "an extent of 4,000 digits": (b_has(shape=[10**3999]), "tensor b in its header"),
    "10,000 dimensions": (b_has(shape=[1] * 10_000), "tensor b in its header"),
    "offsets of strings": (b_has(data_offsets=["32", "64"]), "tensor b in its header"),
    "offsets with fractions": (b_has(data_offsets=[32.0, 64.0]), "tensor b in its header"),
    "three offsets": (b_has(data_offsets=[32, 48, 64]), "tensor b in its header"),
    "offsets that go back": (b_has(data_offsets=[64, 32]), "tensor b in its header"),
    "offsets before the data": (b_has(data_offsets=[-32, 0]), "tensor b in its header"),
    "offsets beyond the end": (b_has(data_offsets=[64, 96]), r"truncated, its header names \d+ bytes"),
    "offsets beyond 2^70": (b_has(data_offsets=[1 << 70, (1 << 70) + 32]), "truncated, its header names"),
    "tensors that overlap": (b_has(data_offsets=[16, 48]), "tensors a and b in its header overlap"),
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_malformed_safetensors_file(case: str, tmp_path: Path) -> None:
    change, complaint = SAFETENSORS[case]
    raw = change if isinstance(change, bytes) else headed(changed(HEADER, change))
    (tmp_path / "model.safetensors").write_bytes(raw)
    refused(lambda: WeightFiles(tmp_path), complaint, tmp_path / "model.safetensors")


@pytest.mark.parametrize("content", ["../../etc/passwd", "/etc/passwd", "a/../../b", "", "..", "x\0y", 7, None, ["a"]])
def test_an_index_names_files_beside_it_alone(content: Any, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": content}}))
    refused(lambda: WeightFiles(tmp_path), "is no name of a file beside it|lacks", index)


# -- config.json -----------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "vocab_size": 10,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
NESTED = {"model_type": "qwen2_vl", "text_config": {**CONFIG, "num_hidden_layers": 1 << 31}}
MIXTURE = {**CONFIG, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEPSEEK = {**CONFIG, "model_type": "deepseek_v2", "kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2}
CONFIGS: dict[str, tuple[Any, str]] = {
    "empty": (b"", "not valid JSON"),
    "no JSON": (b"{", "not valid JSON"),
    "no UTF-8": (b'{"model_type": "\xff"}', "can't decode byte"),
    "a list": ([], "no JSON object but a list"),
    "deep nesting": (b'{"a":' * 100_000, "nested too deeply"),
    "20 MB": (b" " * (20 << 20), "longer than 16777216 bytes"),
    "a number of 10,000 digits": (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "digits"),
    "no model_type": (lambda config: config.pop("model_type"), "names no model_type"),
    "model_type a number": (put(model_type=7), "names no model_type"),
    "no layers": (lambda config: config.pop("vocab_size") and config.pop("num_hidden_layers"), "vocab_size|lacks|none"),
    "2^31 layers": (put(num_hidden_layers=1 << 31), "num_hidden_layers is 2147483648; .* 1 to 1024"),
    "10^3999 layers": (put(num_hidden_layers=10**3999), "num_hidden_layers is a number of 13285 bits"),
    "-1 layers": (put(num_hidden_layers=-1), "num_hidden_layers is -1"),
    "0 layers": (put(num_hidden_layers=0), "num_hidden_layers is 0"),
    "layers as a string": (put(num_hidden_layers="2"), "num_hidden_layers is '2'"),
    "layers as a list": (put(num_hidden_layers=[2]), "no configuration of llama"),
    "layers as an object": (put(num_hidden_layers={}), "num_hidden_layers is {}"),
    "1.5 layers": (put(num_hidden_layers=1.5), "num_hidden_layers is 1.5"),
    "NaN layers": (put(num_hidden_layers=float("nan")), "num_hidden_layers is nan"),
    "true heads": (put(num_attention_heads=True), "num_attention_heads is True"),
    "0 heads": (put(num_attention_heads=0), "num_attention_heads is 0"),
    "2^20 heads": (put(num_attention_heads=1 << 20), "num_attention_heads is 1048576; .* 1 to 4096"),
    "more heads than elements": (put(num_attention_heads=16), "head_dim is 0, not a whole number"),
    "-1 heads of keys": (put(num_key_value_heads=-1), "num_key_value_heads is -1"),
    "2^40 wide": (put(hidden_size=1 << 40), "hidden_size is 1099511627776; .* 1 to 131072"),
    "2^40 wide inside": (put(intermediate_size=1 << 40), "intermediate_size is 1099511627776"),
    "2^40 tokens": (put(vocab_size=1 << 40), "vocab_size is 1099511627776; .* 1 to 4194304"),
    "2^40 positions": (put(max_position_embeddings=1 << 40), "max_position_embeddings is 1099511627776"),
    "epsilon a string": (put(rms_norm_eps="small"), "no configuration of llama: could not convert"),
    "epsilon NaN": (put(rms_norm_eps=float("nan")), "norm_eps is nan"),
    "theta infinite": (put(rope_theta=float("inf")), "theta is inf"),
    "theta of 400 digits": (put(rope_theta=10**400), "no configuration of llama: int too large"),
    "scaling a string": (put(rope_scaling="yarn"), "no configuration of llama"),
    "scaling factor NaN": (put(rope_scaling={"rope_type": "linear", "factor": float("nan")}), "factor is nan"),
    "scaling from no length": (
        put(rope_scaling={"type": "longrope", "original_max_position_embeddings": 0}),
        "no configuration of llama: division by zero",
    ),
    "end of text an object": (put(eos_token_id={}), "no configuration of llama"),
    "ends of text of strings": (put(eos_token_id=["end"]), "no configuration of llama"),
    "quantisation a string": (put(quantization_config="fp8"), "quantization_config is no JSON object"),
    "quantisation by no method": (put(quantization_config={"quant_method": []}), "unknown are not served"),
    "groups of a list": (put(quantization_config={"config_groups": [1]}), "cannot be read"),
    "blocks of nothing": (put(quantization_config={"quant_method": "fp8", "weight_block_size": []}), "cannot be read"),
    "groups of infinite size": (
        put(quantization_config={"quant_method": "awq", "bits": 4, "group_size": float("inf")}),
        "cannot be read",
    ),
    "a pattern that never ends": (
        put(quantization_config={"quant_method": "fp8", "ignored_layers": ["re:(([a-z_.0-9])+)+!"]}),
        "could take for ever to match",
    ),
    "a pattern that is none": (
        put(quantization_config={"quant_method": "fp8", "ignored_layers": ["re:("]}),
        "is no pattern",
    ),
    "a text model inside": (NESTED, "num_hidden_layers is 2147483648"),
    "no step between experts": ({**MIXTURE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    "2^40 experts": ({**MIXTURE, "num_experts": 1 << 40}, "num_experts is 1099511627776"),
    "0 groups of experts": ({**DEEPSEEK, "n_group": -1}, "n_group is -1"),
    "no pattern of windows": ({**CONFIG, "model_type": "gemma2", "sliding_window_pattern": 0}, "window_pattern is 0"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_malformed_configuration(case: str, tmp_path: Path) -> None:
    change, complaint = CONFIGS[case]
    (tmp_path / "config.json").write_bytes(changed(CONFIG, change))
    refused(lambda: read_geometry(tmp_path), complaint, tmp_path / "config.json")


@pytest.mark.parametrize("content", ["[", "[]", '"x"', "[" * 100_000])
def test_a_malformed_generation_configuration(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(content)
    refused(lambda: read_geometry(tmp_path), "generation_config.json cannot be read", tmp_path / "config.json")


# -- Tokenizers and chat templates -----------------------------------------------------------------------------------


def tokenizer_json() -> dict[str, Any]:
    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    return dict(json.loads(tokenizers.Tokenizer(model).to_str()))


TOKENIZERS: dict[str, tuple[Any, str]] = {
    "empty": (b"", "cannot be read"),
    "no JSON": (b"{", "cannot be read"),
    "no UTF-8": (b'"\xff"', "cannot be read"),
    "a list": ([], "cannot be read"),
    "an empty object": ({}, "cannot be read"),
    "deep nesting": (b'{"model":' + b"[" * 200_000, "cannot be read"),
    "an unknown model": (lambda data: data["model"].update(type="Oracle"), "cannot be read"),
    "a vocabulary that is a number": (lambda data: data["model"].update(vocab=7), "cannot be read"),
    "a token at -1": (lambda data: data["model"]["vocab"].update(a=-1), "cannot be read"),
    "a token at 2^40": (lambda data: data["model"]["vocab"].update(a=1 << 40), "cannot be read"),
    "a merge of absent tokens": (lambda data: data["model"].update(merges=[["x", "y"]]), "cannot be read"),
    "an unknown decoder": (put(decoder={"type": "Oracle"}), "cannot be read"),
    "a pattern that is none": (
        put(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        "cannot be read",
    ),
    "an added token that is a number": (put(added_tokens=[7]), "cannot be read"),
    "a template of absent tokens, at which the library panics": (
        put(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {},
            }
        ),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_malformed_tokenizer(case: str, tmp_path: Path) -> None:
    change, complaint = TOKENIZERS[case]
    (tmp_path / "tokenizer.json").write_bytes(changed(tokenizer_json(), change))
    refused(lambda: Tokenizer(tmp_path), complaint, tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000, b'{"chat_template": [{"name": 1}]}'])
def test_a_malformed_configuration_of_a_tokenizer(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    refused(lambda: Tokenizer(tmp_path), "cannot be read", tmp_path / "tokenizer_config.json")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (b"{% if %}", "template cannot be used: TemplateSyntaxError"),
        (b"{{ 9 ** (9 ** 9) }}", "template cannot be used: .*(processor time|memory)"),
        (b"{{" + b"(" * 50_000 + b"1" + b")" * 50_000 + b"}}", "template cannot be used"),
        (b"{{ 'a' * 10 ** 10 }}", "template cannot be used|memory"),
        (b"\xff\xfe", "its chat template cannot be read"),
        (b" " * (17 << 20), "at most 16777216 are served"),
    ],
)
def test_a_malformed_chat_template(source: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (tmp_path / "chat_template.jinja").write_bytes(source)
    with pytest.raises((ModelError, RequestError), match=complaint):
        tokenizer = Tokenizer(tmp_path, TemplateLimits(cpu_s=2.0))
        tokenizer.warm()
        tokenizer.render_chat([{"role": "user", "content": "x"}], add_generation_prompt=True, variables={})


# -- Adapters --------------------------------------------------------------------------------------------------------

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
ADAPTER_HEADER: dict[str, Any] = {
    f"{Q}A.weight": {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]},
    f"{Q}B.weight": {"dtype": "F32", "shape": [8, 2], "data_offsets": [64, 128]},
}
ADAPTER_CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def geometry(folder: Path) -> ModelGeometry:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return read_geometry(folder)


def renamed(old: str, new: str) -> Change:
    return lambda header: header.update({new: header.pop(old)})


ADAPTERS: dict[str, tuple[Any, Any, str]] = {
    "no JSON": (b"{", None, "not valid JSON"),
    "a list": ([], None, "no JSON object"),
    "deep nesting": (b'{"a":' * 100_000, None, "nested too deeply"),
    "another type": (put(peft_type="PROMPT"), None, "peft_type is 'PROMPT'"),
    "rank 0": (put(r=0), None, "r is 0, not a number above 0"),
    "rank -1": (put(r=-1), None, "r is -1"),
    "rank 1/2": (put(r=0.5), None, "rank of .* is 0.5, no whole number"),
    "rank NaN": (put(r=float("nan")), None, "r is nan"),
    "rank infinite": (put(r=float("inf")), None, "r is inf"),
    "rank of 400 digits": (put(r=10**400), None, "r is a number of 1329 bits"),
    "rank a string": (put(r="2"), None, "r is '2'"),
    "another rank": (put(r=3), None, r"has shape \(2, 8\); with rank 3"),
    "alpha infinite": (put(lora_alpha=float("inf")), None, "lora_alpha is inf"),
    "ranks a list": (put(rank_pattern=[1]), None, "rank_pattern is"),
    "a pattern that is none": (put(rank_pattern={"(": 2}), None, "rank_pattern names no module"),
    "a pattern that never ends": (put(rank_pattern={"(([a-z_.0-9])+)+!": 2}), None, "could take for ever"),
    "many repeats": (put(alpha_pattern={".*" * 20 + "!": 2}), None, "could take for ever"),
    "no tensors": (None, {}, "holds no LoRA tensors"),
    "a half missing": (None, lambda header: header.pop(f"{Q}B.weight"), "lacks tensor .*lora_B"),
    "a header of 2^63 bytes": (None, headed(b"{}", length=1 << 63), "truncated or no safetensors"),
    "another shape": (None, lambda header: header[f"{Q}A.weight"].update(shape=[8, 2]), r"has shape \(8, 2\)"),
    "another dtype": (None, lambda header: header[f"{Q}A.weight"].update(dtype="I32"), "has dtype I32"),
    "a path as a name": (None, renamed(f"{Q}A.weight", "../../etc/passwd"), "passwd is not served"),
    "a layer of 5,000 digits": (
        None,
        renamed(f"{Q}A.weight", Q.replace("layers.0", f"layers.{'9' * 5000}")[:400] + "A.weight"),
        "is not served",
    ),
    "a layer that is absent": (None, renamed(f"{Q}A.weight", Q.replace(".0.", ".7.") + "A.weight"), "of layer 7|lacks"),
    "a module that is absent": (None, renamed(f"{Q}A.weight", Q.replace("q_proj", "x") + "A.weight"), "changes|lacks"),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_malformed_adapter(case: str, tmp_path: Path) -> None:
    about, header, complaint = ADAPTERS[case]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_bytes(changed(ADAPTER_CONFIG, put() if about is None else about))
    raw = header if isinstance(header, bytes) else headed(changed(ADAPTER_HEADER, put() if header is None else header))
    (adapter / "adapter_model.safetensors").write_bytes(raw + bytes(64))
    base = geometry(tmp_path)
    refused(lambda: read_checkpoint("it", adapter, base), complaint, adapter / "adapter_config.json")


# -- Any bytes changed -----------------------------------------------------------------------------------------------

EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.one_of(st.binary(min_size=1, max_size=9), st.just(b"\xff" * 8))),
    min_size=1,
    max_size=6,
)
CUT = st.one_of(st.none(), st.integers(0, 1 << 20))
FUZZ = settings(max_examples=examples(7.5), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def mutated(raw: bytes, edits: list[tuple[int, bytes]], cut: int | None) -> bytes:
    data = bytearray(raw)
    for place, value in edits:
        place %= len(raw)
        data[place : place + len(value)] = value
    return bytes(data if cut is None else data[: cut % len(raw)])


def _loads(load: Callable[[], object]) -> bool:
    try:
        load()
    except ModelError as error:
        assert str(error)
        return False
    return True


def test_the_files_that_are_changed_load_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(gguf())
    (tmp_path / "tokenizer.json").write_text("{}")
    gguf_folder.make_folder(tmp_path / "x.gguf", tmp_path / "made")
    assert read_geometry(tmp_path / "made").num_layers == 1
    assert "model.norm.weight" in GgufFiles(tmp_path / "x.gguf")
    assert geometry(tmp_path).hidden_size == 8
    (tmp_path / "model.safetensors").write_bytes(headed(changed(HEADER, put())))
    assert "b" in WeightFiles(tmp_path)


@FUZZ
@given(edits=EDITS, cut=CUT)
def test_a_gguf_file_with_any_bytes_changed(edits: list[tuple[int, bytes]], cut: int | None, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(mutated(gguf(array(8, 3, text("a") * 3)), edits, cut))
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = tmp_path / "made"

    def read() -> None:
        files = GgufFiles(file)
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            if name in files:
                files.read(name, (10, 8) if "embed" in name else (8,), torch.float32, CPU)

    with limits():
        _loads(read)
        if _loads(lambda: gguf_folder.make_folder(file, folder)):
            _loads(lambda: read_geometry(folder))
    for each in folder.glob("*"):
        each.unlink()
    if folder.exists():
        folder.rmdir()


@FUZZ
@given(edits=EDITS, cut=CUT)
def test_a_safetensors_file_with_any_bytes_changed(
    edits: list[tuple[int, bytes]], cut: int | None, tmp_path: Path
) -> None:
    whole = save({"a": torch.ones(2, 4), "b": torch.from_numpy(np.arange(8, dtype=np.float32))})
    (tmp_path / "model.safetensors").write_bytes(mutated(whole, edits, cut))

    def read() -> None:
        files = WeightFiles(tmp_path)
        with files:
            for name in ("a", "b"):
                if name in files:
                    files.read_stored(name, CPU)

    with limits():
        _loads(read)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(1 << 40)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=4,
)
BASES = (CONFIG, MIXTURE, DEEPSEEK, {**CONFIG, "model_type": "gemma3_text"}, {**CONFIG, "model_type": "gpt_oss"})
KEYS = sorted({key for base in BASES for key in base} - {"model_type"})
KEYS += ["rope_scaling", "rope_parameters", "layer_types", "sliding_window", "head_dim", "quantization_config"]
KEYS += ["query_pre_attn_scalar", "mlp_only_layers", "text_config", "routed_scaling_factor", "swiglu_limit"]


@FUZZ
@given(base=st.sampled_from(BASES), values=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_a_configuration_with_any_values(base: dict[str, Any], values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**base, **values}))
    with limits():
        _loads(lambda: read_geometry(tmp_path))


@FUZZ
@given(edits=EDITS, cut=CUT)
def test_a_configuration_with_any_bytes_changed(
    edits: list[tuple[int, bytes]], cut: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(mutated(json.dumps(MIXTURE).encode(), edits, cut))
    with limits():
        _loads(lambda: read_geometry(tmp_path))
