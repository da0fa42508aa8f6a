"""A world whose machines all write down what they are told and answer, for the replayer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from cohort.common.config import Config
from cohort.common.machines.gateway.gateway import GatewayMachine
from cohort.common.machines.recorder import GatewayHeader, Header, ManagerHeader, Recorded, WorkerHeader, config_text
from cohort.common.policies import compose
from cohort.common.virtual_cluster.cluster import MANAGER
from cohort.common.virtual_cluster.plugins import Node, WorkerNode
from tests.common.machines.world import GATEWAY_SETTINGS, MANAGER_SETTINGS, World


class RecordedWorld(World):
    """One file per process; one that is killed has written its last line then."""

    def __init__(self, *args: Any, recording: tuple[Config, Path], **options: Any) -> None:
        """`recording`: what the policies are built from, and the folder."""
        self._recorded, self._folder = recording
        self._config_text = config_text(self._recorded)
        self._files: list[BinaryIO] = []
        self._headers: dict[str, Header] = {}
        super().__init__(*args, **options)

    def close(self) -> list[Path]:
        """The recordings, whole."""
        for file in self._files:
            file.close()
        return [Path(file.name) for file in self._files]

    def make_gateway(self, name: str, incarnation: int, now_s: float) -> GatewayMachine:
        self._headers[name] = GatewayHeader(
            name, incarnation, name, GATEWAY_SETTINGS, now_s, MANAGER, "", self._config_text
        )
        admission = compose.admission(self._recorded)
        return GatewayMachine(name, incarnation, name, GATEWAY_SETTINGS, admission, now_s, predictor="")

    def make_manager(self, name: str, incarnation: int, now_s: float) -> Any:
        self._headers[name] = ManagerHeader(name, incarnation, MANAGER_SETTINGS, now_s, self._config_text)
        return super().make_manager(name, incarnation, now_s)

    def _worker_made(self, node: WorkerNode, seed: int) -> None:
        self._record(node, WorkerHeader(node.worker.setup, seed, self._config_text))

    def _checked(self, node: Node) -> None:
        if not isinstance(node, WorkerNode):
            self._record(node, self._headers[node.name])
        super()._checked(node)

    def _record(self, node: Node, header: Header) -> None:
        file = (self._folder / f"{len(self._files):03}-{node.name}.jsonl").open("wb")
        self._files.append(file)
        node.handle = Recorded(node.machine, header, file.write).handle
