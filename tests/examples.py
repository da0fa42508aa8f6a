"""How many examples a property tries: a share of the profile's number, so that one option scales the whole suite.

Profiles, chosen by `--hypothesis-profile`: `default` tries 10 examples (`COHORT_TEST_EXAMPLES`: others), `nightly`
2,000; `gpu` 20 without shrinking, for `scripts/gpu_check`. A property without settings of its own tries exactly so
many. No profile has a deadline: how long an example takes is the machine's business. All but `nightly` are
derandomized: unchanged code gives an unchanged verdict, and no database is kept.
`nightly` samples anew each time, shrinks also what shrinks slowly, and prints what reproduces a failure, to be written
down as an `@example`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, example, settings

_NIGHTLY = 2000
_WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)


def register_profiles() -> None:
    """For the root conftest, before any test module is imported: `examples` reads the profile then."""
    most = int(os.environ.get("COHORT_TEST_EXAMPLES", "10"))
    settings.register_profile("default", max_examples=most, deadline=None, derandomize=True)
    settings.register_profile("gpu", max_examples=20, deadline=None, derandomize=True, phases=_WITHOUT_SHRINKING)
    settings.register_profile("nightly", max_examples=_NIGHTLY, deadline=None, print_blob=True)
    settings.load_profile("default")


def examples(share: float) -> int:
    """`share` of the profile's examples, at least one: 0.5 = 5 by default, 1,000 nightly."""
    current: int = settings().max_examples
    return max(1, round(share * current))


def nightly() -> bool:
    """For tests that wait for minutes."""
    return bool(settings().max_examples >= _NIGHTLY)


def _every() -> bool:
    """A GPU needs no interpreter and compiles each by itself, so there all run."""
    return nightly() or Phase.shrink not in settings().phases


def another_of_its_kind() -> pytest.MarkDecorator:
    """Of a test beside one like it."""
    return pytest.mark.skipif(not _every(), reason="one like it runs by default: scripts/test --nightly")


def another_example(**given: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`@example`, of a property with another one like it that runs by default."""
    return example(**given) if _every() else lambda test: test


def of_worlds(share: float) -> settings:
    """Settings of a property whose example is a whole virtual cluster: it shrinks slowly, so only nightly runs do."""
    shrinks = not settings().derandomize
    return settings(
        max_examples=examples(share),
        phases=list(Phase) if shrinks else _WITHOUT_SHRINKING,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


async def run_in_thread(attempt: Callable[[], object]) -> None:
    """Run a property in a thread: its examples are requests to what lives in this loop. Ends with the example at hand
    when cancelled; a thread that nobody ends would try all the others first."""
    thread = list[int]()

    def begin() -> None:
        thread.append(threading.get_ident())
        attempt()

    trying = asyncio.ensure_future(asyncio.to_thread(begin))
    try:
        await asyncio.shield(trying)
    except asyncio.CancelledError:
        while not trying.done():  # it takes effect between two steps of Python code, and not while one waits
            for each in thread:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(each), ctypes.py_object(KeyboardInterrupt))
            await asyncio.wait([trying], timeout=1.0)
        raise
