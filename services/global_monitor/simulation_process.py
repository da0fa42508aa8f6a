"""The simulating process as the planner's host sees it: a job in, an answer out, and it is gone when the monitor is.

Called by `planner.py`. Started early, since its start takes a second of processor time; where it dies, the next job
starts another one. It stays in the
monitor's process group, which the launcher ends with the monitor, and its input ends with the monitor in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import msgspec

from cohort.common.config import Config, dump_config
from cohort.common.keys.private_files import open_private
from cohort.common.planning.simulation_jobs import Answer, Job

_MODULE = "cohort.services.simulator.advise.foresee"
_LONGEST_LINE = 64 << 20
CONFIG_FILE = "planner.yaml"
"""Configuration of the pipeline for the simulations, in the run folder."""


def keep_config(config: Config, file: Path) -> None:
    """Write the configuration for its owner alone, without keys, which no simulation needs. A process in a container
    may have been given several files and options: here they are one."""
    replace = msgspec.structs.replace
    plain = replace(
        config,
        gateway=replace(config.gateway, api_keys=(), tls_cert="", tls_key=""),
        keys=type(config.keys)(),
        recording=type(config.recording)(),
        tracing=type(config.tracing)(),
    )
    with open_private(file, "wb") as written:
        written.write(dump_config(plain).encode())


class ForesightProcess:
    def __init__(self, config_file: Path) -> None:
        self._config_file = config_file
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process ahead of the first job."""
        with contextlib.suppress(OSError):
            await self._started()

    async def ask(self, job: Job) -> Answer:
        """Run a job, one at a time. Returns `Answer.failure` if the process ended."""
        try:
            process = await self._started()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            if line:
                return msgspec.json.decode(line, type=Answer)
            why = "the simulating process ended"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = f"{type(error).__name__}: {error}"
        await self.close()
        return Answer(job.round, (), 0.0, failure=why)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                _MODULE,
                "--config",
                str(self._config_file),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
            )
        return self._process
