"""Keeps the processes of a pipeline on a Ray cluster: the launcher's side of its agents.

Per process one task:  group, actor ─▶ place ─▶ start ─▶ news … ─▶ its agent is lost ─▶ place (Ray's next) ─▶ start …
Stopping: stage by stage as on one machine, then every actor and every placement group is removed.

A place may be another one than before: its address goes into the book, and the book to every agent; so does the
configuration when workers come or go (`WorkerHosts`, called by the worker desk). Called by `serving` in place of the
supervisor of one machine, with the same console and log files. Decides nothing about restarts: of a process they are
its agent's, of an agent Ray's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from cohort.common.address_book import AddressBook
from cohort.common.config import Config, dump_config
from cohort.common.keys.private_files import open_private
from cohort.common.types import InstanceId
from cohort.services.launcher.console import Console, Line, State
from cohort.services.launcher.on_ray.agent import Agent
from cohort.services.launcher.on_ray.order import Briefing, News, Order, Place, dialled_as
from cohort.services.launcher.on_ray.placement import Placement, check_possible, newcomer, said, worker_bundle
from cohort.services.launcher.plan import ProcessPlan, StopStage
from cohort.services.launcher.run_files import ProcessMark, RestartState, RunFiles, RunFilesError
from cohort.services.launcher.supervisor import (
    FAILED_STOP_TIMEOUT_S,
    KILL_TIMEOUT_S,
    echo_logs,
    show_failure,
    wait_all_or,
    wait_any,
)

AGENT_THREADS = 8
"""Of Ray's, for an agent's methods: a question for news may stand open in each while an answer was lost."""
PATIENCE_S = 5.0
"""From then on the console says what a process waits for."""
NO_PLACE_S = 10.0
"""So long Ray may look for a place for a worker that comes to others: what a drained one leaves is free in less."""
RETRY_S = 0.1
LOCATE_TIMEOUT_S = 86_400.0  # Ray may wait for nodes to join; the operator decides for how long
DEATHS_AT_START = 3


class Kept:
    """One process and what its agent last said."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.plan = placement.plan
        self.group: Any = None
        self.actor: Any = None
        self.task: asyncio.Task[None] | None = None
        self.place: Place | None = None
        self.ready_url = ""
        self.ready = asyncio.Event()
        self.done = asyncio.Event()
        self.deaths = 0
        """Of agents in a row that never got as far as to say where they are."""
        self.homeless_s = time.monotonic()
        """Since then it has had no place, where it has none."""
        self.joined = not placement.newcomer
        """It has been ready, or everything waits for it."""
        self.leaving = False
        """Asked to end, and not to come back."""
        self.failure = ""

    @property
    def instance(self) -> str:
        return self.plan.instance


class RaySupervisor:
    def __init__(
        self,
        ray: Any,
        placements: Sequence[Placement],
        order_of: Callable[[Placement], Order],
        config: Config,
        files: RunFiles,
        console: Console,
        *,
        on_change: Callable[[], None],
    ) -> None:
        self._ray = ray
        self._order_of = order_of
        self._files = files
        self._console = console
        self._on_change = on_change
        self._kept = [Kept(placement) for placement in placements]
        self._config = config
        self._briefing = Briefing(0, AddressBook(), dump_config(config))
        self._located = asyncio.Event()
        """All that are dialled by their role are known."""
        self._stopping = asyncio.Event()
        self._kill_now = asyncio.Event()
        self._failure = ""
        self._takes_orders = False

    @property
    def marks(self) -> dict[str, ProcessMark]:
        """None of this machine's: agents are elsewhere, or children of Ray's."""
        return {}

    @property
    def nodes(self) -> dict[str, str]:
        """Where each process is, as far as it is known."""
        return {kept.instance: kept.place.ip for kept in self._kept if kept.place is not None}

    @property
    def ready_urls(self) -> dict[str, str]:
        return {kept.instance: kept.ready_url or kept.plan.ready_url for kept in self._kept}

    @property
    def restart(self) -> RestartState:
        """Never one."""
        return RestartState(0, [], [])

    def request_restart(self) -> None:
        """`cohort restart` refuses before; a signal by hand is answered in words."""
        self._console.say("a pipeline on Ray is not restarted process by process", style="yellow")

    def request_stop(self) -> None:
        """First call: drain and end. Second: kill."""
        if self._stopping.is_set():
            self._kill_now.set()
        self._stopping.set()

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Until everything has ended and nothing of it is left in Ray. `on_ready`: once, when all are ready."""
        helpers: list[asyncio.Task[None]] = []
        try:
            for kept in self._kept:
                self._files.start_log(kept.instance)
                self._ask_for(kept)
            for kept in self._kept:
                kept.task = self._begun(self._keep(kept))
            helpers = [self._begun(self._announce(on_ready)), self._begun(self._watch_logs())]
            self._takes_orders = True
            await self._stopping.wait()
            self._takes_orders = False
            await self._stop_all()
            for task in self._tasks(helpers):
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
        finally:
            self._takes_orders = False
            tasks = self._tasks(helpers)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for kept in self._kept:
                self._release(kept)
        return 1 if self._failure else 0

    def _tasks(self, helpers: Sequence[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
        return [*(kept.task for kept in self._kept if kept.task is not None), *helpers]

    def _begun(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A defect of ours must not leave the pipeline to itself."""
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or "the launcher failed"
            self._stopping.set()

    # -- workers that come and go --------------------------------------------------------------------------------

    def check(self, config: Config, instance: InstanceId) -> None:
        """Of the nodes that there are now. Whether one has it to spare is for Ray to find, and whether its memory has
        room for the model, for the agent there."""
        nodes = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        check_possible(worker_bundle(config, instance), nodes)

    def configure(self, config: Config) -> None:
        self._config = config
        text = dump_config(config)
        self._files.write_config(text)
        self._brief(self._briefing.book, text)

    async def add(self, plan: ProcessPlan, timeout_s: float) -> None:
        """A group and an actor for one more worker; returns when it is ready. Raises `RunFilesError` when Ray finds no
        place for it, when it ends before it is ready, or takes longer: then nothing of it stays."""
        if not self._takes_orders or self._stopping.is_set():
            raise RunFilesError("the pipeline is stopping")
        kept = Kept(newcomer(self._config, plan))
        self._kept.append(kept)
        self._console.add(Line(plan.instance, plan.port, self._files.log_file(plan.instance)))
        self._files.start_log(plan.instance)
        try:
            self._ask_for(kept)
        except Exception as error:  # of many kinds, none of them its own
            await self.retire(plan.instance)
            raise RunFilesError(f"{plan.instance}: Ray does not take it: {error}") from error
        kept.task = self._begun(self._keep(kept))
        await wait_any((kept.ready, kept.done, self._stopping), timeout_s)
        if self._stopping.is_set():
            raise RunFilesError("the pipeline is stopping")  # and ends it with the others
        if not kept.ready.is_set():
            why = kept.failure or f"{plan.instance} is not ready after {timeout_s:.0f} s"
            await self.retire(plan.instance)
            raise RunFilesError(why)
        kept.joined = True
        self._on_change()

    async def retire(self, instance: str) -> None:
        """One process drains and ends, for good; returns when its actor and group are gone. By force where it does not
        end in time, and where its agent does not answer: its node may be lost, and Ray not know it yet."""
        kept = next((each for each in self._kept if each.instance == instance), None)
        if kept is None:
            raise RunFilesError(f"no process named {instance}")
        kept.leaving = True
        if kept.place is not None and not kept.done.is_set():
            self._console.update(instance, State.STOPPING)
            kept.actor.stop.remote()
            await wait_any((kept.done, self._kill_now), kept.plan.stop_timeout_s)
            if not kept.done.is_set():
                self._console.say(f"{instance} did not end in time; killed", style="red")
                kept.actor.stop.remote()
                await wait_any((kept.done,), KILL_TIMEOUT_S)
        if kept.task is not None:
            kept.task.cancel()
            await asyncio.gather(kept.task, return_exceptions=True)
        self._release(kept)
        if not self._stopping.is_set():
            self._kept.remove(kept)
            self._console.remove(instance)
        self._on_change()

    # -- one process ----------------------------------------------------------------------------------------------

    def _ask_for(self, kept: Kept) -> None:
        """A group with one bundle is one node's, whole: STRICT_PACK says so also of bundles to come. Processes that are
        spread share a group, each with a bundle of its own."""
        util = self._ray.util
        together = [each for each in self._kept if each.placement.spread and each.plan.folder == kept.plan.folder]
        if kept not in together:
            together = [kept]
        if kept is together[0]:
            bundles = [dict(each.placement.bundle) for each in together]
            kept.group = util.placement_group(bundles, strategy="SPREAD" if len(together) > 1 else "STRICT_PACK")
        kept.group = together[0].group
        bundle, index = kept.placement.bundle, together.index(kept)
        where = util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            kept.group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
        )
        actor = self._ray.remote(Agent).options(
            num_cpus=bundle.get("CPU", 0.0),
            num_gpus=bundle.get("GPU", 0.0),
            max_restarts=-1,
            max_concurrency=AGENT_THREADS,
            scheduling_strategy=where,
        )
        kept.actor = actor.remote(self._order_of(kept.placement))
        self._console.update(kept.instance, State.WAITING)

    async def _keep(self, kept: Kept) -> None:
        """Until its process has ended for good."""
        errors = self._ray.exceptions
        try:
            while not self._given_up(kept):
                try:
                    await self._welcome(kept, await self._placed(kept))
                    await self._follow(kept)
                    return
                except errors.RayTaskError as error:
                    self._give_up(kept, str(error.cause or error))
                    return
                except _NoPlaceError as error:
                    self._give_up(kept, str(error))
                    return
                except errors.RayActorError as error:
                    kept.ready.clear()
                    self._lost(kept, error)
                    await asyncio.sleep(RETRY_S)
        finally:
            kept.ready.clear()
            kept.done.set()
            if kept.failure and kept.placement.newcomer:
                self._release(kept)

    def _given_up(self, kept: Kept) -> bool:
        """While it or the pipeline stops a lost process has ended; Ray would only start it to be ended."""
        return bool(kept.failure) or ((self._stopping.is_set() or kept.leaving) and kept.place is None)

    async def _placed(self, kept: Kept) -> Place:
        """Where its agent is, once Ray has found a place and started it. Raises `_NoPlaceError` where a worker comes to
        others and no node has room for it: it is not waited for."""
        asked = asyncio.ensure_future(kept.actor.place.remote())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            patience_s = PATIENCE_S if kept.joined else max(0.0, kept.homeless_s + NO_PLACE_S - time.monotonic())
            done, _ = await asyncio.wait((asked, stopping), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                if note := self._lacking(kept):
                    if not kept.joined:
                        raise _NoPlaceError(note)
                    self._console.update(kept.instance, State.WAITING, note=f"({note})")
                done, _ = await asyncio.wait((asked, stopping), return_when=asyncio.FIRST_COMPLETED)
            if asked not in done:
                raise self._ray.exceptions.RayActorError()
            place: Place = await asked
            return place
        finally:
            stopping.cancel()
            asked.cancel()

    def _lacking(self, kept: Kept) -> str:
        """What it waits for, where Ray has no place for it."""
        if self._ray.util.placement_group_table(kept.group)["state"] not in ("PENDING", "RESCHEDULING"):
            return ""
        return f"for {said(kept.placement.bundle)}: no node has it to spare"

    async def _welcome(self, kept: Kept, place: Place) -> None:
        """It starts once it can be told the addresses of those it dials; a moved one is made known to all."""
        kept.place, kept.deaths = place, 0
        self._console.update(kept.instance, State.STARTING, pid=0, node=place.ip)
        name = dialled_as(kept.plan)
        book = self._briefing.book
        if name and book.named().get(name) != place.endpoint:
            book = book.entered(name, place.endpoint)
            self._brief(book, self._briefing.config, but=kept)
            if book.named().keys() >= {dialled_as(each.plan) for each in self._kept} - {""}:
                self._located.set()
        await wait_all_or(self._stopping, [self._located], LOCATE_TIMEOUT_S)
        if self._located.is_set():
            await kept.actor.start.remote(self._briefing)
        self._on_change()

    def _brief(self, book: AddressBook, config: str, *, but: Kept | None = None) -> None:
        """Not waited for: one that is lost meanwhile is told when it is back."""
        self._briefing = Briefing(self._briefing.edition + 1, book, config)
        for other in self._kept:
            if other is not but and other.place is not None and self._located.is_set():
                other.actor.start.remote(self._briefing)

    async def _follow(self, kept: Kept) -> None:
        """News until its process has ended for good and all of its log is here."""
        version, offset, lines = -1, 0, 0
        log = self._files.log_file(kept.instance)
        while True:
            answer: tuple[int, News] = await kept.actor.news.remote(version, offset, lines)
            before, (version, news) = version, answer
            offset, lines = news.log_end, lines + len(news.said)
            if news.log:
                with open_private(log, "ab") as file:
                    file.write(f"[{news.skipped} bytes left out]\n".encode() if news.skipped else b"")
                    file.write(news.log)
            for line in news.said:
                self._console.say(line, style="red")
            if version != before:
                self._take(kept, news)
            if news.ended and not news.log:
                if news.failure and not self._failure and not kept.leaving:
                    self._give_up(kept, news.failure.removeprefix(f"{kept.instance}: "))
                return

    def _take(self, kept: Kept, news: News) -> None:
        state = State(news.state)
        if state is State.READY:
            kept.ready.set()
        else:
            kept.ready.clear()
        kept.ready_url = news.ready_url
        if state not in (State.WAITING, State.FAILED):  # said already; said with the end of its log
            port = urlsplit(news.ready_url).port
            self._console.update(kept.instance, state, pid=news.pid, note=news.note, port=port)
        self._on_change()

    def _lost(self, kept: Kept, error: Exception) -> None:
        where = f" on {kept.place.ip}" if kept.place is not None else ""
        kept.deaths += kept.place is None
        kept.homeless_s = time.monotonic() if kept.place is not None else kept.homeless_s
        kept.place = None
        if self._stopping.is_set() or kept.leaving:
            self._console.update(kept.instance, State.STOPPED, note="lost")
            return
        if kept.deaths >= DEATHS_AT_START and isinstance(error, self._ray.exceptions.ActorDiedError):
            self._give_up(kept, f"its agent cannot be started: {str(error).strip().rpartition(chr(10))[2]}")
            return
        # Of an agent that Ray has no place for every question fails within seconds, as of one that was just lost.
        late = time.monotonic() - kept.homeless_s > (PATIENCE_S if kept.joined else NO_PLACE_S)
        lacking = self._lacking(kept) if late else ""
        if late and not kept.joined:
            self._give_up(kept, lacking or "its agent was lost and did not come back")
            return
        note = lacking or f"its agent{where} is lost; Ray starts it anew"
        self._console.update(kept.instance, State.WAITING if lacking else State.RESTARTING, note=f"({note})")
        self._on_change()

    def _give_up(self, kept: Kept, reason: str) -> None:
        self._console.update(kept.instance, State.FAILED, note=reason)
        where = f" on {kept.place.ip}" if kept.place is not None else ""
        kept.failure = f"{kept.instance}{where}: {reason}"
        if kept.placement.newcomer or kept.leaving:
            self._on_change()
            return
        if not self._failure and not self._stopping.is_set():
            self._failure = kept.failure
            show_failure(self._console, self._files, kept.instance, self._failure)
        self._stopping.set()

    # -- all of them ----------------------------------------------------------------------------------------------

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        while not self._stopping.is_set() and (late := [each for each in self._kept if not each.ready.is_set()]):
            await wait_any((late[0].ready, late[0].done, self._stopping), LOCATE_TIMEOUT_S)
        if not self._stopping.is_set():
            on_ready()

    async def _watch_logs(self) -> None:
        """From the logs that came here."""
        await echo_logs(self._files, self._console, lambda: [kept.instance for kept in self._kept], self._stopping)

    async def _stop_all(self) -> None:
        self._console.settle()
        if not self._failure:
            self._console.say("draining: running requests finish; Ctrl-C again ends at once")
        for stage in StopStage:
            group = [kept for kept in self._kept if kept.plan.stage is stage and not kept.done.is_set()]
            if not group:
                continue
            self._tell_to_stop([kept for kept in group if not kept.leaving])
            if not self._kill_now.is_set():
                drain_s = max(kept.plan.stop_timeout_s for kept in group)
                await wait_all_or(
                    self._kill_now, [kept.done for kept in group], FAILED_STOP_TIMEOUT_S if self._failure else drain_s
                )
            late = [kept for kept in group if not kept.done.is_set()]
            for kept in late:
                if not self._kill_now.is_set():
                    self._console.say(f"{kept.instance} did not end in time; killed", style="red")
            self._tell_to_stop(late)
            await wait_all_or(None, [kept.done for kept in late], KILL_TIMEOUT_S)

    def _tell_to_stop(self, group: Sequence[Kept]) -> None:
        for kept in group:
            if kept.place is not None:
                kept.actor.stop.remote()

    def _release(self, kept: Kept) -> None:
        """Whatever happened: no actor, no group, no process of it stays. A group that several share ends with the first
        of them, which is when all do."""
        actor, group = kept.actor, kept.group
        kept.actor = kept.group = kept.place = None
        if actor is not None:
            with suppress(Exception):
                self._ray.kill(actor, no_restart=True)
        if group is not None:
            with suppress(Exception):
                self._ray.util.remove_placement_group(group)


class _NoPlaceError(Exception):
    """No node has room for a worker now."""
