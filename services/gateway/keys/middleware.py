"""Around every handler: the request's id, foreign pages, API keys, and every error as JSON in its API's shape.

Called by aiohttp for each HTTP request. Clients see no stack trace: a defect is logged and becomes a bare 500.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cohort.common.errors import ConfigError, RequestError
from cohort.common.http.browsers import BrowserGuard
from cohort.services.gateway.http.error_shapes import retry_after, shaped_error
from cohort.services.gateway.keys.keyring import Key, Keyring

REQUEST_ID_HEADER = "x-request-id"
HTTP_ID = web.RequestKey("http_id", str)
OWNER = web.RequestKey("owner", str)
"""Owner whose files and batches a request sees: that of its API key (`Key.owner`); "" where no keys are required."""
KEY = web.RequestKey("key", Key)
"""API key of a request, where keys are required."""
MAX_ID_CHARACTERS = 256
_OUTSIDE_V1 = frozenset(("/tokenize", "/detokenize"))
"""Paths outside of /v1 that need a key: vLLM's clients look for them there."""

_encode = msgspec.json.Encoder().encode


def resolve_keys(configured: Sequence[str]) -> tuple[str, ...]:
    """Resolve `env:NAME` entries from the environment. Raises `ConfigError` naming what is missing."""
    keys = []
    for index, entry in enumerate(configured):
        name = entry.removeprefix("env:")
        key = os.environ.get(name, "") if name != entry else entry
        if not key:
            what = f"the environment variable {name} is not set" if name != entry else "is empty"
            raise ConfigError(f"gateway.api_keys[{index}]: {what}")
        keys.append(key)
    return tuple(keys)


def error_response(error: RequestError, path: str) -> web.Response:
    body = _encode(shaped_error(error, path))
    response = web.Response(status=error.status, body=body, content_type="application/json")
    if seconds := retry_after(error):
        response.headers["Retry-After"] = seconds
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def answer_everything(log: structlog.stdlib.BoundLogger) -> Middleware:
    """Return the outermost middleware, which names the request and turns every exception into an answer."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        http_id = request[HTTP_ID] = _http_id(request)
        with structlog.contextvars.bound_contextvars(request_id=http_id):  # in each line of the log
            try:
                response = await handler(request)
            except RequestError as error:
                response = error_response(error, request.path)
            except web.HTTPException as error:
                response = error_response(_from_http(error, request), request.path)
                if allow := error.headers.get("Allow"):
                    response.headers["Allow"] = allow
            except ConnectionError:
                raise  # the client is gone; aiohttp cleans up
            except Exception:
                log.exception("request failed unexpectedly", path=request.path)
                response = error_response(
                    RequestError("The server failed to answer this request.", status=500, type_="server_error"),
                    request.path,
                )
        if not response.prepared:
            response.headers[REQUEST_ID_HEADER] = http_id
        return response

    return middleware


def refuse_foreign_pages(guard: BrowserGuard) -> Middleware:
    """Return a middleware that answers 403 to other sites' pages in a browser and to foreign host names."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = guard.refusal(request.method, request.headers)
        if refusal is not None:
            raise RequestError(refusal, status=403, type_="permission_error")
        return await handler(request)

    return middleware


def require_key(keyring: Keyring) -> Middleware:
    """Return a middleware that requires a bearer token under /v1 and on paths of like cost, where keys are required."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[OWNER] = ""
        if keyring.required and (request.path.startswith("/v1") or request.path in _OUTSIDE_V1):
            scheme, _, token = _credentials(request).partition(" ")
            key = keyring.find(token.strip())
            if scheme.lower() != "bearer" or key is None:
                raise RequestError(
                    "You didn't provide an API key. Send it as a header: 'Authorization: Bearer YOUR_KEY'."
                    if not token
                    else "Incorrect API key provided.",
                    status=401,
                )
            request[OWNER], request[KEY] = key.owner, key
        return await handler(request)

    return middleware


def _credentials(request: web.Request) -> str:
    """Return the credentials as a bearer header; clients of Anthropic's API send the key as `x-api-key`."""
    given = request.headers.get("Authorization")
    if given is None and (key := request.headers.get("x-api-key")) is not None:
        return f"Bearer {key}"
    return given or ""


def _http_id(request: web.Request) -> str:
    """Return the client's own id, or a new one if it has none or it cannot be sent back."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    if given and len(given) <= MAX_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(16)


def _served(request: web.Request) -> str:
    """Return a sentence on what is served by this method."""
    routes = (route for route in request.app.router.routes() if route.method == request.method)
    paths = sorted({route.resource.canonical for route in routes if route.resource is not None})
    named = [path for path in paths if path.startswith("/v1/")]
    return f"{request.method} is served at {', '.join(named)}; " if named else ""


def _from_http(error: web.HTTPException, request: web.Request) -> RequestError:
    match error.status:
        case 404:
            there = f"There is no {request.method} {request.path} here."
            return RequestError(f"{there} {_served(request)}/openapi.json lists all.", status=404)
        case 405:
            return RequestError(f"{request.path} does not allow {request.method}.", status=405)
        case 413:
            limit = getattr(error, "max_size", None) or request.client_max_size
            return RequestError(f"The body is larger than {int(limit)} bytes.", status=413)
        case status:
            return RequestError(error.text or error.reason, status=status)
