"""A polite client beside heavy requests: they are legal and at their bounds, and it waits for what they delay."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from aiohttp import web

from cohort.common.config import GatewayConfig
from cohort.services.bench.__main__ import main
from cohort.services.bench.live.neighbours import CHOICES, COMPLETIONS, heaviest
from cohort.services.gateway.bounds import BOUNDS
from cohort.services.gateway.generation.preparation import RequestBudget, output_limits
from cohort.services.gateway.requests.model_card import ModelCard
from cohort.services.gateway.requests.parsing import parse_completion

CARD = ModelCard("tiny", Path("/m"), 8192, 20_000, (2,))


@pytest.mark.parametrize("name", [name for name, each in heaviest(8192, Random(0)).items() if each.path == COMPLETIONS])
def test_the_heaviest_requests_are_legal(name: str) -> None:
    config, heavy = GatewayConfig(), heaviest(CARD.max_model_len, Random(0))[name]
    call = parse_completion(json.dumps(heavy.body).encode(), {}, config, CARD)
    if spec := call.grammar_spec:
        call = replace(call, sampling=msgspec.structs.replace(call.sampling, grammar=json.dumps(spec.content)))
    lengths = [len(prompt) for prompt in call.prompts]
    budget = RequestBudget(config, len)  # type: ignore[arg-type]
    budget.check(call)
    budget.price(call, lengths, output_limits(call, lengths, config, CARD.max_model_len))
    assert BOUNDS.choices == CHOICES


async def test_ratios_to_a_run_alone(tmp_path: Path) -> None:
    """A server of which a heavy request delays every other answer."""
    heavy = 0

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 2048}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal heavy
        body = await request.json()
        if body.get("n", 1) > 1:
            heavy += 1
            await asyncio.sleep(0.01)
            return web.json_response({})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(2):
            await asyncio.sleep(0.02)
            await response.write(b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": null}]}\n\n')
        await response.write(b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post(COMPLETIONS, complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    file = tmp_path / "found.json"
    words = ["neighbours", "--url", f"127.0.0.1:{port}", "--beside", "choices", "--requests", "2", "--json", str(file)]
    assert await asyncio.to_thread(main, [*words, "--quiet"]) == 0
    await runner.cleanup()
    found = json.loads(file.read_text())
    assert list(found) == ["nothing", "choices"] and heavy >= 1
    assert found["nothing"]["answers"] == {} and found["choices"]["answers"]["200"] >= 1
    assert all(each["first_s"] > 0 and each["gap_s"] > 0 for each in found.values())
