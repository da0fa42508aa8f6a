"""A worker whose ranks are processes of several hosts, here of one: started apart, they find each other over TCP."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml

from cohort.common.http.ports import free_port
from cohort.common.transport.security import generate_keys
from tests.e2e.equality.golden import Golden, golden_outputs
from tests.e2e.equality.test_golden import SHORT_SIGHTED, ask, compare
from tests.e2e.forked import ForkedProcess, fork
from tests.e2e.pipeline import Pipeline
from tests.e2e.tiny_models import llama, save_of_bytes
from tests.examples import nightly
from tests.hosts import ADDRESSES, needs_namespaces, two_hosts

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

DECODE = {"role": "decode", "tensor_parallel": 2, "hosts": 2}
GONE_S = 2.0
"""The longest that one end of a group may outlive another."""
VANISHED_S = 8.0
"""The same where nothing closes a connection: heartbeats of a second, silence of five."""


class Hosts:
    """A pipeline, and the host of its worker's second rank."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        keys = folder / "cluster.key"
        generate_keys(keys)
        overrides = {
            "workers": [{"role": "prefill"}, DECODE],
            "engine": {"threads": 1, "rank_join_s": 30},
            "kv": {"memory_bytes": 16 << 20},
            "endpoints": {"ranks": f"tcp://127.0.0.1:{free_port()}", "worker": "tcp://127.0.0.1:0"},
            "security": {"curve_secret_key_file": str(keys)},
            **SHORT_SIGHTED,
        }
        self.pipeline = Pipeline(folder, model, overrides, preset="disaggregated")

    def host(self, name: str = "host-1", **changed: Any) -> ForkedProcess:
        """`rank_host` with the pipeline's configuration; `changed`: options of sections, `workers` as a whole."""
        config = yaml.safe_load((self.folder / "config.yaml").read_text())
        for section, values in changed.items():
            config[section] = values if section == "workers" else {**config[section], **values}
        own = self.folder / f"{name}.yaml"
        own.write_text(yaml.safe_dump(config))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"{name}.log").open("wb") as log:
            return fork("cohort.services.rank_host", ["--config", str(own), "--host", "1"], environment, log)

    def start_worker(self) -> None:
        """Returns when it serves. What the manager counts may still be its predecessor."""
        before = self.log("decode-0").count("worker ready")
        self.pipeline.start("decode-0")
        deadline_s = time.monotonic() + 60
        while self.log("decode-0").count("worker ready") == before:
            assert time.monotonic() < deadline_s, self.log("decode-0")[-3000:]
            time.sleep(0.05)
        self.pipeline.wait_ready()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    return save_of_bytes(llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def goldens(model: Path) -> list[Golden]:
    random = Random(4)
    prompts = [[random.randrange(3, 400) for _ in range(length)] for length in (1, 15, 16, 40, 130)]
    return golden_outputs(model, prompts, 16)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Hosts]:
    yield Hosts(tmp_path_factory.mktemp("hosts"), model)


def test_ranks_of_two_processes_answer_as_one_device_and_end_together(
    hosts: Hosts, model: Path, goldens: list[Golden]
) -> None:
    """Those that are no rank of this worker come first, and are told why they are none."""
    stranger, another = hosts.folder / "stranger.key", hosts.folder / "another"
    generate_keys(stranger)
    shutil.copytree(model, another)
    (another / "more.bin").write_bytes(b"weights")
    wrong = {("wrong-key", "another key"): {"security": {"curve_secret_key_file": str(stranger)}}}
    if nightly():
        wrong["wrong-model", "another model"] = {"model": {"path": str(another)}}
    turned_away = [(each, hosts.host(each[0], **changed)) for each, changed in wrong.items()]
    first = hosts.host()
    with hosts.pipeline as pipeline:
        for (name, reason), process in turned_away:
            assert process.wait(10) == 2, hosts.log(name)
            assert reason in hosts.log(name)
        compare(goldens, pipeline.complete_all([ask(golden) for golden in goldens]))
        pipeline.wait_for("decode-0", "transfers_total", len(goldens))
        assert pipeline.heard("decode-0")["transfer_failures_total"] == 0

        worker = pipeline.processes["decode-0"]
        first.kill()
        assert worker.wait(GONE_S) == 1
        assert "rank 1: its connection has ended" in hosts.log("decode-0")
        if not nightly():
            return
        second = hosts.host("host-1-again")
        hosts.start_worker()
        moved = pipeline.heard("decode-0").get("transfers_total", 0.0)
        compare(goldens, pipeline.complete_all([ask(golden) for golden in goldens]))
        pipeline.wait_for("decode-0", "transfers_total", moved + len(goldens))

        pipeline.kill("decode-0")
        assert second.wait(GONE_S) == 1
        assert "the connection to rank 0 has ended" in hosts.log("host-1-again")
        third = hosts.host("host-1-at-last")
        hosts.start_worker()
        assert pipeline.terminate("decode-0") == 0
        assert third.wait(GONE_S) == 0


@needs_namespaces
@pytest.mark.skipif(not nightly(), reason="scripts/test --nightly")
def test_two_ranks_on_each_of_two_hosts_of_which_one_vanishes(
    tmp_path: Path, model: Path, goldens: list[Golden]
) -> None:
    keys, port = tmp_path / "cluster.key", free_port()
    generate_keys(keys)
    overrides = {
        "workers": [{"role": "unified", "tensor_parallel": 4, "hosts": 2}],
        "engine": {"threads": 2, "rank_join_s": 30},
        "kv": {"memory_bytes": 16 << 20},
        "endpoints": {"ranks": f"tcp://{ADDRESSES[0]}:{port}", "bind_host": ADDRESSES[0]},
        "security": {"curve_secret_key_file": str(keys), "allow_plain_ranks": True},
    }
    with two_hosts() as network:
        made = Pipeline(tmp_path, model, overrides, preset="unified", before={"unified-0": network.before(0)})
        command = [sys.executable, "-m", "cohort.services.rank_host", "--config", str(tmp_path / "config.yaml")]
        with (tmp_path / "host-1.log").open("wb") as log:
            other = subprocess.Popen([*network.before(1), *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            with made as pipeline:
                compare(goldens, pipeline.complete_all([ask(golden) for golden in goldens]))
                assert other.poll() is None
                network.unplug()
                assert pipeline.processes["unified-0"].wait(VANISHED_S) == 1
                assert other.wait(VANISHED_S) == 1, (tmp_path / "host-1.log").read_text()
        finally:
            other.kill()
            other.wait()
