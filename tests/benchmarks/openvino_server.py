"""OpenVINO GenAI's continuous batching behind the streaming chat endpoint that a load generator needs, and no more.

    python openvino_server.py MODEL_FOLDER PORT THREADS      # in OpenVINO's environment, on loopback

One thread makes steps while there are requests; it hands the tokens of a step to the event loop in one call, which
decodes and writes them. 512 tokens a step and no prefix cache: what measured best on two cores.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import openvino
import openvino_genai
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

Finished = openvino_genai.GenerationFinishReason


class Engine:
    """The pipeline and the thread that steps it. `sent` gets every queue's new tokens, None at the end."""

    def __init__(self, folder: Path, threads: int) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.max_num_batched_tokens = 512
        scheduling.max_num_seqs = 64
        scheduling.cache_size = 2
        scheduling.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduling, "CPU", properties)
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._arrived = threading.Condition()
        self._waiting: list[tuple[Any, Any, asyncio.Queue[list[int] | None]]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, prompt: list[int], config: Any) -> asyncio.Queue[list[int] | None]:
        tokens: asyncio.Queue[list[int] | None] = asyncio.Queue()
        with self._arrived:
            self._waiting.append((openvino.Tensor(np.array([prompt], dtype=np.int64)), config, tokens))
            self._arrived.notify()
        return tokens

    def _run(self) -> None:
        running: list[tuple[Any, asyncio.Queue[list[int] | None]]] = []
        while True:
            with self._arrived:
                while not self._waiting and not running:
                    self._arrived.wait()
                arrived, self._waiting = self._waiting, []
            for prompt, config, tokens in arrived:
                running.append((self._pipeline.add_request(next(self._ids), prompt, config), tokens))
            self._pipeline.step()
            sent, still = [], []
            for handle, tokens in running:
                ended = False
                while handle.can_read():
                    for output in handle.read().values():
                        sent.append((tokens, list(output.generated_ids)))
                        ended |= output.finish_reason != Finished.NONE
                ended |= handle.get_status() != openvino_genai.GenerationStatus.RUNNING
                if ended:
                    sent.append((tokens, None))
                else:
                    still.append((handle, tokens))
            running = still
            self._loop.call_soon_threadsafe(_hand_out, sent)


def _hand_out(sent: list[tuple[asyncio.Queue[list[int] | None], list[int] | None]]) -> None:
    for tokens, ids in sent:
        tokens.put_nowait(ids)


def generation_config(body: dict[str, Any], eos: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.set_eos_token_id(eos)
    config.max_new_tokens = body["max_tokens"]
    config.ignore_eos = bool(body.get("ignore_eos"))
    if temperature := body.get("temperature", 0):
        config.do_sample = True
        config.temperature = temperature
        config.top_p = body.get("top_p", 1.0)
    return config


def chat(engine: Engine, tokenizer: Tokenizer, template: jinja2.Template, eos: int) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = template.render(messages=body["messages"], add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        tokens = engine.add(prompt, generation_config(body, eos))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        decoder, count = DecodeStream(skip_special_tokens=True), 0
        while (ids := await tokens.get()) is not None:
            count += len(ids)
            content = "".join(decoder.step(tokenizer, each) or "" for each in ids)
            await response.write(_event({"choices": [{"index": 0, "delta": {"content": content}}]}))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        await response.write(
            _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": usage})
            + b"data: [DONE]\n\n"
        )
        return response

    return answer


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def application(folder: Path, threads: int) -> web.Application:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = jinja2.Environment().from_string((folder / "chat_template.jinja").read_text())

    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": folder.name, "object": "model"}]})

    made = web.Application()
    made.router.add_get("/v1/models", models)
    made.router.add_post("/v1/chat/completions", chat(Engine(folder, threads), tokenizer, template, eos))
    return made


if __name__ == "__main__":
    web.run_app(application(Path(sys.argv[1]), int(sys.argv[3])), host="127.0.0.1", port=int(sys.argv[2]))
