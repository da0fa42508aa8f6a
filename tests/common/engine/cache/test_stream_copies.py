"""Copies on a stream of their own: what `KvCopier` does, in an order that a device keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.engine.cache.kv_copies import KvCopier, StreamCopier
from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.device.streams import HostStream, Mark
from cohort.common.errors import InvariantViolated
from cohort.common.policies import kv_interface
from cohort.common.policies.kv_interface import KvCopy, can_overlap
from cohort.common.types import KvGeometry
from tests.examples import examples

GEOMETRY = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=4, dtype_bytes=4, block_size=8)
BLOCKS, HOST_BLOCKS = 6, 4


def make_kv(seed: int = 0) -> KvTensors:
    random = torch.Generator().manual_seed(seed)
    device = torch.device("cpu")
    kv = KvTensors(GEOMETRY, num_blocks=BLOCKS, host_blocks=HOST_BLOCKS, dtype=torch.float32, device=device)
    kv.blocks.copy_(torch.randn(kv.blocks.shape, generator=random))
    kv.host_blocks.copy_(torch.randn(kv.host_blocks.shape, generator=random))
    return kv


class Watched(HostStream):
    """Tells what is asked of it, in order."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    class _Mark:
        def __init__(self, stream: Watched) -> None:
            self.stream = stream

        def wait(self) -> None:
            self.stream.log.append(f"host waits for {self.stream.name}")

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        self.log.append(f"launch on {self.name}")
        yield

    def mark(self) -> Mark:
        return self._Mark(self)

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, Watched._Mark)
        self.log.append(f"{self.name} after {mark.stream.name}")


def test_the_device_keeps_the_order_and_the_host_waits_once() -> None:
    log: list[str] = []
    copier = StreamCopier(make_kv(), Watched("rows", log), Watched("copies", log))
    first, beside = KvCopy("out", "block", (1,), (0,)), KvCopy("in", "block", (4,), (2,), concurrent=True)
    with copier.around([KvCopy("in", "block", (3,), (1,)), KvCopy("in", "slot", (9,), (3,)), beside]):
        log.append("rows run")
    assert log == [
        "copies after rows",
        "launch on copies",
        "launch on copies",
        "rows after copies",
        "launch on copies",
        "rows run",
        "host waits for copies",
    ]
    log.clear()
    with copier.around([first, beside]):
        log.append("rows run")
    # The rows wait for the gathering on the device, and nothing waits for the way to the host.
    assert log == [
        "copies after rows",
        "launch on copies",
        "rows after copies",
        "launch on copies",
        "launch on copies",
        "rows run",
        "host waits for copies",
    ]
    log.clear()
    with copier.around([first, KvCopy("in", "block", (4,), (0,), concurrent=True)]):
        log.append("rows run")
    # What comes in is what has just gone out: its host memory is settled first.
    assert log == [
        "copies after rows",
        "launch on copies",
        "rows after copies",
        "launch on copies",
        "host waits for copies",
        "launch on copies",
        "rows run",
        "host waits for copies",
    ]
    log.clear()
    with copier.around([]):
        pass
    assert log == []


COPIES = st.lists(
    st.one_of(
        st.builds(
            lambda direction, pairs, beside: KvCopy(
                direction, "block", tuple(d for d, _ in pairs), tuple(h for _, h in pairs), beside
            ),
            st.sampled_from(["out", "in"]),
            st.lists(
                st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, HOST_BLOCKS - 1)),
                max_size=3,
                unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
            ),
            st.just(False),
        ),
        st.builds(
            lambda direction, pairs, beside: KvCopy(
                direction, "slot", tuple(d for d, _ in pairs), tuple(h for _, h in pairs), beside
            ),
            st.sampled_from(["out", "in"]),
            st.lists(
                st.tuples(st.integers(0, BLOCKS * 8 - 1), st.integers(0, HOST_BLOCKS * 8 - 1)),
                max_size=5,
                unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
            ),
            st.just(False),
        ),
    ),
    max_size=6,
)


@settings(max_examples=examples(0.6))
@given(COPIES)
def test_the_same_memory_as_one_after_the_other(copies: list[KvCopy]) -> None:
    """Copies that come first, in any mixture and with any overlap; slots' host part is done late and still in time."""
    ours, theirs = make_kv(), make_kv()
    with StreamCopier(ours, HostStream(), HostStream()).around(copies):
        pass
    copier = KvCopier(theirs)
    with copier.around(copies):
        pass
    copier.close()
    assert torch.equal(ours.blocks, theirs.blocks)
    assert torch.equal(ours.host_blocks, theirs.host_blocks)


@settings(max_examples=examples(0.6))
@given(COPIES)
def test_rows_may_write_over_what_goes_out(copies: list[KvCopy]) -> None:
    """R12 · On its way to the host it is beside the rows; what arrives is what was there before them."""
    ours, theirs = make_kv(), make_kv()
    with StreamCopier(ours, HostStream(), HostStream()).around(copies):
        ours.blocks.fill_(-1.0)
    copier = KvCopier(theirs)
    with copier.around(copies):
        theirs.blocks.fill_(-1.0)
    copier.close()
    assert torch.equal(ours.host_blocks, theirs.host_blocks)


def test_too_much_to_stage_goes_before_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = GEOMETRY.block_bytes
    assert can_overlap([KvCopy("out", "block", (1, 2), (0, 1))], GEOMETRY)
    monkeypatch.setattr(kv_interface, "STAGED_BYTES", 2 * block_bytes)
    assert can_overlap([KvCopy("out", "block", (1, 2), (0, 1))], GEOMETRY)
    assert not can_overlap([KvCopy("out", "block", (1, 2, 3), (0, 1, 2))], GEOMETRY)
    assert not can_overlap([KvCopy("out", "block", (1,), (0,)), KvCopy("in", "block", (2,), (1,))], GEOMETRY)
    log: list[str] = []
    kv = make_kv()
    with StreamCopier(kv, Watched("rows", log), Watched("copies", log)).around(
        [KvCopy("out", "block", (1, 2, 3), (0, 1, 2))]
    ):
        log.append("rows run")
    assert log.index("rows after copies") == 2 and log.count("launch on copies") == 1


def test_a_failed_copy_leaves_nothing_for_the_next_iteration() -> None:
    kv = make_kv()
    copier = StreamCopier(kv, HostStream(), HostStream())
    wanted = kv.blocks[0, :, :, :, 3].clone()
    with (
        pytest.raises(InvariantViolated),
        copier.around([KvCopy("out", "slot", (3,), (0,)), KvCopy("out", "block", (99,), (1,))]),
    ):
        pass
    assert torch.equal(kv.host_blocks[0, :, :, :, 0], wanted)
    with copier.around([KvCopy("in", "block", (5,), (0,))]):
        pass
    assert torch.equal(kv.blocks[5], kv.host_blocks[0])
