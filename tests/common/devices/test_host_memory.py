"""What a host, and the containers around a process, leave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.devices.host_memory import available_bytes, computes_bfloat16
from cohort.common.devices.inventory import Sources

MIB = 1 << 20


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    found = Sources(proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")
    (found.proc / "self").mkdir(parents=True)
    found.cgroup.mkdir()
    (found.proc / "meminfo").write_text("MemTotal: 8192 kB\nMemAvailable:    4096 kB\n")
    return found


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nunevictable 0\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_without_a_container_it_is_what_the_host_has(sources: Sources) -> None:
    assert available_bytes(sources) == 4 * MIB
    (sources.proc / "self" / "cgroup").write_text("0::/a/b\n")
    group(sources.cgroup / "a" / "b", V2, "max", 3 * MIB, 0)
    assert available_bytes(sources) == 4 * MIB


def test_the_narrowest_group_around_the_process_counts(sources: Sources) -> None:
    """Cache that may be dropped is not in the way."""
    (sources.proc / "self" / "cgroup").write_text("0::/a/b\n")
    group(sources.cgroup / "a" / "b", V2, str(8 * MIB), 7 * MIB, MIB)
    assert available_bytes(sources) == 2 * MIB
    group(sources.cgroup / "a", V2, str(4 * MIB), 3 * MIB + 5, 0)
    assert available_bytes(sources) == MIB - 5
    group(sources.cgroup / "a", V2, str(4 * MIB), 5 * MIB, 0)
    (sources.proc / "meminfo").unlink()
    assert available_bytes(sources) == 0


def test_a_container_sees_its_own_group_at_the_root(sources: Sources) -> None:
    (sources.proc / "self" / "cgroup").write_text("0::/\n")
    group(sources.cgroup, V2, str(3 * MIB), MIB, 0)
    assert available_bytes(sources) == 2 * MIB


def test_the_first_version_of_cgroups(sources: Sources) -> None:
    (sources.proc / "self" / "cgroup").write_text("4:cpu,memory:/x\n3:cpuset:/y\n")
    group(sources.cgroup / "memory" / "x", V1, str(2 * MIB), MIB, 7)
    group(sources.cgroup / "memory", V1, str(0x7FFFFFFFFFFFF000), MIB, 0)
    assert available_bytes(sources) == MIB + 7


def test_nothing_known() -> None:
    assert available_bytes(Sources(proc=Path("/nowhere"), cgroup=Path("/nowhere"))) == 0


def test_bfloat16_by_the_processors_flags(sources: Sources) -> None:
    assert not computes_bfloat16(sources)
    (sources.proc / "cpuinfo").write_text("model name: x\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n")
    assert computes_bfloat16(sources)
    (sources.proc / "cpuinfo").write_text("flags\t\t: fpu avx2\n")
    assert not computes_bfloat16(sources)
