"""The compose file's commands make a pipeline that serves its clients, and nobody else.

Repeats two attacks over TCP. Dialling the manager's inbox under a worker's name, to be handed the prompts of others;
dialling the gateway's inbox under that name, to put tokens into a client's stream. With the key that `model` made, the
stranger is not even heard. And a client without the API key that COHORT_API_KEY names is refused.

The root file system of a container is read-only: so the processes may not write anywhere but into their run folder,
their own volume and /tmp, and least of all into the cache, which all of them load from.
"""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cohort.common.messages import (
    GatewayHello,
    Message,
    RegisterWorker,
    StartSegment,
    TokenBatch,
    TokenUpdate,
    WorkerReport,
)
from cohort.common.transport.security import generate_keys, load_keys
from cohort.common.transport.zmq_bus import ZmqBus
from cohort.common.types import Attempt, Role, WorkerCapacity, WorkerStats
from tests.containers import Containers, listening
from tests.e2e.equality.golden import golden_outputs

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

KEY = "sk-of-the-test"
PROMPT = [1000, 2000, 3000, 4000, 5000]
WORKERS = ("prefill_worker_cpu", "decode_worker_cpu")
PROCESSES = ("gateway", "length_predictor", "bucketing_manager", "global_monitor", *WORKERS)
CAPACITY = WorkerCapacity(Role.UNIFIED, "m", 8192, 30, 3, 64, 4, 16, 100_000, 0, 256, 8192)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Containers]:
    containers = Containers(tmp_path_factory.mktemp("containers"), small_model)
    try:
        assert containers.start("model").wait(timeout=300) == 0, containers.log("model")
        containers.processes.clear()
        for service in PROCESSES:
            containers.start(service, COHORT_API_KEY=KEY)
        containers.until_ready(timeout_s=180)
        yield containers
    finally:
        containers.stop()


def complete(containers: Containers, key: str) -> tuple[int, list[int]]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, answer = containers.fetch("/v1/completions", body, key=key)
    return status, answer["cohort"]["requests"][0]["token_ids"] if status == 200 else []


def test_the_answer_is_right_and_only_for_holders_of_the_key(served: Containers, small_model: Path):
    [golden] = golden_outputs(small_model, [PROMPT], 8)
    assert complete(served, KEY) == (200, list(golden.output))
    assert complete(served, "") == (401, [])
    assert complete(served, "sk-guessed") == (401, [])


@pytest.mark.parametrize("has_own_key", [False, True])
def test_a_stranger_is_handed_no_prompt_and_puts_no_token_into_a_stream(
    served: Containers, tmp_path: Path, has_own_key: bool
):
    keys = generate_keys(tmp_path / "strangers.key") if has_own_key else None
    heard: list[Message] = []

    async def intrude() -> tuple[int, list[int]]:
        bus = ZmqBus("prefill-127.0.0.1", "tcp://127.0.0.1:0", keys)
        bus.connect("manager", served.endpoints["manager"])
        bus.connect("gateway", served.endpoints["gateway"])

        async def listen() -> None:
            while True:
                heard.append((await bus.receive())[1])

        listening = asyncio.create_task(listen())
        invented = TokenBatch("prefill-127.0.0.1", [TokenUpdate(Attempt("any", 0), len(PROMPT), [7, 7, 7])])
        for said in (
            GatewayHello("prefill-127.0.0.1", 1, bus.endpoint),
            RegisterWorker("prefill-127.0.0.1", 1, bus.endpoint, CAPACITY, []),
            WorkerReport("prefill-127.0.0.1", 1, 1, WorkerStats(), []),
        ):
            bus.send("manager", said)
        bus.send("gateway", invented)
        answer = await asyncio.to_thread(complete, served, KEY)
        await asyncio.sleep(1.0)
        listening.cancel()
        await bus.close()
        return answer

    status, tokens = asyncio.run(intrude())
    assert heard == []  # no greeting, no registration, above all no StartSegment
    assert not any(isinstance(message, StartSegment) for message in heard)
    assert status == 200 and tokens[:3] != [7, 7, 7]
    assert "restarted" not in served.log("bucketing_manager")  # the true worker has kept its place


def test_the_cluster_has_a_key_that_only_its_owner_may_read(served: Containers):
    path = served.cache / "keys" / "cluster.key"
    assert load_keys(path) is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_kv_took_the_link_that_encrypts(served: Containers):
    assert complete(served, KEY)[0] == 200
    events = [json.loads(line) for line in served.log("prefill_worker_cpu").splitlines() if line.startswith("{")]
    assert any(event["event"].startswith("KV link left out") and event["link"] == "ucx" for event in events)


def test_nothing_listens_beyond_loopback(served: Containers):
    for name, process in served.processes.items():
        assert listening(process.pid) == {"127.0.0.1"}, name


def test_a_launcher_has_the_workers_alone(served: Containers):
    """The container with all workers of a host, in place of the two: all that they log goes to the launcher's output,
    and the container is healthy when all are ready. `tests/services/launcher/test_serve.py` kills a worker."""
    before = complete(served, KEY)
    for name in WORKERS:
        served.processes[name].terminate()
        assert served.processes.pop(name).wait(timeout=45) == 0
    served.start("workers", COHORT_API_KEY=KEY)
    run = served.folder / "workers" / "run"
    status = [sys.executable, "-P", "-m", "cohort.services.launcher", "--status", "--run-dir", str(run)]
    deadline_s = time.monotonic() + 180
    while "ready: " not in served.log("workers"):
        assert time.monotonic() < deadline_s and served.processes["workers"].poll() is None, served.log("workers")
        time.sleep(0.05)
    assert subprocess.run(status, capture_output=True, check=False).returncode == 0
    assert complete(served, KEY) == before
    assert len(json.loads((run / "launcher.json").read_bytes())["processes"]) == 1
    logged = [json.loads(line) for line in served.log("workers").splitlines() if line.startswith("{")]
    assert len([each for each in logged if each["event"] == "step times"]) == 1  # as the worker begins
    assert not list((run / "logs").iterdir())


def test_nothing_is_written_where_a_container_could_not(served: Containers):
    """Last in this file: what the tests above made the processes do counts."""
    before = files(served.cache)
    assert complete(served, KEY)[0] == 200
    codes = served.stop()
    assert set(codes.values()) == {0}, codes
    assert files(served.cache) == before
    assert {path.name for path in served.cache.iterdir()} == {"keys", "kernels", "models"}
    made = {path.name for service in WORKERS for path in (served.folder / service / "state").rglob("*")}
    assert made <= {"learned"}
