"""A cache folder of the run's own: what tests write never lands in the user's.

    the run's folder/cache    COHORT_CACHE_DIR of the tests and of every process they start
                     /cache/kernels, triton, models/<default model>    links to the user's: built once, read by all
                     /home    XDG_CACHE_HOME: whoever forgets COHORT_CACHE_DIR writes to /home/cohort, and is found
                     /home/*  links to the user's folders of other programs

Called by `conftest.py`. A pytest that a test starts uses the folder of the process that started it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from cohort.common import paths

BUILT = ("kernels", "triton")
_OURS = "COHORT_TEST_CACHES"


def begin() -> Path | None:
    """Before anything asks for the cache folder. None where an earlier process of the run has made it."""
    if _OURS in os.environ:
        return None
    users = paths.cache_dir().absolute()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    made = Path(tempfile.mkdtemp(prefix="cohort-"))  # short: a Unix socket's path may have 107 bytes
    (made / "cache" / "models").mkdir(parents=True)
    (made / "home").mkdir()
    shared = [*BUILT, f"models/{paths.DEFAULT_MODEL_NAME}"]
    for name in shared:
        if (users / name).is_dir():
            (made / "cache" / name).symlink_to(users / name)
    for entry in home.iterdir() if home.is_dir() else ():
        if entry.name != "cohort":
            (made / "home" / entry.name).symlink_to(entry.absolute())
    os.environ |= {_OURS: str(made), "COHORT_CACHE_DIR": str(made / "cache"), "XDG_CACHE_HOME": str(made / "home")}
    return made


def strayed(made: Path) -> list[str]:
    """What would lie in the user's cache now: written by those that did not take the run's."""
    return sorted(str(path.relative_to(made / "home")) for path in (made / "home" / "cohort").rglob("*"))


def end(made: Path) -> None:
    for name in (_OURS, "COHORT_CACHE_DIR", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    shutil.rmtree(made, ignore_errors=True)
