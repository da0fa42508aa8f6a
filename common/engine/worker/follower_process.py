"""A further rank of a tensor-parallel worker: loads its share, runs every step that rank 0 sends.

    python -m cohort.common.engine.worker.follower_process PARENT_PID CONTROL_FD ORDERS_FD STORE_FD
    python -m cohort.common.engine.worker.follower_process PARENT_PID PLACE     (on another host; `rank_hosts.Place`)

Started by `followers`, and on another host by `services/rank_host`, which is such a rank itself (`follow_remote`).
It has no inbox, no metrics and no clients: rank 0 is the worker. It ends when rank 0 does, however that ends, and takes
no signal that is meant for the worker.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import NoReturn, assert_never

import msgspec
import structlog
import torch

from cohort.common.engine.cache.kv_copies import KvCopier
from cohort.common.engine.ranks import rank_transfers
from cohort.common.engine.ranks.rank_hosts import Place, StoreOfRankZero, joined
from cohort.common.engine.ranks.rank_messages import (
    Compile,
    Compiled,
    Connect,
    Copied,
    Copies,
    Failed,
    Loaded,
    RankLost,
    Record,
    Recorded,
    Setup,
    Step,
    Stop,
    batch_of,
    encoded,
    receive_command,
    send,
)
from cohort.common.engine.ranks.ranks import RankSettings
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.errors import ConfigError, ModelError
from cohort.common.process import garbage
from cohort.common.process.logs import configure_logging
from cohort.common.transport.rank_wire import WireLost

_PR_SET_PDEATHSIG = 1
_FLUSH_S = 0.2
_SWITCH_INTERVAL_S = 2e-4  # as in a worker: the thread that moves blocks gives the interpreter up so soon


def main(arguments: list[str]) -> NoReturn:
    exit_with_parent(int(arguments[0]))
    if len(arguments) == 2:
        follow_remote(msgspec.json.decode(arguments[1], type=Place))
    _take_no_signals()
    control, orders, store = (socket.socket(fileno=int(each)) for each in arguments[1:])
    try:
        follow(control, orders, store)
    except RankLost:
        os._exit(0)  # rank 0 has ended
    except Exception:
        structlog.get_logger(__name__).critical("this rank cannot go on", exc_info=True)
    os._exit(1)


def follow_remote(place: Place) -> NoReturn:
    """Run a rank whose rank 0 is on another host, from its first message on. Exit codes: 0 the worker has ended in
    order, 1 its rank 0 is lost, or never came, 2 it refuses this rank."""
    configure_logging(place.logging, service="rank", instance=f"rank-{place.join.rank}")
    try:
        wire = joined(place, partial(_exit_with, 1))  # at once: the main thread may wait for what rank 0 never sends
    except ConfigError as error:
        _exit_with(2, str(error))
    except WireLost as error:
        _exit_with(1, str(error))
    _take_no_signals()  # until here they end this process as any other
    try:
        follow(*wire.streams, place)
    except RankLost as error:
        _exit_with(1, str(error))
    except Exception:
        structlog.get_logger(__name__).critical("this rank cannot go on", exc_info=True)
        time.sleep(_FLUSH_S)  # a thread sends what is left for rank 0
    os._exit(1)


def _exit_with(code: int, reason: str) -> NoReturn:
    structlog.get_logger(__name__).critical("this rank ends", reason=reason)
    sys.stderr.flush()
    os._exit(code)


def _take_no_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def exit_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends; at once, if it has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def follow(control: socket.socket, orders: socket.socket, store: socket.socket, place: Place | None = None) -> None:
    """Run a rank from its setup to its end. `place`: of one on another host, with its own device and folder."""
    setup = receive_command(control)
    if not isinstance(setup, Setup):
        raise RankLost("rank 0 says something else first")
    if place is not None:
        options = msgspec.structs.replace(setup.options, device=place.device, threads=place.threads)
        setup = msgspec.structs.replace(setup, model_dir=place.model_dir, options=options, interface=place.interface)
    configure_logging(setup.logging, service="rank", instance=f"{setup.instance}.{setup.rank}")
    try:
        runner = _runner(setup, control, store)
    except (ConfigError, ModelError) as error:
        send(control, encoded(Failed(str(error), isinstance(error, ConfigError))))
        raise
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    threading.Thread(target=_move_kv, args=(runner, orders), name="kv-transfers", daemon=True).start()
    copier = KvCopier(runner.kv)
    garbage.freeze_heap()
    while True:
        match command := receive_command(control):
            case Step(taken=taken, awaited=awaited):
                runner.follow(batch_of(command), taken, awaited)
            case Compile():
                runner.compile_steps()
                send(control, encoded(Compiled()))
            case Record(classes=classes):
                send(control, encoded(Recorded(runner.record_steps(classes))))
            case Copies(copies=copies):
                runner.stream.mark().wait()
                with torch.inference_mode(), copier.around(copies):
                    pass
                if runner.device.type == "cuda":
                    torch.cuda.synchronize(runner.device)
                send(control, encoded(Copied()))
            case Stop():
                os._exit(0)
            case Setup() | Connect():
                raise RankLost("rank 0 starts over")
            case _:
                assert_never(command)


def _runner(setup: Setup, control: socket.socket, store: socket.socket) -> ModelRunner:
    def meet() -> None:
        send(control, encoded(Loaded()))
        if not isinstance(receive_command(control), Connect):
            raise RankLost("rank 0 does not connect")

    place = setup.store or StoreOfRankZero(store)
    group = RankSettings(setup.rank, setup.degree, place, meet, interface=setup.interface)
    return ModelRunner(Path(setup.model_dir), setup.options, group)


def _move_kv(runner: ModelRunner, orders: socket.socket) -> None:
    try:
        if runner.ranks is None:
            raise RankLost("this process is no rank of a group")
        asyncio.run(rank_transfers.serve(runner.kv, runner.ranks.share.kv_heads, orders))
    except RankLost:
        os._exit(0)
    except BaseException:
        structlog.get_logger(__name__).critical("this rank cannot move its KV", exc_info=True)
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
