"""Another user of the same machine: what can be read, and which sockets can be reached.

What is learned from users' requests, logs and the run folder belong to the user that serves; a run folder given by
hand in which Unix sockets would lie is refused when others can enter it, because the sockets have no other protection.
"""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cohort.common import paths
from cohort.common.engine.worker.learned_state import LearnedState
from cohort.common.keys.private_files import keep_private, private_folder
from cohort.services.launcher.processes.child import Child
from cohort.services.launcher.run_files import RunFiles
from cohort.services.length_predictor import state
from cohort.services.length_predictor.buffer import ObservationBuffer

ROOT = Path(__file__).resolve().parents[3]


def mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):03o}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache as an older version left it, for a process with the usual umask."""
    folder = tmp_path / "cache"
    for name in ("length_predictor", "learned", "run"):
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("COHORT_CACHE_DIR", str(folder))
    before = os.umask(0o022)
    yield folder
    os.umask(before)


class Learns:
    def export_state(self) -> bytes:
        return b"{}"

    def import_state(self, data: bytes) -> None: ...


def test_learned_state_of_the_predictor_is_private_to_its_owner(cache: Path) -> None:
    file = cache / "length_predictor" / "m.npz"
    state.save(file, state.State(ObservationBuffer(5).dataset(), None))
    assert [mode(file.parent), mode(file)] == ["700", "600"]


def test_learned_state_of_a_scheduler_is_private_to_its_owner(cache: Path) -> None:
    LearnedState(Learns(), cache / "learned", "m", "").save()  # type: ignore[arg-type]
    assert [mode(cache / "learned"), mode(cache / "learned" / "m.json")] == ["700", "600"]


async def test_logs_are_their_owners(cache: Path) -> None:
    files = RunFiles(paths.run_dir(8000))
    files.make()
    log = files.log_file("gateway")
    log.touch(mode=0o644)  # of the version before
    child = Child([sys.executable, "-c", "print(1)"], log, os.environ)
    assert await asyncio.wait_for(child.wait(), 30) == 0
    assert [mode(path) for path in (cache / "run", files.folder, files.logs, log)] == ["700", "700", "700", "600"]


def test_a_serving_process_creates_nothing_that_others_may_read(cache: Path) -> None:
    before = os.umask(0o022)
    try:
        keep_private()
        (cache / "new").mkdir()
        (cache / "new" / "file").touch()
    finally:
        os.umask(before)
    assert [mode(cache / "new"), mode(cache / "new" / "file")] == ["700", "600"]


def test_the_cache_itself_is_closed_but_a_named_one_is_left_as_it_is(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COHORT_CACHE_DIR may be a folder that several share; what lies in it is closed all the same."""
    cache.chmod(0o755)
    private_folder(cache)
    assert mode(cache) == "755"
    monkeypatch.delenv("COHORT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    own = tmp_path / "home" / "cohort"
    own.mkdir(parents=True)
    own.chmod(0o755)
    private_folder(own)
    assert mode(own) == "700"


def test_a_folder_of_the_operators_is_never_changed(cache: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    private_folder(shared)
    assert mode(shared) == "775"


def serve_in(run_dir: Path, *, sockets: bool, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A process by hand that fails, if nothing else does, because its metrics port is no local address."""
    config = tmp_path / "config.yaml"
    endpoints = ", ".join(
        f"{name}: 'tcp://127.0.0.1:{59000 + index}'"
        for index, name in enumerate(("manager", "predictor", "monitor", "gateway"))
    )
    config.write_text("metrics: {host: 192.0.2.1}\n" + ("" if sockets else f"endpoints: {{{endpoints}}}\n"))
    options = ["--config", str(config), "--run-dir", str(run_dir), "--metrics-port", "1"]
    return subprocess.run(
        [sys.executable, "-P", "-m", "cohort.services.length_predictor", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COHORT_CACHE_DIR": str(tmp_path / "cache")},
    )


@pytest.mark.pipeline
def test_sockets_never_lie_where_others_can_enter(tmp_path: Path) -> None:
    open_to_all, new = tmp_path / "open", tmp_path / "new"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    refused = serve_in(open_to_all, sockets=True, tmp_path=tmp_path)
    assert refused.returncode == 2
    assert "--run-dir: others can enter" in refused.stderr and "0755" in refused.stderr
    assert list(open_to_all.iterdir()) == [] and mode(open_to_all) == "755"

    later = serve_in(new, sockets=True, tmp_path=tmp_path)  # gets further, in a folder it has made
    assert later.returncode == 2 and "--metrics-port" in later.stderr
    assert mode(new) == "700"

    without = serve_in(open_to_all, sockets=False, tmp_path=tmp_path)
    assert without.returncode == 2 and "--metrics-port" in without.stderr
