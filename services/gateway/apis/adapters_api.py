"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers: for an operator's key alone.

Called by aiohttp through `middleware.py`. Adds to and removes from `added_adapters.py`; asks no worker.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
import structlog
from aiohttp import web

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.services.gateway.http.request_bodies import RequestBodies, refuse_shape
from cohort.services.gateway.keys.middleware import KEY
from cohort.services.gateway.requests.added_adapters import AdapterTable
from cohort.services.gateway.requests.parsing import decode

B = TypeVar("B")
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter. `load_inplace`: instead of one that was added under this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # tolerated: the name says it


_load_decoder = msgspec.json.Decoder(LoadAdapterBody)
_unload_decoder = msgspec.json.Decoder(UnloadAdapterBody)


class AdaptersApi:
    def __init__(
        self, config: GatewayConfig, adapters: AdapterTable, bodies: RequestBodies, log: structlog.stdlib.BoundLogger
    ) -> None:
        self._config = config
        self._adapters = adapters
        self._bodies = bodies
        self._log = log

    def routes(self) -> list[web.RouteDef]:
        return [web.post(LOAD_PATH, self.load), web.post(UNLOAD_PATH, self.unload)]

    async def load(self, request: web.Request) -> web.Response:
        body = await self._read(request, _load_decoder)
        anew = bool(body.load_inplace)
        await asyncio.to_thread(self._adapters.add, body.lora_name, body.lora_path, anew=anew)
        return self._done(body.lora_name, "added")

    async def unload(self, request: web.Request) -> web.Response:
        body = await self._read(request, _unload_decoder)
        await asyncio.to_thread(self._adapters.remove, body.lora_name)
        return self._done(body.lora_name, "removed")

    async def _read(self, request: web.Request, decoder: msgspec.json.Decoder[B]) -> B:
        key = request.get(KEY)
        if key is None or not key.admin:
            why = "This server asks for no keys" if key is None else "This API key is no admin's"
            raise RequestError(
                f"{why}: adapters are an operator's (cohort keys add --admin).", status=403, type_="permission_error"
            )
        async with self._bodies.reading(request) as data:
            refuse_shape(data, self._config, chat=False)
            return decode(decoder, data, self._config)

    def _done(self, name: str, what: str) -> web.Response:
        self._log.info(f"LoRA adapter {what}", adapter=name)
        return web.Response(text=f"Success: LoRA adapter '{name}' {what} successfully.")
