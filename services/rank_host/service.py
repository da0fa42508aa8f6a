"""The ranks that a worker has on a host which is not its own (`workers: hosts`).

    claim a device for each ─▶ start all but the first as processes ─▶ dial rank 0 ─▶ follow it until it ends

It has no inbox, no metrics and no clients, and nothing is kept: when rank 0 ends, or any rank of the group, this ends,
and whoever supervises it starts it again for the next rank 0. Decides which ranks are this host's; nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import msgspec

from cohort.common.config import Config, WorkerGroup, load_config
from cohort.common.devices.cores import usable_cores
from cohort.common.devices.inventory import this_machine
from cohort.common.engine.ranks.followers import start_rank
from cohort.common.engine.ranks.rank_hosts import Place, group_on_hosts, join_of, own_interface
from cohort.common.engine.worker.devices import WorkerDevice, claim_device, model_folder
from cohort.common.engine.worker.follower_process import follow_remote
from cohort.common.errors import ConfigError, ModelError, NoDeviceLeft
from cohort.common.http import exposure
from cohort.common.keys.private_files import keep_private
from cohort.common.process.logs import configure_logging
from cohort.common.process.service import EXIT_NO_DEVICE


def main() -> NoReturn:
    keep_private()
    options = _parser().parse_args()
    try:
        config = load_config(options.config, preset=options.preset, machine=this_machine)
        if options.leader:
            endpoints = msgspec.structs.replace(config.endpoints, ranks=options.leader)
            config = msgspec.structs.replace(config, endpoints=endpoints)
        group = group_on_hosts(config)
        config = msgspec.structs.replace(config, workers=(group,))
        exposure.check_endpoints(config)
        if not 1 <= options.host < group.hosts:
            raise ConfigError(
                f"--host {options.host}: write 1 to {group.hosts - 1}; 0 is the worker's own (workers: hosts)"
            )
        configure_logging(config.logging, service="rank_host", instance=f"host-{options.host}")
        own = asyncio.run(_device(config, group, options.host))
        places = places_of(config, group, options.host, own)
    except (ConfigError, ModelError) as error:
        sys.exit(_failed(2, error))
    except NoDeviceLeft as error:
        sys.exit(_failed(EXIT_NO_DEVICE, error))
    first, *others = places
    for place in others:
        start_rank([str(os.getpid()), msgspec.json.encode(place).decode()], place.threads)
    follow_remote(first)


def places_of(config: Config, group: WorkerGroup, host: int, own: WorkerDevice) -> list[Place]:
    """Return the places of this host's ranks, in order. Raises `ConfigError`."""
    leader, model = config.endpoints.ranks, model_folder(config)
    interface = own_interface(config)
    threads = max(1, config.worker_threads("", usable_cores()) // group.local_degree)
    first = host * group.local_degree
    return [
        Place(
            leader,
            config.security.curve_secret_key_file,
            str(model),
            str(device),
            threads,
            interface,
            config.engine.rank_join_s,
            config.logging,
            join_of(config, group, model, first + index),
        )
        for index, device in enumerate([own.device, *(device for device, _ in own.others)])
    ]


async def _device(config: Config, group: WorkerGroup, host: int) -> WorkerDevice:
    with ThreadPoolExecutor(1) as executor:
        own = await claim_device(config, f"{group.role.value}-ranks-{host}", group.role, executor, asyncio.Event())
    assert own is not None  # nobody asks it to stop
    return own


def _failed(code: int, error: Exception) -> int:
    print(f"cohort rank_host: {error}", file=sys.stderr, flush=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cohort.services.rank_host",
        description="Run the ranks that a worker on several hosts (workers: hosts) has on this one. Give it "
        "the worker's own configuration.",
        epilog="Exit codes: 0 the worker has ended in order, 1 its rank 0 is lost or never came, 2 a wrong option or "
        "configuration, or rank 0 refuses these ranks, 75 no share of a GPU is left.",
    )
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help="as of the worker")
    parser.add_argument("--preset", default="", metavar="NAME", help="as of the worker")
    parser.add_argument("--leader", default="", metavar="tcp://HOST:PORT", help="default: endpoints.ranks")
    parser.add_argument("--host", type=int, default=1, metavar="N", help="number of this host; the worker's is 0")
    return parser
