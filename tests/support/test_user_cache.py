"""Tests leave nothing in the user's cache: shown by runs of pytest in a home to which nobody else writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import user_cache

ROOT = Path(__file__).parents[2]


def run(home: Path, test: str) -> subprocess.CompletedProcess[str]:
    """One test file by a pytest that knows nothing of this one, for a user with that home."""
    folder = home / "tests-of-their-own"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(test, encoding="utf-8")
    ours = ("COHORT_", "XDG_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir"]
    return subprocess.run(
        [*command, str(folder), str(folder / "test_it.py")],
        cwd=home,
        env={**environment, "HOME": str(home), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_is_written_to_the_cache_lands_in_the_runs_and_goes_with_it(tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "cohort"
    (cache / "kernels").mkdir(parents=True)
    done = run(
        tmp_path,
        "from cohort.common.paths import cache_dir\n"
        "def test_it():\n"
        "    print('in', cache_dir())\n"
        "    (cache_dir() / 'learned').mkdir()\n"
        "    (cache_dir() / 'kernels' / 'built').touch()\n"
        "    assert 0, 'to see what it says'\n",
    )
    [said] = [line.removeprefix("in ") for line in done.stdout.splitlines() if line.startswith("in ")]
    assert not Path(said).exists()
    assert [path.relative_to(cache).as_posix() for path in sorted(cache.rglob("*"))] == ["kernels", "kernels/built"]


def test_a_run_that_writes_to_the_users_cache_fails_and_says_what(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "import os\n"
        "from cohort.common.paths import cache_dir\n"
        "def test_it(monkeypatch):\n"
        "    monkeypatch.delenv('COHORT_CACHE_DIR')\n"
        "    (cache_dir() / 'learned').mkdir(parents=True)\n",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cohort/learned" in done.stdout
    assert "1 passed" in done.stdout
    assert not (tmp_path / ".cache").exists()


def test_links_lead_to_what_the_user_has_built_and_to_other_programs_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = tmp_path / "cohort"
    for name in ("kernels/key", "models/SmolLM2-135M-Instruct", "models/another", "learned"):
        (users / name).mkdir(parents=True)
    (tmp_path / "pip").mkdir()
    for name in ("COHORT_TEST_CACHES", "COHORT_CACHE_DIR"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = user_cache.begin()
    assert made is not None
    try:
        assert user_cache.begin() is None, "a worker takes the folder of the process that started it"
        assert sorted(path.name for path in (made / "cache").iterdir()) == ["kernels", "models"]
        assert (made / "cache" / "kernels").resolve() == users / "kernels"
        assert [path.name for path in (made / "cache" / "models").iterdir()] == ["SmolLM2-135M-Instruct"]
        assert [path.name for path in (made / "home").iterdir()] == ["pip"]
    finally:
        user_cache.end(made)
    assert users.is_dir() and not made.exists()
