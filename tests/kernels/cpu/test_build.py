"""Building the extension: once, atomically, and with a clear error where it cannot be."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from cohort.kernels.cpu import build as build_module
from cohort.kernels.cpu.build import build, build_key, find_compiler, library_path, take_built
from cohort.kernels.errors import KernelBuildError


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes its output file and a line to a log: what a build does, in no time. Returns the log."""
    log = tmp_path / "calls"
    script = tmp_path / "fake-c++"
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {log}\n'
        'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then sleep 0.2; echo built > "$2"; fi; shift; done\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return log


def calls(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_builds_once_and_reports_each_step(fake_compiler, tmp_path):
    words: list[str] = []
    sources = len(list(build_module.SOURCE_DIR.glob("*.cpp")))
    path = build(tmp_path, words.append)
    assert path == library_path(tmp_path)
    assert path.read_text() == "built\n"
    assert words == [f"compiling {done}/{sources}" for done in range(sources + 1)]
    assert calls(fake_compiler) == sources + 1
    assert build(tmp_path) == path
    assert calls(fake_compiler) == sources + 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == sorted([path.name, "lock"])  # no leftovers


@pytest.mark.parametrize("older", [False, True])
def test_only_the_owner_may_read_what_was_built(fake_compiler, tmp_path, older):
    """Set-up runs under the usual umask; an older version left folders and files open."""
    before = os.umask(0o022)
    try:
        path = build(tmp_path)
        made = [path.parent.parent, path.parent, *path.parent.iterdir()]
        assert len(made) == 4
        if older:
            for each in made:
                each.chmod(0o755)
            assert build(tmp_path) == path
    finally:
        os.umask(before)
    assert [stat.S_IMODE(each.stat().st_mode) & 0o077 for each in made] == [0] * 4
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_what_an_image_has_is_taken_by_a_processor_of_the_same_kind(fake_compiler, tmp_path, monkeypatch):
    image, cache = tmp_path / "image", tmp_path / "cache"
    assert not take_built(image, cache) and not cache.exists()
    build(image)
    compiled = calls(fake_compiler)
    assert take_built(image, cache) and take_built(image, cache)
    path = build(cache)
    assert path.read_text() == "built\n" and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert calls(fake_compiler) == compiled
    monkeypatch.setattr(build_module, "_cpu_identity", lambda: "another processor")
    assert not take_built(image, cache)
    assert build(cache) != path and calls(fake_compiler) > compiled


def test_two_builds_at_once_compile_once(fake_compiler, tmp_path):
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert paths == [library_path(tmp_path)] * 2
    assert calls(fake_compiler) == len(list(build_module.SOURCE_DIR.glob("*.cpp"))) + 1


def test_another_processor_or_source_is_another_build(monkeypatch, tmp_path):
    key = build_key()
    assert build_key() == key
    with monkeypatch.context() as changed:
        changed.setattr(build_module, "_cpu_identity", lambda: "another processor")
        assert build_key() != key
    for source in build_module.SOURCE_DIR.glob("*.[ch]*"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build_module, "SOURCE_DIR", tmp_path)
    assert build_key() == key
    with (tmp_path / "simd.h").open("a") as header:
        header.write("\n")
    assert build_key() != key


@pytest.mark.parametrize(("answer", "left_out"), [(0, False), (-1, True)])
def test_a_matrix_unit_that_the_system_refuses_is_left_out(monkeypatch, tmp_path, fake_compiler, answer, left_out):
    asked = []
    monkeypatch.setattr(build_module, "_cpu_identity", lambda: "amx_bf16 amx_tile avx2")
    kernel = SimpleNamespace(syscall=lambda *request: asked.append(request) or answer)
    monkeypatch.setattr(build_module.ctypes, "CDLL", lambda _: kernel)
    build(tmp_path)
    assert set(asked) == {(158, 0x1023, 18)}
    compilations = [line for line in fake_compiler.read_text().splitlines() if "-c" in line.split()]
    assert len(compilations) == len(list(build_module.SOURCE_DIR.glob("*.cpp")))
    assert all(("-mno-amx-tile" in line) == left_out for line in compilations)
    key = build_key()
    monkeypatch.setattr(build_module, "_cpu_identity", lambda: "avx2")
    asked.clear()
    assert build_key() != key
    assert asked == [], "a processor without one"


def test_a_failing_compiler_is_named_with_its_words(monkeypatch, tmp_path):
    script = tmp_path / "broken-c++"
    script.write_text("#!/bin/sh\necho 'no such instruction' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(KernelBuildError, match=r"(?s)broken-c\+\+ ended with 3.*no such instruction"):
        build(tmp_path)
    assert not library_path(tmp_path).exists()


def test_no_compiler_at_all(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        build(tmp_path)


def test_a_lock_that_is_never_released_has_a_deadline(fake_compiler, monkeypatch, tmp_path):
    lock = library_path(tmp_path).parent / "lock"
    lock.parent.mkdir(parents=True)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl,sys,time; f=open(sys.argv[1],'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True);"
            "sys.stdin.read()",
            str(lock),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        monkeypatch.setattr(build_module, "BUILD_TIMEOUT_S", 0.3)
        with pytest.raises(KernelBuildError, match="another build"):
            build(tmp_path)
    finally:
        holder.communicate(timeout=10)
    monkeypatch.setattr(build_module, "BUILD_TIMEOUT_S", 30.0)
    assert build(tmp_path).exists()  # the holder's end freed the lock
