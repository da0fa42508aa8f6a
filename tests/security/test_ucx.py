"""UCX listens where KV moves, on the interfaces that are meant, and never beside a key that asks for encryption.

Repeats three observations. A pipeline on one machine opened a TCP port per worker on the outside interface, without any
authentication; so did workers that never move KV; and with CURVE keys configured KV, that is prompts, still went over
UCX in clear.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

from cohort.common.config import CONFIGS_DIR, Config, EndpointsConfig, PolicyConfig, load_config
from cohort.common.engine.ranks import rank_transfers
from cohort.common.engine.worker import worker_process
from cohort.common.errors import ConfigError
from cohort.common.http import exposure
from cohort.common.policies import compose
from cohort.common.policies.interface import Placement
from cohort.common.transport.open_links import open_links
from cohort.common.transport.security import generate_keys
from tests.containers import ROOT

_OPEN_AND_LISTEN = """
import asyncio, json, os, sys
from cohort.common.transport.open_links import open_links
from tests.containers import listening

async def main():
    links = open_links(("ucx",), zmq_bind="", one_machine=sys.argv[1] == "one machine")
    place = bytearray(100_000)
    sending = links[0].send(links[0].address(), 1, bytes(range(100)) * 1000, timeout_s=10)
    await asyncio.gather(sending, links[0].receive(1, place, timeout_s=10))
    print(json.dumps(sorted(listening(os.getpid()))))
    await links[0].close()

asyncio.run(main())
"""


def listens_on(where: str, **environment: str) -> set[str]:
    """Addresses of a process that has opened UCX and moved something."""
    pytest.importorskip("ucxx")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", _OPEN_AND_LISTEN, where],
        env={**plain, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    [found] = [line for line in done.stdout.splitlines() if line.startswith("[")]  # beside log lines
    return set(json.loads(found))


def test_on_one_machine_it_listens_on_loopback_alone():
    assert listens_on("one machine") <= {"127.0.0.1"}


def test_an_operators_choice_of_interfaces_stands():
    assert listens_on("one machine", UCX_NET_DEVICES="all") == listens_on("several machines")


@pytest.mark.parametrize("where", ["one machine", "several machines"])
def test_held_to_memory_it_listens_nowhere(where: str):
    """As docker-compose.yml does for `workers`."""
    assert listens_on(where, UCX_TLS="sm,self") == set()


def test_which_pipelines_are_on_one_machine():
    def at(**endpoints: str) -> bool:
        return exposure.is_one_machine(Config(endpoints=EndpointsConfig(**endpoints)))

    assert at()
    assert at(manager="tcp://127.0.0.1:1", worker="tcp://localhost:0")
    assert at(manager="ipc:///run/m.sock", bind_host="0.0.0.0")  # nothing binds it
    assert not at(manager="tcp://127.0.0.1:1", bind_host="0.0.0.0")
    assert not at(manager="tcp://manager:1")
    assert not exposure.is_one_machine(load_config([CONFIGS_DIR / "compose.yaml"]))


# -- with keys ---------------------------------------------------------------------------------------------------------


async def test_beside_a_key_nothing_moves_in_clear(tmp_path: Path):
    pytest.importorskip("ucxx")
    keys = generate_keys(tmp_path / "cluster.key")
    bind = f"ipc://{tmp_path}/kv.sock"
    with structlog.testing.capture_logs() as events:
        links = open_links(("ucx", "zmq"), zmq_bind=bind, curve=keys)
    assert [link.name for link in links] == ["zmq"]
    assert [event["option"] for event in events] == ["transfer.plain_links_allowed"]
    for link in links:
        await link.close()
    with pytest.raises(ConfigError, match=r"transfer\.links: ucx .*transfer\.plain_links_allowed=true"):
        open_links(("ucx",), zmq_bind=bind, curve=keys)
    links = open_links(("ucx", "zmq"), zmq_bind=bind, curve=keys, plain_allowed=True, one_machine=True)
    assert [link.name for link in links] == ["ucx", "zmq"]
    for link in links:
        await link.close()


# -- where no KV moves -------------------------------------------------------------------------------------------------


class Context:
    """What opening links asks of a worker's context."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config, self.run_dir, self.instance = config, run_dir, "prefill-0"
        self.log = structlog.get_logger()


def opened(monkeypatch: pytest.MonkeyPatch, config: Config, run_dir: Path) -> list[dict[str, Any]]:
    """How a worker of this configuration opens its links, and how often."""
    calls: list[dict[str, Any]] = []

    def note(names: Any, **options: Any) -> list[Any]:
        calls.append({"names": names, **options})
        return []

    monkeypatch.setattr(rank_transfers, "open_links", note)
    assert asyncio.run(worker_process.open_worker_links(Context(config, run_dir), compose)) == {}  # type: ignore[arg-type]
    return calls


def test_a_worker_whose_placement_moves_nothing_opens_no_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("colocated", "colocated_in_turn"):
        assert opened(monkeypatch, Config(policies=PolicyConfig(placement=name)), tmp_path) == []
    [call] = opened(monkeypatch, Config(), tmp_path)
    assert call["names"] == ("ucx", "zmq")
    assert (call["one_machine"], call["plain_allowed"], call["curve"]) == (True, False, None)


def test_a_worker_of_several_machines_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    generate_keys(tmp_path / "cluster.key")
    overrides = {
        "endpoints": {"manager": "tcp://m:1", "worker": "tcp://w:0", "bind_host": "0.0.0.0"},
        "security": {"curve_secret_key_file": str(tmp_path / "cluster.key")},
        "transfer": {"plain_links_allowed": True},
    }
    [call] = opened(monkeypatch, load_config(overrides=overrides), tmp_path)
    assert (call["one_machine"], call["plain_allowed"]) == (False, True)
    assert call["curve"] is not None


@pytest.mark.parametrize("preset", sorted(path.stem for path in (CONFIGS_DIR / "presets").glob("*.yaml")))
def test_only_placements_of_one_segment_say_that_they_move_nothing(preset: str):
    config = load_config(preset=preset)
    whole = ("colocated", "colocated_in_turn", "longest_match", "block_cost", "weighted_scores")
    assert compose.moves_kv(config) == (config.policies.placement not in whole)
    assert Placement.moves_kv  # of a placement that says nothing
