"""The containers of docker/kubernetes/overlays/cpu as processes of this machine: one for each pod, by the manifests'
own arguments and environment, started apart, asked by their probes, ended by SIGTERM.

By default the compose file's commands run instead (`tests/security/deployment/test_containers.py`), and
`tests/scripts/test_kubernetes.py` compares the manifests' own with them.

What a machine without containers lacks is put in its place: names of Services become `localhost`, ports free ones,
mounts folders. A volume is a folder that others can enter, as one of Kubernetes is.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort.common.http.ports import free_port
from cohort.common.paths import cache_dir
from cohort.common.transport.security import generate_keys
from tests.containers import ENTRYPOINT, ROOT
from tests.examples import another_of_its_kind
from tests.kustomize import pod_spec, render

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, another_of_its_kind()]

KEY = "sk-of-the-test"
OVERLAY = ROOT / "docker" / "kubernetes" / "overlays" / "cpu"
PROMPT = [1000, 2000, 3000, 4000, 5000]
ADDRESS = "localhost"  # of a pod: not what processes listen on, so that each shows which of the two it tells others
ENDPOINTS = ("manager", "predictor", "monitor", "gateway")
MANAGERS = {"bucketing-manager-0": "manager", "bucketing-manager-1": "manager-1"}


class Pod:
    """One container of the manifests."""

    def __init__(self, name: str, spec: dict[str, Any], folder: Path, api_ports: dict[str, int]) -> None:
        """`name` of the pod. `folder` holds options, keys and models of all; the pod's own mounts are made in it."""
        self.name = name
        self.own = folder / name
        [self._container] = spec["containers"]
        self.grace_s = float(spec["terminationGracePeriodSeconds"])
        self._paths = {
            "/etc/cohort/options": f"{self.own}/options",
            "/etc/cohort/keys": f"{folder}/keys",
            "/models": f"{folder}/models",
            "/run/cohort": f"{self.own}/run",
            "/var/lib/cohort": f"{self.own}/state",
        }
        for mount in ("run", "state"):
            (self.own / mount).mkdir(parents=True)
            (self.own / mount).chmod(0o777)
        self._ports = {each["name"]: free_port() for each in self._container["ports"]} | api_ports
        self._numbers = {str(each["containerPort"]): each["name"] for each in self._container["ports"]}

    def placed(self, text: str) -> str:
        for path, here in self._paths.items():
            text = text.replace(path, here)
        return text

    def write(self, options: dict[str, str], base: str) -> None:
        """The config map, and configs/compose.yaml as the image has it."""
        (self.own / "options").mkdir()
        for name, text in {**options, "base.yaml": base}.items():
            (self.own / "options" / name).write_text(self.placed(text))

    def start(self, **more: str) -> None:
        """`more`: of the environment."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("COHORT_", "UCX_", "XDG_"))
        }
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment |= {"COHORT_ACCELERATOR": "cpu", "COHORT_BASE_CONFIG": f"{self.own}/options/base.yaml"}
        for variable in self._container["env"]:
            match variable:
                case {"name": name, "value": value}:
                    environment[name] = self.placed(value)
                case {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}:
                    environment[name] = {"status.podIP": ADDRESS, "metadata.name": self.name}[path]
                case {"name": name, "valueFrom": {"secretKeyRef": _}}:
                    environment[name] = KEY
        if (kernels := cache_dir() / "kernels").is_dir() and (cache := environment.get("COHORT_CACHE_DIR")):
            Path(cache).mkdir(exist_ok=True)
            if not (Path(cache) / "kernels").exists():
                (Path(cache) / "kernels").symlink_to(kernels)  # to compile them again would take a minute
        environment |= more
        words = [
            str(self._ports[self._numbers[word]]) if word in self._numbers else self.placed(word)
            for word in self._container["args"]
        ]
        with (self.own / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [ENTRYPOINT, *words], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.own
            )

    def probe(self, name: str) -> int:
        """Status of a probe of the manifest, 0 where nothing answers."""
        asked = self._container[name]["httpGet"]
        return fetch(f"http://127.0.0.1:{self._ports[asked['port']]}{asked['path']}")[0]

    def leads(self) -> bool:
        """Of a manager."""
        text = fetch(f"http://127.0.0.1:{self._ports['metrics']}/metrics")[1]
        return re.search(r"^cohort_manager_leads(\{.*\})? 1(\.0)?$", text, re.MULTILINE) is not None

    def log(self) -> str:
        return (self.own / "log").read_text(errors="replace")[-3000:]

    def end(self) -> int:
        """As the kubelet: SIGTERM, and a kill after the grace period. The exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=self.grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def fetch(url: str, body: dict[str, Any] | None = None, key: str = "") -> tuple[int, str]:
    data = json.dumps(body).encode() if body is not None else None
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


class Cluster:
    def __init__(self, folder: Path, model: Path, overlay: Path = OVERLAY, more: dict[str, Any] | None = None) -> None:
        """`more` options than the overlay's, by section."""
        resources = render(overlay)
        [options] = [each["data"] for each in resources if each["kind"] == "ConfigMap"]
        cluster = yaml.safe_load(options["cluster.yaml"])
        # A name, not an address: the options take names.
        for endpoint in ENDPOINTS:
            cluster["endpoints"][endpoint] = f"tcp://localhost:{free_port()}"
        standbys = cluster["endpoints"]["standby_managers"]
        cluster["endpoints"]["standby_managers"] = [f"tcp://localhost:{free_port()}" for _ in standbys]
        self.port = free_port()
        self.api, self.monitor = (f"http://127.0.0.1:{self.port + offset}" for offset in range(2))
        base = yaml.safe_load((ROOT / "configs" / "compose.yaml").read_text(encoding="utf-8"))
        base["endpoints"]["bind_host"] = base["metrics"]["host"] = "127.0.0.1"
        published = {"gateway": int(self.api.rpartition(":")[2]), "monitor": int(self.monitor.rpartition(":")[2])}
        for section, port in published.items():
            base[section].update(host="127.0.0.1", port=port)
        base["kv"] = {"memory_bytes": 64 << 20, "host_memory_bytes": 0}
        generate_keys(folder / "keys" / "cluster.key")
        served = folder / "models" / Path(yaml.safe_load(options["options.yaml"])["model"]["path"]).name
        served.parent.mkdir()
        served.symlink_to(model)
        own = yaml.safe_load(options["options.yaml"])
        for section, values in (more or {}).items():
            own[section] = {**own.get(section, {}), **values}
        self.texts = {"cluster.yaml": yaml.safe_dump(cluster), "options.yaml": yaml.safe_dump(own)}
        self.base = yaml.safe_dump(base)
        self._folder = folder
        self._workloads = {each["metadata"]["name"]: each for each in resources if pod_spec(each) is not None}
        self._published = {"gateway": published["gateway"], "global-monitor": published["monitor"]}
        self.pods: dict[str, Pod] = {}
        for role, each in self._workloads.items():
            if each["kind"] != "Job":
                for index in range(each["spec"].get("replicas", 1)):
                    self.pod(role, index)

    def pod(self, role: str, index: int) -> Pod:
        """That one, made where it was not yet; a name that comes again finds its volume."""
        name = f"{role}-{index}"
        if name not in self.pods:
            spec = pod_spec(self._workloads[role])
            assert spec is not None
            ports = {"http": self._published[role]} if role in self._published else {}
            self.pods[name] = Pod(name, spec, self._folder, ports)
            self.pods[name].write(self.texts, self.base)
        return self.pods[name]

    def until_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while any(pod.probe("readinessProbe") != 200 for pod in self.pods.values()):
            for name, pod in self.pods.items():
                assert pod.process.poll() is None, (name, pod.log())
            assert time.monotonic() < deadline_s, {name: pod.log() for name, pod in self.pods.items()}
            time.sleep(0.3)

    def complete(self, tokens: int, key: str = KEY) -> tuple[int, list[int]]:
        body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, text = fetch(f"{self.api}/v1/completions", body, key)
        return status, json.loads(text)["cohort"]["requests"][0]["token_ids"] if status == 200 else []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Cluster]:
    # A gateway or a leader that is not scheduled for less than 3 s leaves the lead where it is.
    made = Cluster(tmp_path_factory.mktemp("cluster"), small_model, more={"manager": {"load_interval_s": 1.0}})
    try:
        for pod in made.pods.values():
            pod.start()
        made.until_ready(timeout_s=300)
        yield made
    finally:
        for pod in made.pods.values():
            if hasattr(pod, "process"):
                pod.end()


def test_every_probe_answers_and_a_request_with_the_key_is_served(cluster: Cluster):
    for pod in cluster.pods.values():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert pod.probe(probe) == 200, (pod.name, probe)
    status, tokens = cluster.complete(8)
    assert (status, len(tokens)) == (200, 8)
    assert cluster.complete(8, key="")[0] == 401


def test_the_monitor_reaches_the_metrics_of_every_pod(cluster: Cluster):
    deadline_s = time.monotonic() + 60
    wanted = {"gateway", "predictor", *MANAGERS.values(), "prefill-worker-0", "decode-worker-0"}
    while True:
        text = fetch(f"{cluster.monitor}/metrics")[1]
        reached = {name for name in wanted if f'cohort_scrape_up{{instance="{name}"}} 1' in text}
        if reached == wanted:
            break
        assert time.monotonic() < deadline_s, wanted - reached
        time.sleep(0.5)
    processes = json.loads(fetch(f"{cluster.monitor}/api/state")[1])["processes"]
    urls = {each["instance"]: each["metrics_url"] for each in processes}
    assert wanted == {name for name, url in urls.items() if url.startswith(f"http://{ADDRESS}:")}
    # What the autoscalers go by.
    assert "cohort_num_requests_waiting{" in text and 'instance="manager"' in text
    assert "cohort_kv_cache_usage_perc{" in text and 'instance="decode-worker-0"' in text


def test_the_other_manager_takes_over_and_the_gateway_is_ready_throughout(cluster: Cluster):
    managers = [cluster.pods[name] for name in MANAGERS]
    [leader] = [each for each in managers if each.leads()]
    [other] = [each for each in managers if each is not leader]
    before, ready = cluster.complete(8), []
    leader.process.kill()
    leader.process.wait()
    deadline_s = time.monotonic() + 30
    while not other.leads():
        assert time.monotonic() < deadline_s, other.log()
        ready.append(cluster.pods["gateway-0"].probe("readinessProbe"))
        time.sleep(0.05)
    ready.append(cluster.pods["gateway-0"].probe("readinessProbe"))
    assert cluster.complete(8) == before
    assert set(ready) == {200}
    leader.start()  # as the kubelet does
    cluster.until_ready(timeout_s=60)
    assert [each.leads() for each in (leader, other)] == [False, True]


def test_sigterm_drains(cluster: Cluster):
    """Last in this file. The gateway goes first, and finishes the stream that it has; then all others."""
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    whole = json.loads(fetch(f"{cluster.api}/v1/completions", body, KEY)[1])["choices"][0]["text"]
    gateway = cluster.pods["gateway-0"]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    data = json.dumps({**body, "stream": True}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{cluster.api}/v1/completions", data, headers), timeout=60
    ) as stream:
        events = (line.decode().removeprefix("data: ").strip() for line in stream if line.startswith(b"data: "))
        said = [next(events)]
        gateway.process.send_signal(signal.SIGTERM)
        said += events
    assert said.pop() == "[DONE]"
    assert not [event for event in said if "choices" not in event], gateway.log()
    assert "".join(choice["text"] for event in said for choice in json.loads(event)["choices"]) == whole
    assert gateway.process.wait(timeout=gateway.grace_s) == 0
    assert '"draining"' in gateway.log()
    assert {name: pod.end() for name, pod in cluster.pods.items()} == dict.fromkeys(cluster.pods, 0)
