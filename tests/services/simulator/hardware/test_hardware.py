"""Every data file loads, and what is wrong in one is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.config import CONFIGS_DIR
from cohort.common.errors import ConfigError
from cohort.common.policies.cost_model import CostModel, StepWork
from cohort.services.simulator.hardware.hardware import (
    Cluster,
    core_slowdowns,
    load_cluster,
    load_device,
    load_link,
    load_model,
)
from cohort.services.simulator.hardware.simulated_network import Ports
from tests.services.simulator.lab import cluster as small_cluster
from tests.services.simulator.lab import config, run, workload

CROSSING = workload(*((0.0005 * i, 900, 4) for i in range(12)))

MODELS = {
    "opt-2.7b": 2.65,
    "opt-6.7b": 6.66,
    "opt-13b": 12.85,
    "opt-30b": 29.97,
    "opt-66b": 65.7,
    "opt-175b": 174.6,
    "llama-7b": 6.74,
    "llama-13b": 13.0,
    "llama-33b": 32.5,
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.0,
    "llama-2-70b": 69.0,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.3-70b": 70.6,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.7,
    "bloom-176b": 176.2,
    "smollm2-135m": 0.1345,
    "mixtral-8x7b": 46.7,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671.0,
}

ACTIVE = {
    "mixtral-8x7b": 12.9,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.0,
    "gpt-oss-20b": 3.6,
    "gpt-oss-120b": 5.1,
    "deepseek-v2-lite": 2.4,
    "deepseek-v3": 37.0,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_mixtures_compute_with_as_many_as_published(name: str):
    """Who publishes counts no table of the vocabulary, or one, or both."""
    shape = load_model(name)
    layers = shape.active_parameters / 1e9
    assert layers * 0.98 < ACTIVE[name] < (layers + 2 * shape.head_parameters / 1e9) * 1.02


def test_a_model_like_another_differs_in_what_it_names():
    model, other = load_model("llama-3.1-8b"), load_model("llama-3-8b")
    assert model.max_positions == 131072 > other.max_positions
    assert replace(other, name=model.name, max_positions=131072) == model


@pytest.mark.parametrize("path", sorted(CONFIGS_DIR.glob("models/*.yaml")), ids=lambda path: path.stem)
def test_models_have_their_published_size(path: Path):
    assert load_model(path.stem).parameters / 1e9 == pytest.approx(MODELS[path.stem], rel=0.02)


@pytest.mark.parametrize("path", sorted(CONFIGS_DIR.glob("devices/*.yaml")), ids=lambda path: path.stem)
def test_devices_load_and_their_links_exist(path: Path):
    device, file = load_device(path.stem)
    assert device.name == path.stem
    assert load_link(file.within).bytes_per_s > 0
    assert load_cluster(path.stem).instances == 1


@pytest.mark.parametrize("path", sorted((CONFIGS_DIR / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_clusters_load(path: Path):
    assert load_cluster(path.stem).instances > 0


def test_a_cluster_by_device_and_count():
    cluster = load_cluster("h100-80:6", {"tensor_parallel": 2, "decode_attention": None})
    assert (cluster.instances, cluster.tensor_parallel, cluster.stack.name) == (6, 2, "cohort")
    assert cluster.link(0, 5) == load_link("nvlink4")


def test_instances_on_different_hosts_use_the_network(tmp_path: Path):
    file = tmp_path / "two-hosts.yaml"
    file.write_text("{device: a100-80, instances: 4, per_host: 2, across: tcp}")
    cluster = load_cluster(str(file))
    assert cluster.link(0, 1) == load_link("nvlink3")
    assert cluster.link(1, 2) == load_link("tcp")


def test_unlike_instances_are_numbered_through_and_never_on_one_machine():
    cluster = load_cluster("h100-80:1+a100-80:2")
    assert (cluster.instances, cluster.hardware) == (3, f"1 x 1 {load_device('h100-80')[0].shown} + 2 x 1 a100-80")
    assert [cluster.of(number).device.name for number in range(3)] == ["h100-80", "a100-80", "a100-80"]
    assert cluster.link(1, 2) == load_link("nvlink3")
    assert cluster.link(0, 1) == cluster.link(2, 0) == load_link("rdma")
    twice = load_cluster("a100-80:2+a100-80:2")
    assert twice.link(0, 1) == twice.link(2, 3) == load_link("nvlink3")
    assert twice.link(1, 2) == load_link("rdma")


def test_unlike_instances_in_a_file(tmp_path: Path):
    file = tmp_path / "unlike.yaml"
    file.write_text("{parts: ['h100-80:1', 'a100-80:2'], across: tcp}")
    cluster = load_cluster(str(file))
    assert cluster.hardware == load_cluster("h100-80:1+a100-80:2").hardware
    assert cluster.link(0, 1) == load_link("tcp") and cluster.link(1, 2) == load_link("nvlink3")
    assert load_cluster(str(file), {"tensor_parallel": 2}).tensor_parallel == 2
    file.write_text("{parts: ['h100-80:1']}")
    with pytest.raises(ConfigError, match="parts"):
        load_cluster(str(file))


def test_devices_that_workers_share():
    cluster = load_cluster("a100-80:4", {"workers_per_device": 2})
    assert cluster.shares and not load_cluster("a100-80:4").shares
    running = [(number, 0.1, 0.0) for number in (0, 1, 2)]
    assert cluster.shared_slowdowns(running) == [2.0, 2.0, 1.0]
    with pytest.raises(ConfigError, match="workers_per_device: 3 instances"):
        load_cluster("a100-80:3", {"workers_per_device": 2})
    with pytest.raises(ConfigError, match="workers_per_device: cores"):
        load_cluster("cpu-core:2", {"workers_per_device": 2, "cores": 2})


def test_unlike_instances_that_cannot_work_together_are_refused(tmp_path: Path):
    file = tmp_path / "wide.yaml"
    file.write_text("{device: a100-80, instances: 2, tensor_parallel: 2}")
    assert load_cluster(f"{file}+{file}").instances == 4
    with pytest.raises(ConfigError, match="as many shards"):
        load_cluster(f"{file}+a100-80:2")
    with pytest.raises(ConfigError, match="share cores"):
        load_cluster("cpu-2x1+cpu-core:2")
    with pytest.raises(ConfigError, match="nothing"):
        load_cluster("a100-80:1+nothing:2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: a100-80", "instances"),
        ("{device: a100-80, instances: 0}", r"instances"),
        ("{device: a100-80, instances: 2, colour: red}", "colour"),
        ("{device: nothing, instances: 2}", "no device named 'nothing'"),
        ("{device: a100-80, instances: 2, stack: fast}", "stack: a100-80 has no stack 'fast'"),
        ("{device: a100-80, instances: 2, across: string}", "no link named 'string'"),
        ("{device: a100-80, instances: 3, per_host: 2}", "per_host"),
        ("[1, 2]", "expected a mapping"),
        ("{", "not valid YAML"),
    ],
)
def test_wrong_clusters_are_named(tmp_path: Path, text: str, message: str):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_cluster(str(file))


@pytest.mark.parametrize("text", ["a100-80:0", "a100-80:many", "nowhere", "nothing:2"])
def test_wrong_names_are_named(text: str):
    with pytest.raises(ConfigError):
        load_cluster(text)


def test_the_price_of_mixing_is_the_stacks_or_the_clusters() -> None:
    assert load_cluster("a100-80:2").stack.mixed_share == 0.0
    cluster = load_cluster("a100-80:2", {"mixed_share": 0.15})
    assert cluster.stack.mixed_share == 0.15
    assert replace(cluster.stack, mixed_share=0.0) == load_cluster("a100-80:2").stack
    with pytest.raises(ConfigError, match="mixed_share"):
        load_cluster("a100-80:2", {"mixed_share": -0.1})


@pytest.mark.parametrize("text", ["a100-80:2", "cpu-2x1", "h100-80:1+a100-80:1"])
def test_at_another_pace_every_part_of_an_iteration_takes_so_much_longer(text: str) -> None:
    usual, slow = load_cluster(text), load_cluster(text, {"pace": 1.25})
    model = load_model("smollm2-135m")
    for number in range(2):
        for work in (
            StepWork(700, 1, 1, pairs=245_000),
            StepWork(2, 2, 2, decode_rows=2, decode_context=930, longest_context=900),
            StepWork(65, 2, 1, pairs=2_000, decode_rows=1, decode_context=500, longest_context=500),
        ):
            times = [
                CostModel(model, part.device, part.stack, tensor_parallel=2).step_s(work)
                for part in (usual.of(number), slow.of(number))
            ]
            assert times[1] == pytest.approx(1.25 * times[0])
    assert slow.service_load(3, 1.25) == pytest.approx(usual.service_load(3, 1.0))
    assert slow.link(0, 1) == usual.link(0, 1)
    with pytest.raises(ConfigError, match="pace"):
        load_cluster("a100-80:2", {"pace": 0})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tokens: [1, 32", "tokens: [32, 1", "ascend"),
        ("      - [0.291, ", "      - [", "a share for each"),
        ("  prompts: ", "  # prompts: ", "prompts: missing, and no scaled_from"),
        ("  prompts: ", "scaled_from: cpu-core\n  # prompts: ", "cpu-core has no operators either"),
        ("within: nvlink3", "within: tcp", "no all-reduce was measured over tcp"),
    ],
)
def test_wrong_operators_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (CONFIGS_DIR / "devices" / "a100-80.yaml").read_text()
    file = tmp_path / "device.yaml"
    if new.startswith("scaled_from"):
        text, new = "scaled_from: cpu-core\n" + text, "  # prompts: "
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_device(str(file))


def test_a_device_has_operators_or_what_stands_in_for_them(tmp_path: Path) -> None:
    file = tmp_path / "device.yaml"
    file.write_text((CONFIGS_DIR / "devices" / "cpu-core.yaml").read_text().replace("compute_efficiency", "# "))
    with pytest.raises(ConfigError, match="wants operators, scaled_from or compute_efficiency"):
        load_device(str(file))


def test_what_was_measured_elsewhere_says_so_and_follows_the_peaks() -> None:
    a100, h100, h200 = (load_device(name)[0] for name in ("a100-80", "h100-80", "h200"))
    assert [each.shown for each in (a100, h100, h200)] == [
        "a100-80",
        "h100-80 (prompts and decodes scaled from a100-80)",
        "h200 (scaled from h100-80)",
    ]
    model = load_model("llama-3-8b")
    decode = StepWork(1, 1, 1, decode_rows=1, decode_context=50_000, longest_context=50_000)
    seconds = [CostModel(model, each, load_cluster("h100-80").stack).step_s(decode) for each in (h100, h200)]
    floors = h100.operators.decodes.floor_s + h100.operators.between.floor_s
    bound = [each - model.layers * floors for each in seconds]
    assert bound[0] / bound[1] == pytest.approx(h200.memory_bytes_per_s / h100.memory_bytes_per_s, rel=0.02)
    for name in ("a100-40", "l40s", "l4", "a10g", "rtx-4090"):
        assert load_cluster(name).hardware == f"1 x 1 {name} (scaled from a100-80)"


def test_newer_devices_are_faster() -> None:
    model = load_model("llama-2-70b")
    for work in (
        StepWork(2048, 1, 1, 2048 * 2049 // 2, 2048),
        StepWork(64, 64, 64, decode_rows=64, decode_context=64 * 1024, longest_context=1024),
    ):
        old, new = (
            CostModel(model, load_device(name)[0], load_cluster(name).stack, tensor_parallel=4).step_s(work)
            for name in ("a100-80", "h100-80")
        )
        assert old > 1.4 * new


def test_a_port_carries_one_piece_at_a_time():
    link = load_link("tcp")
    ports = Ports(3)
    size = int(link.bytes_per_s)
    assert ports.transfer(0.0, 0, 1, link, size) == pytest.approx(1.0 + link.latency_s)
    assert ports.transfer(0.0, 0, 2, link, size) == pytest.approx(2.0 + link.latency_s)  # 0 is still sending
    assert ports.transfer(0.0, 2, 1, link, size) == pytest.approx(2.0 + link.latency_s)  # 1 was receiving
    assert ports.transfer(0.0, 1, 0, link, size) == pytest.approx(1.0 + link.latency_s)  # the other way is free
    assert ports.moved_bytes == 4 * size


def test_every_run_of_blocks_takes_its_ends_some_time():
    ports = Ports(2)
    link = msgspec.structs.replace(load_link("tcp"), run_s=0.5)
    assert ports.transfer(0.0, 0, 1, link, int(link.bytes_per_s), runs=3) == pytest.approx(2.5 + link.latency_s)


def test_instances_of_a_machine_share_its_network_cards(tmp_path: Path):
    file = tmp_path / "two-hosts.yaml"
    file.write_text("{device: a100-80, instances: 4, per_host: 2, across: tcp, nics_per_host: 1}")
    cluster = load_cluster(str(file))
    assert [cluster.host(number) for number in range(4)] == [(0, 0), (0, 0), (0, 1), (0, 1)]
    link = load_link("tcp")
    size = int(link.bytes_per_s)
    first, second = (0, 0), (0, 1)
    ports = Ports(4, {first: 1, second: 2})
    assert ports.transfer(0.0, 0, 2, link, size, hosts=(first, second)) == pytest.approx(1.0 + link.latency_s)
    # Another instance of the first machine waits for the card there; the other way and within a machine it is free.
    assert ports.transfer(0.0, 1, 3, link, size, hosts=(first, second)) == pytest.approx(2.0 + link.latency_s)
    assert ports.transfer(0.0, 2, 0, link, size, hosts=(second, first)) == pytest.approx(1.0 + link.latency_s)
    assert ports.transfer(0.0, 0, 1, link, size) == pytest.approx(2.0 + link.latency_s)  # 0 was sending
    # The second machine has two cards: two pieces leave at once.
    apart = Ports(4, {second: 2})
    for source, target in ((2, 0), (3, 1)):
        assert apart.transfer(0.0, source, target, link, size, hosts=(second, first)) == pytest.approx(
            1.0 + link.latency_s
        )


def test_shared_network_cards_delay_kv_transfers():
    apart, shared = (
        run(config("disaggregated"), small_cluster(4, per_host=2, across="tcp", nics_per_host=nics), CROSSING)
        for nics in (0, 1)
    )
    waited = [sum(worker.machine.counters.exposed_transfer_s for worker in sim.workers) for sim in (apart, shared)]
    assert 0 < waited[0] < waited[1]


def cores(count: int) -> Cluster:
    return load_cluster("cpu-core:2", {"cores": count})


def test_time_of_the_services_comes_from_the_longer_iterations():
    # 2 cores, 2.2 wanted; the rates 1 - 0.9 x and 1 - 0.1 x have to leave room for 0.2 of the second one's services.
    long, short = cores(2).slowdowns([(0.09, 0.0, 0.5), (0.01, 0.2, 0.5)])
    missing = 0.2 / (0.9 + 0.1 * 1.2)
    assert (1 / long, 1 / short) == pytest.approx((1 - 0.9 * missing, 1 - 0.1 * missing))
    assert 1 / long + 1.2 / short == pytest.approx(2.0)


def test_equal_engines_slow_each_other_equally_and_a_free_core_serves_the_services():
    assert cores(2).slowdowns([]) == []
    assert cores(2).slowdowns([(0.1, 0.2, 0.7)]) == [1.0]
    assert cores(2).slowdowns([(0.1, 0.2, 0.7), (0.1, 0.2, 0.7)]) == pytest.approx([1.2, 1.2])
    assert cores(1).slowdowns([(0.1, 0.0, 0.7), (0.2, 0.0, 0.7)]) == pytest.approx([2.0, 2.0])


def test_engines_that_read_one_memory_wait_for_each_other():
    reading = load_cluster("cpu-core:2", {"cores": 2, "memory_contention": 0.5})
    assert reading.slowdowns([(0.1, 0.0, 1.0)]) == [1.0]
    assert reading.slowdowns([(0.1, 0.0, 1.0), (0.1, 0.0, 0.4)]) == pytest.approx([1.2, 1.2])
    assert reading.slowdowns([(0.1, 0.0, 1.0), (0.9, 0.0, 0.0)]) == [1.0, 1.0], "one computes"
    three = reading.slowdowns([(0.1, 0.0, 1.0)] * 3)
    assert three == pytest.approx([1.5 * (1.0 + 0.5 * 2 * 2 / 3)] * 3), "each of the others runs for two thirds of it"
    threads = load_cluster("cpu-core:2", {"cores": 2, "memory_contention": 0.5, "core_contention": 0.3})
    assert threads.slowdowns([(0.1, 0.0, 1.0), (0.9, 0.0, 0.0)]) == pytest.approx([1.3, 1.3])
    assert threads.slowdowns([(0.1, 0.0, 1.0), (0.1, 0.0, 1.0)]) == pytest.approx([1.8, 1.8])
    assert threads.slowdowns([(0.1, 0.0, 1.0)]) == [1.0]
    one_cache = load_cluster("cpu-core:2", {"cores": 2, "cache_contention": 0.4})
    assert one_cache.slowdowns([(0.1, 0.0, 0.5), (0.9, 0.0, 0.0)]) == pytest.approx([1.2, 1.0])
    assert one_cache.slowdowns([(0.1, 0.0, 0.5)]) == [1.0]


@given(st.lists(st.tuples(st.floats(1e-3, 1.0), st.floats(0.0, 3.0)), min_size=1, max_size=6), st.integers(1, 4))
def test_no_engine_starves_and_no_core_is_wanted_twice_without_need(engines: list[tuple[float, float]], count: int):
    slowdowns = core_slowdowns(count, engines)
    equal = count / sum(1.0 + load for _, load in engines)
    assert all(1.0 <= each <= 2.0 / min(equal, 1.0) + 1e-9 for each in slowdowns)
    if all(each < 2.0 / equal - 1e-9 for each in slowdowns):  # no process was held at the least share
        used = sum((1.0 + load) / each for each, (_, load) in zip(slowdowns, engines, strict=True))
        assert used <= count + 1e-9
