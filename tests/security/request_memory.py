"""How much a gateway holds for a thousand of the largest requests that it accepts: `python -m … SCENARIO MODEL-FOLDER`.

An attack tool that tests run in a process of its own, so that what is measured is what this process has resident. It
stands where the HTTP handlers stand: bodies are parsed, tokenised, prepared and offered to the real machine, placed,
and given all their tokens over the wire's codec, which nothing reads (clients that are slow). Each scenario asks for as
much of one thing as is accepted and goes on with plain requests of the whole context, which always are.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections import Counter
from typing import Any

from prometheus_client import CollectorRegistry

from cohort.common import codec
from cohort.common.clock import SystemClock
from cohort.common.config import Config, LoggingConfig, ModelConfig
from cohort.common.errors import RequestError
from cohort.common.machines.events import Received
from cohort.common.machines.gateway.gateway import GatewayMachine, GatewaySettings
from cohort.common.messages import Placed, StageTimes, TokenBatch, TokenLogprob, TokenUpdate
from cohort.common.policies import compose
from cohort.common.process.logs import configure_logging
from cohort.common.process.metrics import MetricFactory, RequestMetrics
from cohort.services.gateway.generation.answering import Answering
from cohort.services.gateway.generation.delta import Caller
from cohort.services.gateway.generation.generator import GatewayContext, Generator
from cohort.services.gateway.generation.streams import Streams
from cohort.services.gateway.keys.owners import Owners
from cohort.services.gateway.requests.formats import answer_format
from cohort.services.gateway.requests.model_card import Served
from cohort.services.gateway.service import load_model

REQUESTS = 1000
CONTEXT = 8192
TOKEN = 300  # beyond the numbers of which the interpreter keeps one object each
AT_ONCE = 1024

Body = dict[str, Any]

STOPS = [chr(0x4E00 + digit) * 255 + "x" for digit in range(4)]
EVERYTHING_SMALL: Body = {
    "stop": STOPS,
    "stop_token_ids": list(range(100, 356)),
    "logit_bias": {str(token): 0.5 + token for token in range(99)},
    "presence_penalty": 1.0,
}

SCENARIOS: dict[str, Body] = {
    "plain": {"prompt": [TOKEN], "max_tokens": CONTEXT - 1, **EVERYTHING_SMALL},
    "long prompts": {"prompt": [TOKEN] * (CONTEXT - 1), "max_tokens": 1, **EVERYTHING_SMALL},
    "log-probabilities": {"prompt": [TOKEN], "max_tokens": CONTEXT - 1, "logprobs": 20},
    "scored prompts": {"prompt": [TOKEN] * (CONTEXT - 1), "max_tokens": 1, "logprobs": 20, "echo": True},
    "choices": {"prompt": [TOKEN], "n": 128, "max_tokens": 3500, "ignore_eos": True},
    "prompts": {"prompt": [[TOKEN]] * 128, "max_tokens": 3500},
    "prompts of one token": {"prompt": [[TOKEN]] * 128, "max_tokens": 1, "stop": STOPS},
}
PLAIN: Body = {"prompt": [TOKEN], "max_tokens": CONTEXT - 1}


class Crowd:
    """Requests that are open at a gateway with the default limits."""

    def __init__(self, model: str) -> None:
        config = Config(model=ModelConfig(path=model), logging=LoggingConfig(level="error"))
        card, tokenizer = load_model(config)
        clock, log = SystemClock(), configure_logging(config.logging, service="gateway", instance="gateway")
        metrics = RequestMetrics(MetricFactory(CollectorRegistry(), model_name="m", instance="gateway"))
        settings, admission = GatewaySettings.of(config), compose.admission(config)
        machine = GatewayMachine("gateway", 1, "", settings, admission, clock.now_s(), predictor="")
        self._streams = Streams(machine, machine, send=lambda *_: None, clock=clock, metrics=metrics, log=log)
        written = answer_format(tokenizer.template_source, tokenizer.added_token)
        served = Served(card, tokenizer, written, lambda: CONTEXT)
        host = GatewayContext("gateway", clock, metrics, log)
        self._generator = Generator(config.gateway, served, host, self._streams, Owners(config, ()))
        self.open: list[Answering] = []
        self.refused: Counter[int] = Counter()

    async def accept(self, body: Body) -> bool:
        data = json.dumps(body).encode()
        try:
            reader = self._generator.parser
            call = await reader.read(data, lambda body: reader.completion(body, {}))
            answering = await self._generator.begin(call, len(data), Caller("", "", 0.0))
        except RequestError as error:
            self.refused[error.status] += 1
            return False
        self.open.append(answering)
        for entry in answering.generation.entries:  # placed: nothing waits when the next one comes
            self._streams.feed(Received("manager", Placed(entry.attempt, ["w"], 0.0, "")))
        return True

    def grow(self, answering: Answering) -> None:
        """All its tokens but the last, as they come over the wire."""
        for entry in answering.generation.entries:
            sampling, prompt = entry.request.sampling, entry.request.prompt_tokens
            first = True
            for start in range(0, sampling.max_tokens - 1 or 1, AT_ONCE):
                count = min(AT_ONCE, max(1, sampling.max_tokens - 1 - start))
                update = TokenUpdate(
                    entry.attempt,
                    prompt + start,
                    [40_000] * count,
                    [score(sampling.logprobs)] * count if sampling.logprobs >= 0 else [],
                    times=StageTimes("w") if first else None,
                    prompt_logprobs=[score(sampling.prompt_logprobs)] * (prompt - 1)
                    if first and sampling.prompt_logprobs >= 0
                    else [],
                )
                first = False
                message = codec.decode(codec.encode(TokenBatch("w", [update])))
                self._streams.feed(Received("w", message))


def score(top: int) -> TokenLogprob:
    return TokenLogprob(-1.5, [TOKEN + step for step in range(top)], [-2.5 - step for step in range(top)])


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure(scenario: str, model: str) -> dict[str, Any]:
    crowd = Crowd(model)
    await crowd.accept({"prompt": "a", "max_tokens": 0})  # what is loaded with the first request
    crowd.open.clear()
    before = resident_bytes()
    while len(crowd.open) < REQUESTS and await crowd.accept(SCENARIOS[scenario]):
        crowd.grow(crowd.open[-1])
    worst = len(crowd.open)
    while len(crowd.open) < REQUESTS and await crowd.accept(PLAIN):
        crowd.grow(crowd.open[-1])
    held = resident_bytes() - before
    return {"worst": worst, "open": len(crowd.open), "refused": dict(crowd.refused), "held_bytes": held}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1], sys.argv[2]))))
