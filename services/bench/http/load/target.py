"""The server at a URL, and which wishes it accepts: model, context, token ids, `ignore_eos`, usage in streams.

Called by `measuring` before the first run. `discover` reads `/v1/models`; `negotiate` sends tiny requests until one is
accepted, giving up the wishes a server refuses one by one, so that the same benchmark drives strict servers too.
Parameters given up are in the `Dialect`, which the report states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from cohort.common import paths
from cohort.common.config import load_config
from cohort.common.errors import CohortError, ConfigError
from cohort.common.hub.model_source import shown_name
from cohort.services.bench.http.load.client import HttpStreamClient, PreparedRequest, RequestRecord, error_message
from cohort.services.bench.http.load.prompts import PromptFactory
from cohort.services.bench.http.load.workload import RequestPlan

PromptFormat = Literal["ids", "text"]
Endpoint = Literal["completions", "chat"]

PROBE_PLAN = RequestPlan(index=0, due_s=None, prompt_tokens=8, output_tokens=2)
"""The request of a negotiation."""
_REFUSED_STATUS = ("http_400", "http_404", "http_405", "http_415", "http_422", "http_501")
"""Answers that may mean 'not in this form'; anything else ends the negotiation."""


class TargetError(CohortError):
    """The server cannot be benchmarked: unreachable, unknown model, or it refuses every form of request."""


@dataclass(frozen=True, slots=True)
class Target:
    """`root` is where a tokenizer may be found, or the name of its folder, "" if the server does not say;
    `max_model_len` 0 likewise."""

    name: str
    base_url: str
    model: str
    root: str
    max_model_len: int

    @property
    def local_tokenizer(self) -> Path | None:
        """Return the folder that the server names, or that a pipeline of ours at this port of this machine serves."""
        for place in (self.root, self.model):
            if place and (Path(place) / "tokenizer.json").is_file():
                return Path(place)
        folder = _served_from(self.base_url)
        known = folder is not None and shown_name(folder) == self.root and (folder / "tokenizer.json").is_file()
        return folder if known else None


def _served_from(url: str) -> Path | None:
    """Return the model folder of the pipeline that this user runs at that port, from the configuration its processes
    read: our gateway does not tell where its files are."""
    parts = urlsplit(url)
    if parts.hostname not in ("localhost", "127.0.0.1", "::1") or parts.port is None:
        return None
    try:
        model = load_config([paths.run_dir(parts.port) / "resolved.yaml"]).model
    except ConfigError:
        return None
    return Path(model.path).expanduser().resolve() if model.path else paths.default_model_dir()


class Dialect(msgspec.Struct, frozen=True):
    endpoint: Endpoint
    prompt_format: PromptFormat
    ignore_eos: bool
    stream_usage: bool

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Preferences:
    """The user's wishes; None: the best that the server accepts."""

    endpoint: Endpoint | None
    prompt_format: PromptFormat | None
    ignore_eos: bool
    text_possible: bool


def base_url(url: str) -> str:
    """Return one form of `host:port`, `http://host:port/` and `http://host:port/v1`, which mean the same server."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def _authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def discover(
    session: aiohttp.ClientSession,
    name: str,
    url: str,
    model: str | None,
    timeout_s: float,
    *,
    api_key: str | None = None,
) -> Target:
    """Return the server's model; with several, `model` must choose. A server whose list does not work can still be
    measured when `model` is given: then nothing is known about its context."""
    base = base_url(url)
    try:
        # Not kept alive: some servers drop a connection after an error without saying so, and the first request met it.
        headers = {"Connection": "close", **_authorization(api_key)}
        async with asyncio.timeout(timeout_s), session.get(f"{base}/v1/models", headers=headers) as response:
            body = await response.read()
            if response.status != 200 and model is not None:
                return Target(name, base, model, "", 0)
            if response.status != 200:
                raise TargetError(f"{base}/v1/models answers {response.status}: {error_message(body)}; give --model")
    except TimeoutError as error:
        raise TargetError(f"{base}/v1/models did not answer within {timeout_s:g} s") from error
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        hint = "; does it serve https?" if isinstance(error, aiohttp.ServerDisconnectedError) else ""
        raise TargetError(f"{base} cannot be reached: {error}{hint}") from error
    try:
        listed = [entry for entry in msgspec.json.decode(body)["data"] if isinstance(entry, dict)]
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise TargetError(f"{base}/v1/models is not a list of models: {body[:100]!r}") from error
    if model is None:
        if len(listed) != 1:
            names = ", ".join(str(entry.get("id")) for entry in listed[:10]) or "none"
            raise TargetError(f"{base} serves {len(listed)} models ({names}); choose one with --model")
        model = str(listed[0].get("id"))
    entry = next((entry for entry in listed if entry.get("id") == model), {})
    max_model_len = entry.get("max_model_len")
    context = max_model_len if isinstance(max_model_len, int) else 0
    return Target(name, base, model, str(entry.get("root") or ""), context)


async def negotiate(
    session: aiohttp.ClientSession,
    target: Target,
    preferences: Preferences,
    prompts: PromptFactory,
    request: RequestBuilder,
    timeout_s: float,
) -> Dialect:
    refusals: list[str] = []
    for dialect in _dialects(preferences):
        client = HttpStreamClient(session, target.base_url + dialect.path, timeout_s)
        record = RequestRecord(PROBE_PLAN)
        await client.stream(request.build(target, dialect, prompts, PROBE_PLAN, "probe"), record, 0.0)
        if record.status == "completed" or record.error_kind == "empty":
            return dialect
        refusal = f"{dialect.path} with {dialect.prompt_format}: {record.error_kind}: {record.error_detail}"
        if record.error_kind not in _REFUSED_STATUS:
            raise TargetError(f"{target.base_url} fails the first request: {refusal}")
        refusals.append(refusal)
    if preferences.prompt_format is None and not preferences.text_possible:
        refusals.append("text was not tried: no tokenizer (give --tokenizer FOLDER)")
    raise TargetError(f"{target.base_url} refuses every form of request:\n  " + "\n  ".join(refusals))


def _dialects(preferences: Preferences) -> Iterator[Dialect]:
    """Yield dialects from all preferences to none. Ids only exist at /v1/completions."""
    forms: list[tuple[Endpoint, PromptFormat]] = [("completions", "ids"), ("completions", "text"), ("chat", "text")]
    for endpoint, prompt_format in forms:
        if preferences.endpoint not in (None, endpoint) or preferences.prompt_format not in (None, prompt_format):
            continue
        if prompt_format == "text" and not preferences.text_possible:
            continue
        for ignore_eos in (True, False) if preferences.ignore_eos else (False,):
            for stream_usage in (True, False):
                yield Dialect(endpoint, prompt_format, ignore_eos, stream_usage)


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Turns plans into bytes. `extra_body` goes into every request as it is and wins over what we set."""

    temperature: float = 0.0
    extra_body: Mapping[str, Any] | None = None
    api_key: str | None = None

    def build(
        self, target: Target, dialect: Dialect, prompts: PromptFactory, plan: RequestPlan, run_label: str
    ) -> PreparedRequest:
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": plan.output_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if dialect.stream_usage:
            body["stream_options"] = {"include_usage": True}
        if dialect.ignore_eos:
            body["ignore_eos"] = True
        if dialect.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompts.text(plan)}]
        else:
            body["prompt"] = prompts.token_ids(plan) if dialect.prompt_format == "ids" else prompts.text(plan)
        body.update(self.extra_body or {})
        headers = {
            "Content-Type": "application/json",
            "x-request-id": f"bench-{run_label}-{plan.index}",
            **_authorization(self.api_key),
        }
        if plan.traffic_class:
            headers["x-cohort-class"] = plan.traffic_class
        return PreparedRequest(plan, msgspec.json.encode(body), headers)


def check_context(target: Target, plans: tuple[RequestPlan, ...]) -> None:
    """Raise `ConfigError` for a workload that the server must refuse, before any time is spent."""
    if not target.max_model_len:
        return
    too_long = [plan for plan in plans if plan.prompt_tokens + plan.output_tokens > target.max_model_len]
    if too_long:
        longest = max(plan.prompt_tokens + plan.output_tokens for plan in too_long)
        raise ConfigError(
            f"{len(too_long)} of {len(plans)} requests are longer (up to {longest} tokens) than the "
            f"{target.max_model_len} tokens of context that {target.name} has; clip with --max-prompt and --max-output"
        )
