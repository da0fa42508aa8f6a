"""Live: processes with run folders of their own, as on hosts of their own, that are told one address: the seed's."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from cohort.common.http.ports import free_port
from cohort.common.transport.security import generate_keys
from tests.e2e.pipeline import Pipeline
from tests.engine_models import VOCAB, save_random_model
from tests.examples import nightly
from tests.services.gateway.tiny_model import byte_level, write_model

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

ASKED = {"prompt": [7, 8, 9] * 8, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class Hosts(Pipeline):
    """Each process is on one of its own, as far as it can tell."""

    def run_dir(self, name: str) -> Path:
        return self.folder / f"run-{name}"


def tiny_model(folder: Path) -> Path:
    tokenizer = byte_level()
    shape = transformers.LlamaConfig(
        vocab_size=max(VOCAB, tokenizer.get_vocab_size()),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = save_random_model(shape, folder / "model")
    outside = write_model(folder / "outside", tokenizer)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).write_bytes((outside / file).read_bytes())
    return model


def options(folder: Path) -> dict[str, Any]:
    generate_keys(folder / "key")
    return {
        "endpoints": {"seeds": [f"tcp://localhost:{free_port()}"]},
        "security": {"curve_secret_key_file": str(folder / "key")},
        "engine": {"device": "cpu", "threads": 1},
        "kv": {"memory_bytes": 1 << 24, "host_memory_bytes": 0},
        "transfer": {"links": ["zmq"]},
    }


def manager_addresses(hosts: Hosts, name: str) -> list[str]:
    """Where this process was told that the manager is, one after the other."""
    found = re.findall(r"\bmanager\W+(tcp://[\w.\[\]:]+)", hosts.log(name, lines=10_000))
    return list(dict.fromkeys(found))


def test_processes_find_one_another_by_one_address_and_who_moves_is_found_again(tmp_path: Path) -> None:
    """Without workers, which would cost seconds; no model is read."""
    hosts = Hosts(tmp_path, tmp_path / "none", options(tmp_path), preset="disaggregated")
    started = ("predictor", "manager", "monitor")  # who needs the others first

    def until(done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60.0
        while not done():
            logs = {name: hosts.log(name) for name in started}
            assert all(process.poll() is None for process in hosts.processes.values()), logs
            assert time.monotonic() < deadline_s, logs
            time.sleep(0.1)

    def up() -> dict[str, int]:
        with contextlib.suppress(OSError):
            return {name: each["pid"] for name, each in hosts.state().items() if each["status"] == "up"}
        return {}

    try:
        for name in started:
            hosts.start(name)
        until(lambda: {"predictor", "manager"} <= up().keys())
        assert not list(tmp_path.rglob("*.sock")), "nothing by a Unix socket"
        hosts.kill("manager")
        hosts.start("manager")  # on whatever port it finds
        until(lambda: up().get("manager") == hosts.processes["manager"].pid)
        until(lambda: all(len(manager_addresses(hosts, name)) == 2 for name in ("monitor", "predictor")))
    finally:
        hosts.close()


@pytest.mark.skipif(not nightly(), reason="one without workers runs by default: scripts/test --nightly")
def test_a_pipeline_serves_by_one_address_and_after_a_move_again(tmp_path: Path) -> None:
    with Hosts(tmp_path, tiny_model(tmp_path), options(tmp_path), preset="disaggregated") as hosts:
        [first] = hosts.complete_all([ASKED])
        assert (first.error, len(first.tokens)) == ("", 24)
        hosts.wait_for("decode-0", "kv_transfers_in_total", 1)  # between workers, which no option named
        hosts.kill("manager")
        hosts.start("manager")
        hosts.wait_ready()
        [second] = hosts.complete_all([ASKED])
        assert (second.error, second.tokens) == ("", first.tokens)
        assert len(manager_addresses(hosts, "gateway")) == 2
