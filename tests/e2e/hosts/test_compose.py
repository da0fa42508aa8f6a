"""docker-compose.yml for real: an image is built, the stack serves, is killed, scaled, restarted with its volumes.

Runs nightly where there is a Docker engine. The model comes by its id from a hub on this machine, which the service
`model` alone reaches. GPUs are not there: `fake_gpus` has the workers claim some, and a processor computes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest
import yaml

from tests.common.devices.fakes import gpus
from tests.common.hub.fake_hub import FakeHub, Repository, cached
from tests.e2e.hosts.compose_stack import IMAGE, ROOT, START_TIMEOUT_S, Stack, build_image, missing
from tests.e2e.tiny_models import save_stand_in
from tests.examples import nightly

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(not nightly(), reason="minutes: scripts/test --nightly"),
    pytest.mark.skipif(nightly() and bool(missing()), reason=missing() if nightly() else ""),
]

MODEL = "org/stand-in"
LARGEST_IMAGE_BYTES = 1.37e9
"""Of the image without GPUs, less what its base has: a slim one has 130 MB, and both together are to have 1.5 GB."""
PIPELINE = ("length_predictor", "bucketing_manager", "global_monitor", "prefill_worker_cpu", "decode_worker_cpu")
GPUS = """\
services:
  workers:
    deploy: !reset null
    environment: {PYTHONPATH: /fake, COHORT_FAKE_GPUS: "%d"}
    volumes:
      - %s:/fake:ro
      - %s:/usr/local/bin/nvidia-smi:ro
volumes:
  claims: {name: %s}
"""


@pytest.fixture(scope="module")
def image() -> None:
    build_image()


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> dict[str, bytes]:
    save_stand_in(default_model, folder := tmp_path_factory.mktemp("model") / "stand-in")
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, image: None, model_files: dict[str, bytes]) -> Iterator[Stack]:
    """Without GPUs, with a model that the service `model` fetches."""
    subnet = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}")
    this_machine = next(ip_network(subnet).hosts())  # the bridge's first address
    with FakeHub(str(this_machine)) as hub:
        hub.repositories[MODEL] = Repository(model_files)
        stack = Stack(tmp_path_factory.mktemp("cpu"), COHORT_MODEL=MODEL, COHORT_DOWNLOAD="1", HF_ENDPOINT=hub.url)
        with stack.running():
            assert hub.gets()["model.safetensors"] == 1
            yield stack


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout.strip()


def launched(stack: Stack, service: str) -> dict[str, int]:
    """Process ids of what a container's launcher has started, by instance."""
    state = json.loads(stack.compose("exec", "-T", service, "cat", "/run/cohort/launcher.json").stdout)
    return {instance: mark["pid"] for instance, mark in state["processes"].items()}


def readable_by_others(folder: Path) -> Path:
    """Mounted into a container it is entered under a uid of its own."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def test_the_image_is_small(image: None) -> None:
    base = ROOT.joinpath("docker", "Dockerfile").read_text().partition("ARG PYTHON_IMAGE=")[2].split()[0]
    size, of_base = (int(docker("image", "inspect", name, "--format", "{{.Size}}")) for name in (IMAGE, base))
    assert size - of_base < LARGEST_IMAGE_BYTES


def test_it_answers_and_streams(stack: Stack) -> None:
    answer = stack.ask("/v1/completions", {"prompt": "The sea is", "max_tokens": 8, "ignore_eos": True})
    assert answer["model"] == MODEL and answer["usage"]["completion_tokens"] == 8
    assert asyncio.run(stack.load(streams=2, tokens=32)) == [32, 32]
    built = [event for event in stack.compose("logs", "model").stdout.splitlines() if "kernels:" in event]
    assert len(built) == 1 and "ready" in built[0]  # copied: nothing was compiled


@pytest.mark.parametrize("service", [*PIPELINE, "gateway"])
def test_no_request_is_lost_with_a_container(stack: Stack, service: str) -> None:
    assert asyncio.run(stack.load(streams=6, tokens=400, disturbance=[service])) == [400] * 6
    restarted = docker(
        "inspect", "--format", "{{.RestartCount}}", stack.compose("ps", "--quiet", service).stdout.strip()
    )
    assert int(restarted) >= 1
    stack.until_workers(2)
    stack.until_ready()


def test_workers_come_and_go_under_load(stack: Stack) -> None:
    async def scaled(number: int) -> list[int]:
        load = asyncio.create_task(stack.load(streams=6, tokens=400))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(
            stack.compose, "up", "--detach", "--no-recreate", "--scale", f"decode_worker_cpu={number}"
        )
        return await load

    for number in (3, 1):
        assert asyncio.run(scaled(number)) == [400] * 6
        stack.until_workers(1 + number)


def test_a_restart_keeps_what_its_volumes_hold(stack: Stack) -> None:
    stored = stack.ask("/v1/responses", {"input": "The sea is", "max_output_tokens": 8, "store": True})["id"]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A", "max_tokens": 4}}
    field = "--x\r\nContent-Disposition: form-data; name="
    form = (
        f'{field}"purpose"\r\n\r\nbatch\r\n{field}"file"; filename="b.jsonl"\r\n\r\n{json.dumps(line)}\n\r\n--x--\r\n'
    )
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    uploaded = stack.ask("/v1/files", form.encode(), **kind)["id"]
    asked = {"input_file_id": uploaded, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = stack.ask("/v1/batches", asked)["id"]
    asyncio.run(stack.load(streams=8, tokens=300))  # which the decode worker learns from
    stack.compose("down", "--timeout", "60")
    stack.up()
    assert stack.ask(f"/v1/responses/{stored}")["id"] == stored
    deadline = 120  # seconds, for both waits
    while (found := stack.ask(f"/v1/batches/{batch}"))["status"] != "completed" and (deadline := deadline - 1):
        assert found["status"] in ("validating", "in_progress", "finalizing"), found
        asyncio.run(asyncio.sleep(1.0))
    [row] = str(stack.ask(f"/v1/files/{found['output_file_id']}/content")).splitlines()
    assert json.loads(row)["response"]["status_code"] == 200
    stack.until_workers(2)
    starts: list[str] = []
    while not starts and (deadline := deadline - 1):
        starts = [event["start"] for event in stack.events("decode_worker_cpu") if event["event"] == "step times"]
        asyncio.run(asyncio.sleep(1.0))
    assert starts[-1] == "kept"  # by a container of another name


def test_beyond_this_machine_it_wants_a_key(stack: Stack) -> None:
    refused = stack.compose("run", "--rm", "--no-deps", "gateway", check=False, COHORT_BIND="0.0.0.0")
    assert refused.returncode == 2
    assert "can be reached from other machines" in refused.stdout + refused.stderr


def test_several_gateways_share_the_port(stack: Stack) -> None:
    stack.up("--no-deps", "gateway", COHORT_GATEWAYS="2")
    assert launched(stack, "gateway").keys() == {"gateway", "gateway-1"}
    assert asyncio.run(stack.load(streams=8, tokens=64)) == [64] * 8
    assert asyncio.run(stack.load(streams=8, tokens=400, disturbance=["gateway"])) == [400] * 8
    stack.up("--no-deps", "gateway", COHORT_GATEWAYS="1")


def test_the_job_of_kubernetes_fetches_what_its_pods_serve(
    tmp_path: Path, image: None, model_files: dict[str, bytes], stack: Stack
) -> None:
    """The component `hub-model`: its command, its variables and its mount, in a container; then a worker's, without a
    network."""
    component = ROOT / "docker" / "kubernetes" / "components" / "hub-model"
    [job] = [each for each in yaml.safe_load_all((component / "job.yaml").read_text()) if each["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    settings = yaml.safe_load((component / "model.yaml").read_text())["data"]
    settings |= {each["name"]: each["value"] for each in container["env"] if "value" in each}
    settings |= {"COHORT_MODEL": MODEL, "HF_ENDPOINT": stack.settings["HF_ENDPOINT"]}
    environment = [f"--env={name}={value}" for name, value in settings.items()]
    (models := tmp_path / "models").mkdir()
    models.chmod(0o777)
    words = [word.replace("$(COHORT_MODEL)", MODEL).replace("$(COHORT_REVISION)", "") for word in container["args"]]
    locked = ["--rm", "--read-only", "--cap-drop=ALL", "--tmpfs=/tmp:mode=1777", f"--volume={models}:/models"]
    docker(
        "run", *locked, *environment, "--entrypoint", container["command"][0], IMAGE, *container["command"][1:], *words
    )
    asked = ["-P", "-m", "cohort.services.launcher.models.named_model", MODEL]
    found = docker("run", *locked, *environment, "--network=none", "--entrypoint", "python", IMAGE, *asked)
    path = Path(json.loads(found)["model"]["path"])
    snapshot = models / path.relative_to("/models")
    assert {file.name: file.read_bytes() for file in snapshot.iterdir()} == model_files


@pytest.mark.parametrize("degree", [1, 2])
def test_one_container_has_the_workers_of_all_gpus(
    tmp_path: Path, image: None, model_files: dict[str, bytes], degree: int
) -> None:
    """Two GPUs: a worker each, or one on both. The model is one of the host's cache, whose snapshots are links."""
    hub = tmp_path / "hub"
    cached(hub, MODEL, model_files)
    own = ROOT / "configs" / f".{tmp_path.name}.yaml"  # the folder that is mounted
    own.write_text("engine: {device: cuda}\nkv: {memory_bytes: 67108864, host_memory_bytes: 0}\n")
    fake = tmp_path / "fake"
    shutil.copytree(Path(__file__).with_name("fake_gpus"), fake)
    smi = tmp_path / "nvidia-smi"
    rows = "\n".join(f"echo '{gpu.uuid}, {gpu.name}, {gpu.memory_bytes >> 20}, {gpu.capability}'" for gpu in gpus(2))
    smi.write_text(f'#!/bin/sh\ncase "$*" in\n*driver_version*) echo 580.95.05 ;;\n*) {rows} ;;\nesac\n')
    for folder in (hub, fake, tmp_path):
        readable_by_others(folder)
    smi.chmod(0o755)
    stack = Stack(
        tmp_path,
        GPUS % (2, fake, smi, f"{tmp_path.name.lower()}-claims"),
        COMPOSE_PROFILES="gpu",
        COHORT_MODEL=MODEL,
        COHORT_HF_CACHE=str(hub),
        COHORT_CONFIG=f"/opt/cohort/src/configs/{own.name}",
        COHORT_TENSOR_PARALLEL=str(degree) if degree > 1 else "",
    )
    try:
        with stack.running():
            workers = 2 // degree
            stack.until_workers(workers)
            assert len(stack.compose("ps", "--quiet", "workers").stdout.split()) == 1
            assert asyncio.run(stack.load(streams=6, tokens=64)) == [64] * 6
            claims = [event for event in stack.events("workers") if event["event"] == "device claimed"]
            assert sorted((each["index"], each["sharers"]) for each in claims) == [(0, 1), (1, 1)]
            processes = launched(stack, "workers")
            assert len(processes) == workers
            killed = str(next(iter(processes.values())))
            stack.compose("exec", "-T", "workers", "sh", "-c", f"kill -9 {killed}")  # the launcher starts it again
            assert asyncio.run(stack.load(streams=6, tokens=64)) == [64] * 6
            answers = asyncio.run(stack.load(streams=6, tokens=400, disturbance=["workers"]))  # so does Docker
            assert answers == [400] * 6
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while len(claims) < 2 + degree + 2:  # the answers may have ended before the container did
                assert time.monotonic() < deadline_s, claims
                time.sleep(0.5)
                claims = [event for event in stack.events("workers") if event["event"] == "device claimed"]
            assert len(claims) == 2 + degree + 2 and {each["index"] for each in claims} == {0, 1}
            stack.until_workers(workers)
    finally:
        own.unlink()
