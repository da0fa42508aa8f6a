"""The loop of all tests: what stalls it takes no time from deadlines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.steady_loop import SteadyLoop


async def test_tests_run_on_it() -> None:
    assert isinstance(asyncio.get_running_loop(), SteadyLoop)


async def test_a_deadline_survives_a_callback_that_is_not_scheduled_for_longer() -> None:
    async with asyncio.timeout(0.3):
        time.sleep(0.6)  # noqa: ASYNC251 -- what is not scheduled for so long
        await asyncio.sleep(0.01)


async def test_a_deadline_passes_all_the_same_where_nothing_stalls() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await asyncio.sleep(60)


async def test_a_selection_is_short_but_no_timer_fires_early() -> None:
    began_s = time.monotonic()
    await asyncio.sleep(0.3)
    assert time.monotonic() - began_s >= 0.29


def test_a_process_that_was_stopped_has_its_deadline_before_it() -> None:
    program = (
        "import asyncio\n"
        "from tests.support.steady_loop import SteadyLoop\n"
        "async def main():\n"
        "    async with asyncio.timeout(0.9):\n"
        "        print('waits', flush=True)\n"
        "        await asyncio.sleep(0.4)\n"
        "    print('in time', flush=True)\n"
        "with asyncio.Runner(loop_factory=SteadyLoop) as runner:\n"
        "    runner.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == "in time\n"
