"""Who may become a rank of a worker on several hosts, and over which network it then exchanges."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cohort.common.config import Config, EndpointsConfig, EngineConfig, LoggingConfig, WorkerGroup
from cohort.common.engine.ranks.rank_hosts import (
    Join,
    Place,
    RemoteRanks,
    group_on_hosts,
    join_of,
    joined,
    own_interface,
)
from cohort.common.errors import ConfigError
from cohort.common.types import Role

GROUP = WorkerGroup(Role.DECODE, tensor_parallel=4, hosts=2)
CONFIG = Config(
    workers=(WorkerGroup(Role.PREFILL), GROUP),
    endpoints=EndpointsConfig(ranks="tcp://127.0.0.1:0", worker="tcp://127.0.0.1:0"),
    engine=EngineConfig(rank_join_s=5.0),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def ask(leader: RemoteRanks, join: Join) -> None:
    place = Place(leader.endpoint, "", "", "cpu", 1, "lo", 5.0, LoggingConfig(), join)
    joined(place, lambda reason: None)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"version": "0.0.1"}, "another version: 0.0.1 .* run the same image on every host"),
        ({"code": "other"}, r"another version: .*\(other\)"),
        ({"model": "other"}, r"model\.path: another model \(other\)"),
        ({"degree": 8}, "tensor_parallel 8 on 2 hosts, and rank 0 has 4 on 2"),
        ({"hosts": 4}, "tensor_parallel 4 on 4 hosts, and rank 0 has 4 on 2"),
        ({"rank": 1}, "rank 1 of 4 is not one of another host: those begin at 2"),
        ({"rank": 4}, "rank 4 of 4 is not one of another host"),
    ],
)
def test_one_that_differs_is_told_in_what(model: Path, changed: dict[str, object], says: str) -> None:
    leader = RemoteRanks(CONFIG, GROUP, model)
    try:
        join = join_of(CONFIG, GROUP, model, 2)
        with pytest.raises(ConfigError, match=says):
            ask(leader, msgspec.structs.replace(join, **changed))
        ask(leader, join)
        with pytest.raises(ConfigError, match="rank 2 is there already"):
            ask(leader, join)
    finally:
        leader.close()


def test_the_network_is_that_of_the_workers_own_address() -> None:
    assert own_interface(CONFIG) == "lo"
    assert own_interface(msgspec.structs.replace(CONFIG, engine=EngineConfig(rank_interface="ib0"))) == "ib0"
    elsewhere = EndpointsConfig(worker="tcp://192.0.2.7:0")
    with pytest.raises(ConfigError, match=r"engine\.rank_interface: no interface of this host has .* 192\.0\.2\.7"):
        own_interface(msgspec.structs.replace(CONFIG, endpoints=elsewhere))


def test_one_group_has_other_hosts() -> None:
    assert group_on_hosts(CONFIG) is GROUP
    with pytest.raises(ConfigError, match="0 groups have hosts above 1"):
        group_on_hosts(Config())
