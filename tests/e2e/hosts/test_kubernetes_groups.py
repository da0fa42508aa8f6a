"""A group of the component `rank-groups` as processes of this machine, by the manifest's commands and environment."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import yaml

from cohort.common.http.ports import free_port
from tests.containers import ROOT
from tests.e2e.equality.golden import golden_outputs
from tests.e2e.hosts.test_kubernetes_processes import PROMPT, Cluster, Pod, fetch
from tests.e2e.tiny_models import llama, save
from tests.examples import nightly
from tests.kustomize import documents
from tests.services.gateway.tiny_model import byte_level

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(not nightly(), reason="scripts/test --nightly"),
]

COMPONENT = ROOT / "docker" / "kubernetes" / "components" / "rank-groups"
GONE_S = 2.0
TOKENS = 12


class Group:
    """Of two pods beside a cluster's; what the controller sets is in their environment."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        [manifest] = documents(COMPONENT / "decode-group.yaml")
        options = yaml.safe_load((COMPONENT / "groups.yaml").read_text())
        options["engine"]["threads"] = 1
        texts = {**cluster.texts, "groups.yaml": yaml.safe_dump(options)}
        self._set = {"LWS_LEADER_ADDRESS": "localhost", "LWS_GROUP_SIZE": "2", "COHORT_RANKS_PORT": str(free_port())}
        self.pods = []
        for index, template in enumerate(("leaderTemplate", "workerTemplate")):
            spec = manifest["spec"]["leaderWorkerTemplate"][template]["spec"]
            [container] = spec["containers"]
            container.setdefault("ports", [])
            pod = Pod("decode-group-0" + (f"-{index}" if index else ""), spec, folder, {})
            pod.write(texts, cluster.base)
            self.pods.append(pod)

    def start(self) -> None:
        """The leader last: ranks wait for it."""
        for index, pod in reversed(list(enumerate(self.pods))):
            pod.start(LWS_WORKER_INDEX=str(index), OMP_NUM_THREADS="1", **self._set)

    def until_ready(self) -> None:
        deadline_s = time.monotonic() + 120
        while self.pods[0].probe("readinessProbe") != 200:
            for pod in self.pods:
                assert pod.process.poll() is None, (pod.name, pod.log())
            assert time.monotonic() < deadline_s, [pod.log() for pod in self.pods]
            time.sleep(0.2)

    def end(self) -> list[int]:
        """As the kubelet ends a group: SIGTERM to all. Ranks leave the answer to their leader."""
        leader, rank = self.pods
        rank.process.terminate()
        return [leader.end(), rank.process.wait(GONE_S)]


def test_the_pods_of_a_group_are_one_worker_and_end_together(tmp_path: Path):
    torch.manual_seed(7)
    model = tmp_path / "model"
    model.mkdir()
    save(llama(), model)
    byte_level(400).save(str(model / "tokenizer.json"))
    prompt = [token % 400 for token in PROMPT]
    [golden] = golden_outputs(model, [prompt], TOKENS)
    cluster = Cluster(tmp_path, model, more={"engine": {"threads": 1}, "model": {"dtype": "float32"}})
    for single in ("prefill-worker-0", "decode-worker-0"):  # the group computes prompts, too, where it is alone
        del cluster.pods[single]
    group = Group(cluster, tmp_path)
    try:
        for pod in cluster.pods.values():
            pod.start()
        group.start()
        group.until_ready()
        cluster.until_ready(timeout_s=120)
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, text = fetch(f"{cluster.api}/v1/completions", body, "sk-of-the-test")
        assert status == 200
        assert tuple(yaml.safe_load(text)["cohort"]["requests"][0]["token_ids"]) == golden.output

        leader, rank = group.pods
        rank.process.kill()
        assert leader.process.wait(GONE_S) == 1
        group.start()  # as the controller, all of them
        group.until_ready()
        assert group.end() == [0, 0]
    finally:
        for pod in [*group.pods, *cluster.pods.values()]:
            if hasattr(pod, "process"):
                pod.end()
