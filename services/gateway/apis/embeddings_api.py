"""POST /v1/embeddings: prompts as vectors, in OpenAI's form.

Called by aiohttp through `middleware.py`; built on `generator.py`. An input is a request that ends with its prompt: the
same queues, classes, SLOs and limits as one that generates. Its vector comes with the token behind the prompt, which
nobody asked for.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.common.messages import PooledStates
from cohort.common.types import SamplingParams
from cohort.services.gateway.generation.answering import Answering
from cohort.services.gateway.generation.generator import Generator
from cohort.services.gateway.generation.openai_shapes import Extras, PromptTokensDetails
from cohort.services.gateway.http.bodies import AtLeastOne, CohortOptions, Prompt
from cohort.services.gateway.http.request_bodies import refuse_shape
from cohort.services.gateway.requests.embedding_form import EmbeddingForm
from cohort.services.gateway.requests.parsing import Call, check_model, class_and_slo, decode, if_late_of, read_prompts

EMBEDDINGS_PATH = "/v1/embeddings"
_encode = msgspec.json.Encoder().encode


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    input: Prompt
    model: str | None = None
    dimensions: AtLeastOne | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cohort: CohortOptions | None = None
    # Tolerated: it labels a request and never changes an answer.
    user: str | None = None


class EmbeddingObject(msgspec.Struct, frozen=True):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(msgspec.Struct, frozen=True):
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
    cohort: Extras
    object: Literal["list"] = "list"


_decoder = msgspec.json.Decoder(EmbeddingsBody)


class EmbeddingsApi:
    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def routes(self) -> list[web.RouteDef]:
        return [web.post(EMBEDDINGS_PATH, self.embeddings)]

    async def embeddings(self, request: web.Request) -> web.Response:
        generator, form = self._generator, self._generator.served.card.embedding
        with _named_input():
            async with generator.arriving(request) as received:
                body, call = await generator.parser.read(received.data, lambda data: self._read(data, request.headers))
                answering = await generator.begin(call, len(received.data), received.caller)
            try:
                async for _ in answering.outlet.steps(answering):
                    pass  # an error of one of them ends the request
                answer = await _written(answering, form, body)
            finally:
                generator.release(answering)
        return web.Response(body=answer, content_type="application/json")

    def _read(self, data: bytes, headers: Mapping[str, str]) -> tuple[EmbeddingsBody, Call]:
        parser, card = self._generator.parser, self._generator.served.card
        refuse_shape(data, parser.config, chat=False)
        body, form = decode(_decoder, data, parser.config), card.embedding
        check_model(body.model, card)
        if form.refused:
            raise RequestError(f"This model has no embeddings: {form.refused}.", param="model")
        if body.dimensions is not None and body.dimensions > form.width:
            raise RequestError(
                f"dimensions is {body.dimensions}, but this model's embeddings have {form.width} numbers.",
                param="dimensions",
            )
        wishes = body.cohort or CohortOptions()
        traffic_class, slo, online = class_and_slo(wishes, headers, parser.config)
        return body, Call(
            chat=False,
            prompts=read_prompts(body.input, parser.config, card),
            messages=[],
            sampling=SamplingParams(max_tokens=0, temperature=0.0, pooling=form.pooling),
            max_tokens=0,
            max_tokens_field="input",
            min_tokens=0,
            n=1,
            seed=0,
            stop_strings=(),
            stop_token_ids=(),
            ignore_eos=True,
            traffic_class=traffic_class,
            slo=slo,
            priority=body.priority or 0,
            online=online,
            if_late=if_late_of(wishes, headers, slo),
            add_special_tokens=body.add_special_tokens is not False,
            keeps_tokens=body.truncate_prompt_tokens,
            adapter=card.adapter_of(body.model),
        )


async def _written(answering: Answering, form: EmbeddingForm, body: EmbeddingsBody) -> bytes:
    """Return the answer as JSON, of which one vector is written at a time."""
    data: list[msgspec.Raw] = []
    for index, entry in enumerate(answering.generation.entries):
        assert entry.pooled is not None, f"{entry} has ended without states"
        numbers = vector(entry.pooled, form, body.dimensions)
        base64_wanted = body.encoding_format == "base64"
        shown = base64.b64encode(numbers.tobytes()).decode() if base64_wanted else numbers.tolist()
        data.append(msgspec.Raw(_encode(EmbeddingObject(index, shown))))
        entry.pooled = None
        await asyncio.sleep(0)
    used, extras = answering.usage(), answering.extras(range(len(data)))
    usage = EmbeddingUsage(used.prompt_tokens, used.prompt_tokens, used.prompt_tokens_details)
    return _encode({"object": "list", "data": data, "model": answering.model, "usage": usage, "cohort": extras})


def vector(states: PooledStates, form: EmbeddingForm, dimensions: int | None) -> npt.NDArray[np.float32]:
    """Return an embedding [dimensions]: the states' mean, its first numbers, of length 1 if the model's are."""
    mean = np.frombuffer(states.state, "<f4")[:dimensions] / states.count
    if form.normalised:
        mean /= max(float(np.linalg.norm(mean)), 1e-12)
    return mean.astype("<f4")


@contextmanager
def _named_input() -> Iterator[None]:
    """Say `input` where a completion's error says `prompt`."""
    try:
        yield
    except RequestError as error:
        if error.param is not None and error.param.startswith("prompt"):
            error.param = "input" + error.param.removeprefix("prompt")
            error.message = error.message.replace("prompt", "input")
        raise
