"""Live: the planner of docker/kubernetes/overlays/planned. Its monitor asks an API server for a worker under load and
for one less without; the containers' commands run as processes, and what a kubelet does is done to them.

No API server of Kubernetes, no scheduler: tests/kubernetes_double.py stands in for the one, this file for the other.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.e2e.equality.test_seeds import tiny_model
from tests.e2e.hosts.test_kubernetes_processes import KEY, Cluster
from tests.e2e.test_planner import DEADLINE_S, OPTIONS, all_served, decisions, ready_workers, state_of, under_load, why
from tests.e2e.test_planner import shapes as between
from tests.examples import nightly
from tests.kubernetes_double import ApiServer
from tests.scripts.test_kubernetes import FOLDER, of_kind

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(not nightly(), reason="load, and its end, take a minute: scripts/test --nightly"),
]

MOUNT = """\
from pathlib import Path
import cohort.services.global_monitor.kubernetes_api as api
api.ACCOUNT = Path({account!r})
"""


class Planned(Cluster):
    """With an API server. What it wants of StatefulSets is started and ended here. Asked as `Serve` is."""

    key = KEY

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder, model, FOLDER / "overlays" / "planned", options())
        monitor = self.pods["global-monitor-0"]
        (folder / "logs").mkdir()
        (folder / "logs" / "monitor.log").symlink_to(monitor.own / "log")
        self.files = SimpleNamespace(folder=folder)
        self.account = folder / "account"
        self.account.mkdir()
        self.server = ApiServer(of_kind("planned", "Role")["global-monitor"], unified_worker=1)
        self.server.sets |= ApiServer({}, prefill_worker=0, decode_worker=0).sets
        self.server.on_scaled = self.scaled
        self.ended: list[tuple[str, int]] = []
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        environ = await self.server.start(self.account)
        site = self.account / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(MOUNT.format(account=str(self.account)))
        path = os.pathsep.join((str(site), os.environ.get("PYTHONPATH", "")))
        for name, pod in self.pods.items():
            pod.start(**({**environ, "PYTHONPATH": path} if name == "global-monitor-0" else {}))
        self.server.add_pod("unified-worker-0", phase="Running")
        await asyncio.to_thread(self.until_ready, 300)

    def scaled(self, name: str, before: int, after: int) -> None:
        for index in range(before, after):
            self.pod(name, index).start()
            self.server.add_pod(f"{name}-{index}", phase="Running")
        for index in range(after, before):
            self._ending.add(asyncio.create_task(self._end(f"{name}-{index}")))

    async def _end(self, name: str) -> None:
        code = await asyncio.to_thread(self.pods[name].end)
        del self.server.pods[name]
        self.ended.append((name, code))

    async def stop(self) -> None:
        for pod in self.pods.values():
            if hasattr(pod, "process"):
                await asyncio.to_thread(pod.end)
        await self.server.stop()


def options() -> dict[str, Any]:
    found: dict[str, Any] = {"model": {"served_name": "served"}}
    for name, value in OPTIONS.items():
        section, option = name.split(".")
        found.setdefault(section, {})[option] = yaml.safe_load(value) if isinstance(value, str) else value
    found["speculation"] = {"mode": "off"}
    found["policies"] = {"placement": "colocated", "prefill_order": "fcfs", "iteration": "continuous_batching"}
    return found


async def test_a_pod_comes_with_the_load_and_goes_with_it(tmp_path: Path):
    planned = Planned(tmp_path, tiny_model(tmp_path))
    try:
        await planned.start()
        assert planned.server.writes == []  # its own question at the start wrote nothing
        both = {"unified-worker-0", "unified-worker-1"}
        all_served((await under_load(planned, lambda state: ready_workers(state) == both))[0])
        assert planned.server.writes[0] == ("unified-worker", 2)
        grown = decisions(await asyncio.to_thread(state_of, planned))[0]
        assert (grown["action"], grown["before"], grown["after"]) == ("changed", *between(1, 2))
        deadline_s = time.monotonic() + DEADLINE_S
        while not planned.ended:
            assert time.monotonic() < deadline_s, why(planned)
            await asyncio.sleep(0.2)
        assert planned.ended == [("unified-worker-1", 0)]  # SIGTERM, within its grace period
        assert planned.server.writes == [("unified-worker", 2), ("unified-worker", 1)]
        state = await asyncio.to_thread(state_of, planned)
        assert ready_workers(state) == {"unified-worker-0"} and planned.server.pods.keys() == {"unified-worker-0"}
    finally:
        await planned.stop()
