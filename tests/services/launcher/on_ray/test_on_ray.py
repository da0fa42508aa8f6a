"""What a pipeline asks a Ray cluster for, and what its processes are told there. None of this needs Ray itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cohort.common.addresses import advertised_host
from cohort.common.config import (
    Config,
    EngineConfig,
    GatewayConfig,
    ManagerConfig,
    PolicyConfig,
    WorkerGroup,
    load_config,
)
from cohort.common.errors import ConfigError
from cohort.common.planning.settings import planner_settings
from cohort.common.transport.security import generate_keys, load_keys
from cohort.common.types import Role
from cohort.services.cli.__main__ import main
from cohort.services.gateway.batches.batch_files import folder_of
from cohort.services.launcher.on_ray import serving
from cohort.services.launcher.on_ray.order import dialled_as, on_node, passed_environment
from cohort.services.launcher.on_ray.placement import (
    SERVICE_CPUS,
    Node,
    Placement,
    added_worker,
    check_possible,
    gateway_nodes,
    place,
    with_threads,
)
from cohort.services.launcher.plan import ProcessPlan, plan

HOME = Node("a", "10.0.0.1", 4.0, is_launcher_node=True)
SECOND, THIRD = Node("b", "10.0.0.2", 4.0), Node("c", "10.0.0.3", 4.0)
NODES = [HOME, SECOND, THIRD]


def of(config: Config, nodes: list[Node], gateways: str = "1") -> dict[str, Placement]:
    return {each.plan.instance: each for each in place(config, plan(config), nodes, gateway_nodes(gateways, nodes))}


def workers(count: int, threads: int = 2) -> Config:
    return Config(workers=(WorkerGroup(Role.UNIFIED, count, threads),))


def test_workers_ask_for_their_threads_and_what_there_is_one_of_stays_at_home() -> None:
    placed = of(workers(3), NODES)
    assert [(name, dict(each.bundle)) for name, each in placed.items()] == [
        ("gateway", {"CPU": 0.4, "node:10.0.0.1": 0.001}),
        ("predictor", {"CPU": 0.1, "node:10.0.0.1": 0.001}),
        ("manager", {"CPU": 0.2, "node:10.0.0.1": 0.001}),
        ("monitor", {"CPU": 0.1, "node:10.0.0.1": 0.001}),
        ("unified-0", {"CPU": 2.0}),
        ("unified-1", {"CPU": 2.0}),
        ("unified-2", {"CPU": 2.0}),
    ]


def test_a_worker_asks_for_the_gpu_it_computes_on_or_its_share_of_one() -> None:
    nodes = [Node("a", "10.0.0.1", 16.0, 2.0, is_launcher_node=True), Node("b", "10.0.0.2", 16.0, 2.0)]
    alone = Config(workers=(WorkerGroup(Role.UNIFIED, 4, 4),), engine=EngineConfig(device="cuda", workers_per_gpu=1))
    assert of(alone, nodes)["unified-3"].bundle == {"CPU": 4.0, "GPU": 1.0}
    shared = Config(workers=(WorkerGroup(Role.UNIFIED, 8, 1),), engine=EngineConfig(device="cuda", workers_per_gpu=2))
    assert of(shared, nodes)["unified-7"].bundle == {"CPU": 1.0, "GPU": 0.5}
    five = Config(workers=(WorkerGroup(Role.UNIFIED, 5, 1),), engine=EngineConfig(device="cuda", workers_per_gpu=1))
    with pytest.raises(ConfigError, match=r"too small: unified-4 wants 1 CPU, 1 GPU.*10\.0\.0\.1: 16 CPUs, 2 GPUs"):
        of(five, nodes)


def test_the_ranks_of_a_worker_are_in_one_bundle_whatever_the_others_have() -> None:
    nodes = [Node("a", "10.0.0.1", 16.0, 4.0, is_launcher_node=True)]
    groups = (WorkerGroup(Role.UNIFIED, 1, 0, 2), WorkerGroup(Role.UNIFIED, 1, 2))
    config = with_threads(Config(workers=groups, engine=EngineConfig(device="cuda", workers_per_gpu=1)), nodes, 1)
    placed = of(config, nodes)
    assert [placed[name].bundle["GPU"] for name in ("unified-0", "unified-1")] == [2.0, 1.0]
    plans = {each.instance: each for each in plan(config)}
    comes = added_worker(config, plans["unified-0"])
    assert comes.added and comes.bundle == placed["unified-0"].bundle


def test_a_worker_that_no_node_could_have_is_refused_before_it_is_asked_for() -> None:
    nodes = [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 8.0}]
    check_possible({"CPU": 2.0, "GPU": 1.0}, nodes)
    for bundle, why in (({"CPU": 9.0}, "9 CPUs"), ({"CPU": 2.0, "GPU": 2.0}, "2 CPUs, 2 GPUs")):
        with pytest.raises(ConfigError, match=f"no node of the Ray cluster has {why}"):
            check_possible(bundle, nodes)


def test_the_planner_takes_the_cores_of_all_nodes_for_those_that_workers_share() -> None:
    """Not those of the monitor's node."""
    assert planner_settings(serving.with_cores(workers(3), NODES), cores=2).cores == 12
    assert planner_settings(workers(3), cores=2).cores == 2
    given = load_config(overrides={"planner": {"cores": 6}})
    assert planner_settings(serving.with_cores(given, NODES), cores=2).cores == 6
    assert planner_settings(serving.with_cores(given, NODES), cores=0).cores == 0, "each has a device of its own"


def test_a_gateway_is_bound_to_each_node_that_is_to_have_one() -> None:
    placed = of(workers(1), NODES, "all")
    bound = {name: [*each.bundle][-1] for name, each in placed.items() if name.startswith("gateway")}
    assert bound == {"gateway": "node:10.0.0.1", "gateway-1": "node:10.0.0.2", "gateway-2": "node:10.0.0.3"}
    assert set(of(workers(1), NODES, "2")) & {"gateway-1", "gateway-2"} == {"gateway-1"}


@pytest.mark.parametrize(("asked", "why"), [("0", "a number"), ("some", "a number"), ("4", r"3 node\(s\)")])
def test_gateways_that_cannot_be_are_refused(asked: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"--gateways {asked}: .*{why}"):
        gateway_nodes(asked, NODES)


def test_a_head_without_cpus_has_the_gateway_and_the_page_and_others_the_rest() -> None:
    nodes = [Node("a", "10.0.0.1", 0.0, is_launcher_node=True), SECOND]
    placed = of(workers(1), nodes)
    assert placed["gateway"].bundle == placed["monitor"].bundle == {"node:10.0.0.1": 0.001}
    assert placed["manager"].bundle == {"CPU": SERVICE_CPUS["bucketing_manager"]}
    assert placed["predictor"].bundle == {"CPU": SERVICE_CPUS["length_predictor"]}


def test_a_manager_that_stands_by_goes_to_another_node_and_every_process_is_told_where() -> None:
    config = msgspec.structs.replace(workers(1), manager=ManagerConfig(standbys=2))
    placed = of(config, NODES)
    assert [name for name, each in placed.items() if each.spread] == ["manager", "manager-1", "manager-2"]
    assert "node:10.0.0.1" in placed["manager"].bundle
    assert placed["manager-1"].bundle == placed["manager-2"].bundle == {"CPU": SERVICE_CPUS["bucketing_manager"]}
    assert not any(each.spread for each in of(workers(1), NODES).values())
    second = placed["manager-2"].plan
    assert dialled_as(second) == "manager-2"
    own = on_node(config, second, "10.0.0.3", 21_000, "").endpoints
    assert (own.manager, own.standby_managers) == ("", ("", "tcp://10.0.0.3:21000"))


def test_threads_are_the_most_with_which_all_workers_fit() -> None:
    open_threads = Config(workers=(WorkerGroup(Role.UNIFIED, 3, 0),))
    assert with_threads(open_threads, NODES, 1).workers[0].threads == 3, "the services take a part of the first node"
    assert with_threads(open_threads, [HOME], 1).workers[0].threads == 1
    capped = Config(workers=open_threads.workers, engine=EngineConfig(threads=2))
    assert with_threads(capped, NODES, 1).workers[0].threads == 2
    given = workers(3, threads=4)
    with pytest.raises(ConfigError, match=r"too small: unified-\d wants 4 CPUs"):
        with_threads(given, NODES, 1)


def test_a_process_listens_on_its_nodes_address_and_is_known_by_it() -> None:
    config = Config(gateway=GatewayConfig(host="0.0.0.0"))
    plans = {each.instance: each for each in plan(config)}
    manager = on_node(config, plans["manager"], "10.0.0.2", 21_000, "/run/cluster.key")
    assert manager.endpoints.manager == "tcp://10.0.0.2:21000"
    assert manager.endpoints.worker == "tcp://10.0.0.2:0" and manager.endpoints.bind_host == "10.0.0.2"
    assert (manager.metrics.host, advertised_host(manager, "0.0.0.0")) == ("10.0.0.2", "10.0.0.2")
    assert manager.security.curve_secret_key_file == "/run/cluster.key"
    worker = on_node(config, plans["decode-0"], "10.0.0.3", 21_001, "")
    assert worker.endpoints.manager == "" and dialled_as(plans["decode-0"]) == ""
    gateway = on_node(config, plans["gateway"], "10.0.0.2", 0, "")
    assert advertised_host(gateway, gateway.gateway.host) == "10.0.0.2"
    at_home = on_node(Config(), plans["gateway"], "10.0.0.2", 0, "")
    told = advertised_host(at_home, at_home.gateway.host)
    assert told == "127.0.0.1", "what listens on loopback is not found under the node's address"


def test_a_second_gateway_has_files_of_its_own_where_nodes_share_a_disk() -> None:
    second = of(workers(1), NODES, "2")["gateway-1"].plan
    assert folder_of(on_node(Config(), second, "10.0.0.2", 0, ""), second.instance).name == "8000-gateway-1"
    assert folder_of(Config(), "gateway").name == "8000"


def test_only_the_keys_that_the_gateway_names_travel() -> None:
    shell = {"ONE": "secret", "TWO": "other", "HOME": "/root"}
    assert passed_environment(["env:ONE", "literal", "env:MISSING"], shell) == {"ONE": "secret"}


def test_the_clusters_key_is_the_named_one_or_a_new_one(tmp_path: Path) -> None:
    named = tmp_path / "named.key"
    generate_keys(named)
    config = load_config(overrides={"security": {"curve_secret_key_file": str(named)}})
    assert serving.cluster_key(config) == named.read_text()
    fresh = tmp_path / "fresh.key"
    fresh.write_text(serving.cluster_key(Config()))
    keys = load_keys(fresh)
    assert keys is not None and keys != load_keys(named)
    assert serving.cluster_key(Config()) != fresh.read_text(), "one for each run"
    assert serving.cluster_key(load_config(overrides={"security": {"allow_plain": True}})) == ""


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"gateway": {"processes": 2}}, "gateway.processes: .*--gateways N"),
        ({"endpoints": {"manager": "tcp://a:1"}}, "endpoints.manager: on Ray"),
    ],
)
def test_options_of_one_machine_are_refused(overrides: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        serving.check(load_config(overrides=overrides))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--gateways", "2"], "--gateways: for a pipeline on several machines"),
        (["--on", "slurm"], "--on slurm: write --on ray"),
        (["--on", "ray=ray://head:10001"], "on a node of the cluster"),
    ],
)
def test_wrong_options_say_what_would_be_right(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *words]) == 2
    assert why in capsys.readouterr().err


def test_a_missing_ray_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for words in (["--on", "ray"], ["--on", "ray", "--detach"]):
        assert main(["serve", "--port", "0", *words]) == 2
        assert "pip install 'cohort-serve[ray]'" in capsys.readouterr().err


def test_ray_is_not_loaded_unless_it_is_asked_for() -> None:
    """A finder that refuses to load it stands before all others."""
    script = (
        "import sys\n"
        "class Refuses:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.partition('.')[0] != 'ray', name\n"
        "sys.meta_path.insert(0, Refuses())\n"
        "from cohort.services.cli.__main__ import main\n"
        "import cohort.services.launcher.on_ray.serving, cohort.services.launcher.on_ray.agent\n"
        "assert main(['serve', '--print-config', '--port', '0', '--model', '.']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_policies_that_let_one_worker_compute_get_no_more_threads_than_a_node_has() -> None:
    gathering = Config(workers=(WorkerGroup(Role.UNIFIED, 2, 0),), policies=PolicyConfig(placement="least_ttft"))
    assert with_threads(gathering, NODES, 1).workers[0].threads == 4


def test_a_plan_has_what_an_agent_needs() -> None:
    assert all(isinstance(each.plan, ProcessPlan) and each.bundle for each in of(workers(2), NODES).values())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take niceness back")
def test_what_an_agent_starts_does_not_inherit_the_niceness_that_ray_gives_it() -> None:
    """Of the thread that starts processes, as in an agent: niceness is a thread's own."""
    script = (
        "import os, subprocess, threading\n"
        "from cohort.services.launcher.on_ray.agent import serve_first\n"
        "os.nice(15)\n"
        "def run():\n"
        "    serve_first()\n"
        "    subprocess.run(['nice'])\n"
        "threading.Thread(target=run).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"
