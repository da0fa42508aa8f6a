"""Probes of monitors and clients: health, readiness, version, metrics, models.

Called by aiohttp. `/health` says that the process lives; `/ready` that a request could be served now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

import cohort
from cohort.common.errors import RequestError
from cohort.common.hub.model_source import shown_name
from cohort.common.process.metrics import CONTENT_TYPE
from cohort.common.types import EngineFacts
from cohort.services.gateway.http.service_headers import printable
from cohort.services.gateway.requests.model_card import ModelCard

_encode = msgspec.json.Encoder().encode


class Health(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reason: str | UnsetType = UNSET


class Version(msgspec.Struct, frozen=True):
    """`engines`: on what the workers compute, each kind once; empty until the manager has named one."""

    version: str
    preset: str
    model: str
    engines: Sequence[EngineFacts]


class ModelObject(msgspec.Struct, frozen=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "cohort"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelObject]
    object: Literal["list"] = "list"


class Probes:
    def __init__(
        self,
        *,
        card: ModelCard,
        preset: str,
        created: int,
        exposition: Callable[[Mapping[str, str]], bytes],
        not_ready_because: Callable[[], str | None],
        max_model_len: Callable[[], int],
        engines: Callable[[], Sequence[EngineFacts]] = tuple,
    ) -> None:
        self._card = card
        self._preset = preset
        self._created = created
        self._exposition = exposition
        self._not_ready_because = not_ready_because
        self._max_model_len = max_model_len
        self._engines = engines

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.model),  # a name may have slashes
        ]

    async def health(self, _: web.Request) -> web.Response:
        return _json(Health())

    async def ready(self, _: web.Request) -> web.Response:
        reason = self._not_ready_because()
        if reason is None:
            return _json(Readiness(True))
        return _json(Readiness(False, reason), status=503)

    async def version(self, _: web.Request) -> web.Response:
        return _json(Version(cohort.__version__, self._preset, self._card.name, self._engines()))

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._exposition(request.headers), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, _: web.Request) -> web.Response:
        return _json(ModelList([self._model(), *map(self._model, self._card.adapters)]))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._card.names and f"/{name}" not in self._card.names:
            raise RequestError(
                f"The model `{printable(name)}` does not exist; this server serves {self._card.listed}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return _json(self._model(self._card.adapter_of(name)))

    def _model(self, adapter: str = "") -> ModelObject:
        """Return the base model, or one of its adapters."""
        card = self._card
        return ModelObject(
            id=adapter or card.name,
            created=self._created,
            root=shown_name(card.adapters.get(adapter, card.path)),  # where the folder lies stays private
            max_model_len=self._max_model_len(),
            parent=card.name if adapter else None,
        )


def _json(body: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=status, content_type="application/json")
