"""A gateway's metrics under vLLM's names, against what published readers of them ask for.

`READERS` has each reader's source, at the commit that was read, and the series that it names.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cohort.common.process.metrics import TOKEN_HEADER
from tests.services.gateway.conftest import OpenSite, Site, eventually

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
_BOARD = (
    "https://github.com/vllm-project/production-stack/blob/a6c01db05f65f556235413ba8dbcfb0c01132fff/helm/dashboards"
)
READERS: dict[str, dict[str, str]] = {
    # The endpoint picker of llm-d and of the Gateway API inference extension: a single series of each, these labels.
    "https://github.com/llm-d/llm-d-inference-scheduler/blob/520af47896e5f06e43d09aca281a1149187b0ffd/pkg/epp/framework/"
    "plugins/datalayer/extractor/metrics/factories.go": {
        "vllm:num_requests_waiting": GAUGE,
        "vllm:num_requests_running": GAUGE,
        "vllm:kv_cache_usage_perc": GAUGE,
        "vllm:lora_requests_info": GAUGE,
        "vllm:cache_config_info": GAUGE,
    },
    # The model server protocol's first version, with the name that the KV cache's use had then.
    "https://github.com/kubernetes-sigs/gateway-api-inference-extension/blob/2b934d03e1428ea3412ebd2fcc7963a0a785c118/"
    "docs/proposals/003-model-server-protocol/README.md": {
        "vllm:num_requests_waiting": GAUGE,
        "vllm:gpu_cache_usage_perc": GAUGE,
        "vllm:lora_requests_info": GAUGE,
    },
    # The router of vLLM's production stack; `gpu_prefix_cache_hit_rate`, which vLLM has no more, is 0 without it.
    "https://github.com/vllm-project/production-stack/blob/a6c01db05f65f556235413ba8dbcfb0c01132fff/src/vllm_router/"
    "stats/engine_stats.py": {
        "vllm:num_requests_running": GAUGE,
        "vllm:num_requests_waiting": GAUGE,
        "vllm:gpu_cache_usage_perc": GAUGE,
        "vllm:gpu_prefix_cache_hits_total": COUNTER,
        "vllm:gpu_prefix_cache_queries_total": COUNTER,
    },
    # Its board of the engines; what it shows of the router itself (current_qps, healthy_pods_total) is the router's.
    f"{_BOARD}/vllm-dashboard.json": {
        "vllm:e2e_request_latency_seconds": HISTOGRAM,
        "vllm:gpu_prefix_cache_hits_total": COUNTER,
        "vllm:gpu_prefix_cache_queries_total": COUNTER,
        "vllm:kv_cache_usage_perc": GAUGE,
        "vllm:num_requests_running": GAUGE,
        "vllm:num_requests_waiting": GAUGE,
        "vllm:request_time_per_output_token_seconds": HISTOGRAM,
        "vllm:time_to_first_token_seconds": HISTOGRAM,
    },
    # Its board of a model, without `request_max_num_generation_tokens`.
    f"{_BOARD}/vllm-model-metrics-dashboard.json": {
        "vllm:e2e_request_latency_seconds": HISTOGRAM,
        "vllm:generation_tokens_total": COUNTER,
        "vllm:kv_cache_usage_perc": GAUGE,
        "vllm:num_requests_running": GAUGE,
        "vllm:num_requests_waiting": GAUGE,
        "vllm:prompt_tokens_total": COUNTER,
        "vllm:request_decode_time_seconds": HISTOGRAM,
        "vllm:request_generation_tokens": HISTOGRAM,
        "vllm:request_prefill_time_seconds": HISTOGRAM,
        "vllm:request_prompt_tokens": HISTOGRAM,
        "vllm:request_queue_time_seconds": HISTOGRAM,
        "vllm:request_success_total": COUNTER,
        "vllm:request_time_per_output_token_seconds": HISTOGRAM,
        "vllm:time_to_first_token_seconds": HISTOGRAM,
    },
    # vLLM's own board, copied into many, with the former name of the time between tokens.
    "https://github.com/vllm-project/vllm/blob/004f771f3a6b49597546b05c7d83686d1e121fa0/examples/online_serving/"
    "prometheus_grafana/grafana.json": {
        "vllm:e2e_request_latency_seconds": HISTOGRAM,
        "vllm:generation_tokens_total": COUNTER,
        "vllm:prompt_tokens_total": COUNTER,
        "vllm:time_per_output_token_seconds": HISTOGRAM,
    },
    # KServe's scaling by KEDA, of requests that run.
    "https://kserve.github.io/website/docs/model-serving/generative-inference/autoscaling": {
        "vllm:num_requests_running": GAUGE
    },
    # vLLM's page of metrics, 0.32: of its engine's, those that the readers above have no name for yet.
    "https://docs.vllm.ai/en/v0.32.0/usage/metrics/": {
        "vllm:inter_token_latency_seconds": HISTOGRAM,
        "vllm:num_preemptions_total": COUNTER,
        "vllm:prefix_cache_queries_total": COUNTER,
        "vllm:prefix_cache_hits_total": COUNTER,
    },
}
LABELS = {
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
    "vllm:request_success_total": {"finished_reason"},
}
BODY: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 4}


async def scraped(site: Site, headers: dict[str, str] | None = None) -> dict[str, Metric]:
    """Return the families of vLLM's, by the name that a query has."""
    async with site.session.get(site.url + "/metrics", headers=headers) as response:
        families = list(text_string_to_metric_families(await response.text()))
    assert not [sample.name for family in families for sample in family.samples if sample.name.endswith("_created")]
    return {
        family.name + ("_total" if family.type == COUNTER else ""): family
        for family in families
        if family.name.startswith("vllm:")
    }


def value(families: dict[str, Metric], name: str, suffix: str = "", **labels: str) -> float:
    having = [
        sample.value
        for sample in families[name].samples
        if sample.name == name + suffix and labels.items() <= sample.labels.items()
    ]
    (only,) = having
    return only


@pytest.mark.parametrize("requests", [0, 2])
async def test_published_readers_find_what_they_name(open_site: OpenSite, requests: int) -> None:
    async with open_site(lora={"poems": "/adapters/poems"}) as site:
        for _ in range(requests):
            assert (await site.post("/v1/completions", BODY))[0] == 200
        families = await scraped(site)
    for source, named in READERS.items():
        for name, kind in named.items():
            family = families.get(name)
            assert family is not None, f"{source} reads {name}"
            assert family.type == kind, f"{source} reads {name} as a {kind}"
            for sample in family.samples:
                more = LABELS.get(name, set()) | ({"le"} if sample.name.endswith("_bucket") else set())
                assert sample.labels.keys() == {"model_name", "engine", *more}
                assert sample.labels["model_name"] == "tiny"
    assert set(families) == {name for named in READERS.values() for name in named}, "a name that no reader has"
    singles = [families[name] for named in READERS.values() for name, kind in named.items() if kind == GAUGE]
    assert all(len(family.samples) == 1 for family in singles), "readers take one series, not a sum over classes"


async def test_values_are_those_of_the_requests(open_site: OpenSite) -> None:
    async with open_site() as site:
        await site.post("/v1/completions", BODY)
        await site.post("/v1/completions", {**BODY, "prompt": "xy", "priority": 1})
        prompts = [request.prompt_tokens for request in site.manager.submitted]
        families = await scraped(site)
    assert value(families, "vllm:prompt_tokens_total") == sum(prompts)
    assert value(families, "vllm:generation_tokens_total") == 8
    assert value(families, "vllm:request_success_total", finished_reason="length") == 2
    assert value(families, "vllm:request_success_total", finished_reason="abort") == 0
    assert value(families, "vllm:prefix_cache_queries_total") == sum(prompts)
    assert value(families, "vllm:prefix_cache_hits_total") == 2  # the scripted worker finds one of each
    assert value(families, "vllm:time_to_first_token_seconds", "_count") == 2
    assert value(families, "vllm:time_to_first_token_seconds", "_bucket", le="+Inf") == 2
    assert value(families, "vllm:inter_token_latency_seconds", "_count") == 6
    assert value(families, "vllm:request_prompt_tokens", "_sum") == sum(prompts)
    assert value(families, "vllm:num_requests_running") == value(families, "vllm:num_requests_waiting") == 0
    block = int(families["vllm:cache_config_info"].samples[0].labels["block_size"])
    assert int(families["vllm:cache_config_info"].samples[0].labels["num_gpu_blocks"]) == 10_000 // block


async def test_a_request_waits_then_runs_with_its_adapter(open_site: OpenSite) -> None:
    gate = asyncio.Event()
    async with open_site(lora={"poems": "/adapters/poems"}) as site:
        site.manager.gate, site.manager.place = gate.wait, False
        waits = asyncio.create_task(site.post("/v1/completions", {**BODY, "model": "poems"}))
        await eventually(lambda: len(site.manager.submitted) == 1)
        families = await scraped(site)
        assert (value(families, "vllm:num_requests_waiting"), value(families, "vllm:num_requests_running")) == (1, 0)
        assert families["vllm:lora_requests_info"].samples[0].labels["waiting_lora_adapters"] == "poems"
        waits.cancel()
        await eventually(site.nothing_left)
        site.manager.place = True
        runs = asyncio.create_task(site.post("/v1/completions", {**BODY, "model": "poems"}))
        await eventually(lambda: len(site.gateway.streams) == 1 and site.manager.held() != [])
        families = await scraped(site)
        assert (value(families, "vllm:num_requests_waiting"), value(families, "vllm:num_requests_running")) == (0, 1)
        assert families["vllm:lora_requests_info"].samples[0].labels["running_lora_adapters"] == "poems"
        gate.set()
        assert (await runs)[0] == 200


async def test_the_monitor_gets_none_so_a_sum_over_all_targets_has_each_request_once(open_site: OpenSite) -> None:
    """The monitor shows every process's series again: a sum over its target and the gateways' would have them twice."""
    async with open_site() as site:
        await site.post("/v1/completions", BODY)
        own = await scraped(site)
        for_monitor = await scraped(site, {TOKEN_HEADER: site.context.metrics_token})
    assert for_monitor == {}
    total = Counter({"vllm:request_success_total": 0.0})
    for target in (own, for_monitor):
        for name, family in target.items():
            total[name] += sum(sample.value for sample in family.samples if sample.name == name)
    assert total["vllm:request_success_total"] == 1
    assert total["vllm:generation_tokens_total"] == 4
