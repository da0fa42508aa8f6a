"""Processes on the nodes of a Ray cluster, each a child of an agent there: a back end (`hosts.Hosts`).

One life:  place ─▶ book, configuration ─▶ begin ─▶ news … ─▶ exit code │ its agent is lost; Ray starts it anew

A place may be another one than before: its address goes into the book, and the book to every agent; so does the
configuration when workers come or go. Made by `serving`, called by the supervisor. Decides nothing about restarts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from cohort.common.address_book import AddressBook
from cohort.common.config import Config, dump_config
from cohort.common.keys.private_files import open_private
from cohort.common.types import InstanceId
from cohort.services.launcher.console import State
from cohort.services.launcher.hosts import HostLost, NotStarted, Pipeline, Supervised
from cohort.services.launcher.on_ray.agent import Agent
from cohort.services.launcher.on_ray.order import AgentState, Order, Place, SharedConfig, dialled_as
from cohort.services.launcher.on_ray.placement import (
    Placement,
    added_worker,
    check_possible,
    describe_bundle,
    worker_bundle,
)
from cohort.services.launcher.run_files import RunFilesError
from cohort.services.launcher.supervisor import wait_any

WAIT_NOTICE_S = 5.0
"""Time after which the console shows what a process waits for."""
NO_PLACE_S = 10.0
"""Time for which Ray may look for a place for an additional worker; what a drained one leaves is free in less."""
MAX_FAILED_STARTS = 3


class OnNode:
    """A process and its agent."""

    def __init__(self, process: Supervised, placement: Placement) -> None:
        self.process = process
        self.placement = placement
        self.group: Any = None
        self.actor: Any = None
        self.place: Place | None = None
        self.incarnation = 0
        """Incarnation of the agent whose log has been copied up to `log_end`."""
        self.log_end = 0
        self.deaths = 0
        """Agents in a row that were lost before they reported their place."""
        self.unplaced_since_s = time.monotonic()
        """Monotonic time since which the process has had no place. Meaningless while it has one."""
        self.joined = not placement.added
        """Whether the process has been ready, or the whole pipeline waits for it."""


class Distant:
    """Process that an agent has begun: to the supervisor what a `Child` is. Awaited by one task."""

    def __init__(self, hosts: Actors, node: OnNode, pid: int) -> None:
        self._hosts = hosts
        self._node = node
        self.pid = pid
        self.running = True

    async def wait(self) -> int:
        """Wait for the exit code, and for the rest of the log."""
        try:
            return await self._hosts.followed(self._node)
        finally:
            self.running = False

    def terminate(self) -> None:
        self._node.actor.terminate.remote()

    hand_over = terminate

    def kill(self) -> None:
        self._node.actor.kill.remote()


class Actors:
    no_restart = "a pipeline on Ray is not restarted process by process"

    def __init__(
        self,
        ray: Any,
        pipeline: Pipeline,
        placements: Sequence[Placement],
        order_of: Callable[[Placement], Order],
        config: Config,
    ) -> None:
        self._ray = ray
        self._pipeline = pipeline
        self._placements = {each.plan.instance: each for each in placements}
        self._order_of = order_of
        self._config = config
        self._nodes: dict[Supervised, OnNode] = {}
        self._briefing = SharedConfig(0, AddressBook(), dump_config(config))
        self._located = asyncio.Event()
        """Event: the addresses of all processes that are dialled by role are known."""

    def check(self, config: Config, instance: InstanceId) -> None:
        """Check that one of the present nodes is large enough. Whether it has room to spare is for Ray to find, and
        whether its memory has room for the model, for the agent there."""
        nodes = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        check_possible(worker_bundle(config, instance), nodes)

    def configure(self, config: Config) -> None:
        self._config = config
        text = dump_config(config)
        self._pipeline.files.write_config(text)
        self._brief(self._briefing.book, text)

    def renew(self) -> None:
        """Leave all as it is: every process is begun from the files as they are."""

    def close(self) -> None:
        """Leave nothing: `release` has removed everything."""

    def request_places(self, processes: Sequence[Supervised]) -> None:
        for process in processes:
            added, plan = process.added, process.plan
            placement = added_worker(self._config, plan) if added else self._placements[plan.instance]
            self._nodes[process] = OnNode(process, placement)
        for process in processes:
            try:
                self._request_place(self._nodes[process])
            except Exception as error:  # of many kinds, none of them its own
                raise RunFilesError(f"{process.plan.instance}: Ray does not take it: {error}") from error

    def _request_place(self, node: OnNode) -> None:
        """Request a placement group and an actor. A group with one bundle is on one node as a whole; STRICT_PACK asks
        that of later bundles too. Processes that are spread share a group, each with a bundle of its own."""
        util, placement, plan = self._ray.util, node.placement, node.process.plan
        others = [each for each in self._nodes.values() if each.placement.spread]
        together = [each for each in others if each.process.plan.folder == plan.folder] if placement.spread else [node]
        if node is together[0]:
            bundles = [dict(each.placement.bundle) for each in together]
            node.group = util.placement_group(bundles, strategy="SPREAD" if len(together) > 1 else "STRICT_PACK")
        node.group = together[0].group
        where = util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            node.group, placement_group_bundle_index=together.index(node), placement_group_capture_child_tasks=False
        )
        actor = self._ray.remote(Agent).options(
            num_cpus=placement.bundle.get("CPU", 0.0),
            num_gpus=placement.bundle.get("GPU", 0.0),
            max_restarts=-1,
            scheduling_strategy=where,
        )
        node.actor = actor.remote(self._order_of(placement))
        self._pipeline.console.update(plan.instance, State.WAITING)

    def release(self, process: Supervised) -> None:
        """Remove the process's actor and group. A shared group ends with the first process, which is when all end."""
        node = self._nodes.pop(process, None)
        process.node = ""
        if node is not None and node.actor is not None:
            with suppress(Exception):
                self._ray.kill(node.actor, no_restart=True)
        if node is not None and node.group is not None:
            with suppress(Exception):
                self._ray.util.remove_placement_group(node.group)

    # -- one life ------------------------------------------------------------------------------------------------

    async def begin(self, process: Supervised) -> Distant:
        errors, node = self._ray.exceptions, self._nodes[process]
        try:
            await self._welcome(node, await self._placed(node))
            return Distant(self, node, await node.actor.begin.remote(self._briefing))
        except errors.RayTaskError as error:
            raise NotStarted(str(error.cause or error)) from error
        except errors.RayActorError as error:
            raise self._lost(node, error) from error

    async def _placed(self, node: OnNode) -> Place:
        """Return the agent's place, once Ray has found one and started it. Raises `NotStarted` if no node has room for
        an additional worker, which is not waited for; `HostLost` when the process is not wanted any more."""
        request = asyncio.ensure_future(node.actor.place.remote())
        unwanted = [asyncio.ensure_future(each.wait()) for each in self._ends(node)]
        waited: list[asyncio.Future[Any]] = [request, *unwanted]
        try:
            timeout_s = (
                WAIT_NOTICE_S if node.joined else max(0.0, node.unplaced_since_s + NO_PLACE_S - time.monotonic())
            )
            done, _ = await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                if note := self._lacking(node):
                    if not node.joined:
                        raise NotStarted(note)
                    self._pipeline.console.update(node.process.plan.instance, State.WAITING, note=f"({note})")
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if request not in done:
                raise HostLost("it is not wanted any more")
            place: Place = await request
            return place
        finally:
            for each in waited:
                each.cancel()

    def _ends(self, node: OnNode) -> tuple[asyncio.Event, asyncio.Event]:
        return self._pipeline.stopping, node.process.leaving

    def _lacking(self, node: OnNode) -> str:
        """Return what the process waits for, if Ray has no place for it; else ""."""
        if self._ray.util.placement_group_table(node.group)["state"] not in ("PENDING", "RESCHEDULING"):
            return ""
        return f"for {describe_bundle(node.placement.bundle)}: no node has it to spare"

    async def _welcome(self, node: OnNode, place: Place) -> None:
        """Publish a new or changed address, and wait until all addresses that the process dials are known."""
        if node.incarnation != place.incarnation:
            node.incarnation, node.log_end = place.incarnation, 0
        node.place, node.deaths, process = place, 0, node.process
        process.node, process.ready_url = place.ip, place.ready_url
        name = dialled_as(process.plan)
        book = self._briefing.book
        if name and book.named().get(name) != place.endpoint:
            book = book.entered(name, place.endpoint)
            self._brief(book, self._briefing.config, but=node)
            if book.named().keys() >= {dialled_as(each.plan) for each in self._pipeline.processes} - {""}:
                self._located.set()
        await wait_any((self._located, *self._ends(node)))
        if not self._located.is_set():
            raise HostLost("it is not wanted any more")

    def _brief(self, book: AddressBook, config: str, *, but: OnNode | None = None) -> None:
        """Send a new briefing to all agents without waiting; one that is lost meanwhile gets it when it is back."""
        self._briefing = SharedConfig(self._briefing.edition + 1, book, config)
        for other in self._nodes.values():
            if other is not but and other.place is not None and self._located.is_set():
                other.actor.brief.remote(self._briefing)

    async def followed(self, node: OnNode) -> int:
        """Copy the log until the process has ended and return its exit code. Raises `HostLost`, `NotStarted`."""
        process = node.process
        log = self._pipeline.files.log_file(process.plan.instance)
        try:
            while True:
                state: AgentState = await node.actor.state_since.remote(node.log_end)
                if state.incarnation != node.incarnation:  # Ray was quicker than the request
                    raise self._lost(node)
                node.log_end = state.log_end
                node.joined = node.joined or process.ready.is_set()
                if state.log:
                    with open_private(log, "ab") as file:
                        file.write(f"[{state.skipped} bytes left out]\n".encode() if state.skipped else b"")
                        file.write(state.log)
                elif state.code is not None:
                    return state.code
        except self._ray.exceptions.RayActorError as error:
            raise self._lost(node, error) from error

    def _lost(self, node: OnNode, error: Exception | None = None) -> HostLost | NotStarted:
        where = f" on {node.process.node}" if node.place is not None else ""
        node.deaths += node.place is None
        node.unplaced_since_s = time.monotonic() if node.place is not None else node.unplaced_since_s
        node.place, node.process.node = None, ""
        if node.deaths >= MAX_FAILED_STARTS and isinstance(error, self._ray.exceptions.ActorDiedError):
            return NotStarted(f"its agent cannot be started: {str(error).strip().rpartition(chr(10))[2]}")
        # Requests to an agent without a place fail within seconds, as those to one that was just lost.
        late = time.monotonic() - node.unplaced_since_s > (WAIT_NOTICE_S if node.joined else NO_PLACE_S)
        lacking = self._lacking(node) if late else ""
        if late and not node.joined:
            return NotStarted(lacking or "its agent was lost and did not come back")
        return HostLost(lacking or f"its agent{where} is lost; Ray starts it anew", waits=bool(lacking))
