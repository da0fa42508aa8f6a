"""A POST body and its headers to a typed `Call`, or a `RequestError` that names the parameter.

Pure: called by each API before tokenising. A field is honoured, tolerated (`bodies.py`) or refused with a clear 400.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.common.types import IfLate, SamplingParams, Slo, TrafficClass
from cohort.services.gateway import bounds
from cohort.services.gateway.http.bodies import (
    LEAST_MS,
    MOST_MS,
    ChatBody,
    CohortOptions,
    CompletionBody,
    GeneratingBody,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
)
from cohort.services.gateway.http.ignored_fields import note, without_unknown
from cohort.services.gateway.http.request_bodies import refuse_shape
from cohort.services.gateway.http.service_headers import (
    CLASS_HEADER,
    IF_LATE_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
    printable,
)
from cohort.services.gateway.requests.formats import AnswerFormat
from cohort.services.gateway.requests.model_card import ModelCard, Served
from cohort.services.gateway.requests.prompt_field import prompts
from cohort.services.gateway.requests.tools import (
    ToolUse,
    bound_spec,
    effort_switch,
    for_template,
    read_calls,
    tool_use,
    with_tools,
)
from cohort.services.gateway.text.grammar_process import GrammarKind, GrammarSpec

# OpenAI's default for completions; chat completions may use what the context leaves.
COMPLETION_MAX_TOKENS = 16
# Below this a division by the temperature overflows; the distribution is the greedy one long before.
GREEDY_BELOW = 1e-5
# A few milliseconds of parsing at most; a thread parses longer bodies.
PARSE_AT_ONCE_BYTES = 65_536


class Call(msgspec.Struct, frozen=True):
    """Parsed request. `sampling` lacks only max_tokens, seed and end tokens, which need the tokenised prompt.
    `max_tokens` None: what the context leaves."""

    chat: bool
    prompts: tuple[str | list[int], ...]
    messages: list[dict[str, Any]]
    sampling: SamplingParams
    max_tokens: int | None
    max_tokens_field: str
    min_tokens: int
    n: int
    seed: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    traffic_class: TrafficClass
    slo: Slo
    priority: int
    online: bool
    if_late: IfLate = ""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    """Whether the answer repeats the prompt, with its log-probabilities if there are any."""
    shows_logprobs: bool = False
    """Whether the client gets `sampling`'s log-probabilities; else they only rank choices."""
    returned_choices: int = 1
    """Number of the likeliest of each prompt's `n` choices that the client gets."""
    prompt_logprobs: int = -1
    """Number of log-probabilities for each prompt token, beside the answer; as `SamplingParams.logprobs`."""
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continues: bool = False
    """Whether the answer continues a chat's last message."""
    includes_stop: bool = False
    """Whether the answer ends with its stop string."""
    keeps_tokens: int | None = None
    """Number of a prompt's last tokens that are kept; -1 = as many as leave room for the answer."""
    template_variables: Mapping[str, Any] = {}
    grammar_spec: GrammarSpec | None = None
    """The grammar that the answer is bound to, as the client wrote it."""
    tools: ToolUse | None = None
    adapter: str = ""
    """The LoRA adapter that it names as its model."""
    truncates: bool = False
    """Whether a chat beyond the context loses its oldest turns instead of being refused (400)."""

    @property
    def scores_echo(self) -> bool:
        return self.echo and self.shows_logprobs

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_scores >= 0

    @property
    def prompt_scores(self) -> int:
        """-1 = the prompt is not scored, k = with the k likeliest tokens at each of its places."""
        return self.sampling.logprobs if self.scores_echo else self.prompt_logprobs

    @property
    def choices(self) -> int:
        return self.n * (1 if self.chat else len(self.prompts))


ROLES = ("system", "developer", "user", "assistant", "tool")
_MEDIA = {"image": "images", "audio": "sound", "video": "videos", "file": "files", "document": "documents"}
"""Names of what cannot be read, by a word in its type."""
_UNKNOWN_FIELD = "Object contains unknown field `"
_FIELD_MARKERS = {_UNKNOWN_FIELD: "unknown_parameter", "Object missing required field `": "missing_required_parameter"}
"""Beginnings of the decoder's messages that name a field, each with OpenAI's code."""

B = TypeVar("B")
T = TypeVar("T")
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)


class RequestParser:
    def __init__(self, config: GatewayConfig, served: Served) -> None:
        self.config = config
        self.served = served

    async def read(self, data: bytes, parse: Callable[[bytes], T]) -> T:
        """Parse a body, in a thread if it is long. Raises `RequestError`."""
        if len(data) <= PARSE_AT_ONCE_BYTES:
            return parse(data)
        return await asyncio.to_thread(parse, data)

    def completion(self, data: bytes, headers: Mapping[str, str]) -> Call:
        return parse_completion(data, headers, self.config, self.served.card)

    def chat(self, data: bytes, headers: Mapping[str, str]) -> Call:
        return parse_chat(data, headers, self.config, self.served.card, self.served.tool_format)

    def chat_call(self, body: ChatBody, headers: Mapping[str, str], switches: Sequence[str]) -> Call:
        """Parse a chat that was converted from another API's body. `switches`: that body's fields about reasoning,
        noted as ignored where the model has none to switch."""
        return chat_call(body, headers, self.config, self.served.card, self.served.tool_format, switches)


def parse_completion(data: bytes, headers: Mapping[str, str], config: GatewayConfig, card: ModelCard) -> Call:
    refuse_shape(data, config, chat=False)
    body = decode(_completion_decoder, data, config)
    if body.suffix:
        raise _refused("suffix", "text insertion is not supported")
    max_tokens = _max_tokens(body.max_tokens, body.max_completion_tokens)
    own = _Own(
        chat=False,
        prompts=read_prompts(body.prompt, config, card),
        max_tokens=COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=-1 if body.logprobs is None else body.logprobs,
        echo=bool(body.echo),
        add_special_tokens=body.add_special_tokens is not False,
    )
    return _call(body, headers, config, card, own)


def parse_chat(
    data: bytes,
    headers: Mapping[str, str],
    config: GatewayConfig,
    card: ModelCard,
    tool_format: AnswerFormat | None = None,
) -> Call:
    refuse_shape(data, config, chat=True)
    return chat_call(decode(_chat_decoder, data, config), headers, config, card, tool_format)


def chat_call(
    body: ChatBody,
    headers: Mapping[str, str],
    config: GatewayConfig,
    card: ModelCard,
    tool_format: AnswerFormat | None,
    switches: Sequence[str] | None = None,
) -> Call:
    """Parse a chat's body. `tool_format`: how the model writes answers; None without a template. `switches` as in
    `Parser.chat_call`; None: the body's own. Raises `RequestError`."""
    messages = read_messages(body.messages)
    _refuse_unsupported_chat_options(body)
    if switches is None:
        switches = () if body.reasoning_effort in (None, "none") else ("reasoning_effort",)
    if switches and (tool_format is None or not tool_format.reasons):
        for name in switches:
            note(name)
    if body.continue_final_message:
        _check_continued(messages[-1], body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    max_tokens = _max_tokens(body.max_tokens, body.max_completion_tokens)
    if max_tokens == 0:
        raise RequestError("max_tokens must be at least 1 for a chat completion.", param="max_tokens")
    variables = body.chat_template_kwargs or {}
    for reserved in ("messages", "add_generation_prompt", "tools", "documents"):
        if reserved in variables:
            raise RequestError(f"chat_template_kwargs may not set {reserved!r}.", param="chat_template_kwargs")
    answer = grammar_spec_of(body)
    tools = tool_use(body, tool_format, answer)
    messages, of_tools = with_tools(for_template(messages, tool_format), tools.prompt if tools else (), tool_format)
    variables = {**effort_switch(body.reasoning_effort, tool_format), **variables, **of_tools}
    if answer is not None and tool_format is not None and tool_format.body == "channels":
        answer = bound_spec(tool_format, (), parallel=False, answer=answer)  # which stands in a channel
    own = _Own(
        chat=True,
        messages=messages,
        tools=tools,
        answer=answer,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continues=bool(body.continue_final_message),
        template_variables=variables,
    )
    return _call(body, headers, config, card, own)


def _check_continued(last: Mapping[str, Any], body: ChatBody) -> None:
    if body.add_generation_prompt:
        raise _refused("continue_final_message", "add_generation_prompt begins an answer of its own")
    if last.get("tool_calls"):
        raise _refused("continue_final_message", "the last message ends with calls, which have no more text")


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for the chat template. Raises `RequestError`."""
    if len(messages) > (most := bounds.BOUNDS.messages):
        raise RequestError(f"The chat has {len(messages)} messages, but at most {most} are read.", param="messages")
    return [_message(index, message) for index, message in enumerate(messages)]


def check_model(model: str | None, card: ModelCard) -> None:
    if model is not None and model != card.name and model not in card.names:
        raise RequestError(
            f"The model `{printable(model)}` does not exist; this server serves {card.listed}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def decode(decoder: msgspec.json.Decoder[B], data: bytes, config: GatewayConfig) -> B:
    """Decode a body. What is unknown in it is left out and noted, or refused. Raises `RequestError`."""
    try:
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN_FIELD):
                raise
            unknown: dict[str, str] = {}
            known = without_unknown(data, cast("type[msgspec.Struct]", decoder.type), unknown)
            if config.unknown_fields == "refuse":
                raise _refused_field(str(error), next(iter(unknown.values()), "")) from error
            decoded = decoder.decode(known)
            for name, meant in unknown.items():
                note(name, meant)
            return decoded
    except msgspec.ValidationError as error:
        raise _refused_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _no_json(error) from error
    except RecursionError as error:
        raise RequestError("The body is nested too deeply.") from error


def _refused_field(problem: str, meant: str = "") -> RequestError:
    """Return the error of a body that has not the form of its struct; `problem` is the decoder's."""
    text, _, path = problem.partition(" - at `")  # "$.messages[0]`", or "key` in `$.metadata`"
    param, code = path.rstrip("`").rpartition("$")[2].lstrip("."), None
    for marker, its_code in _FIELD_MARKERS.items():
        if text.startswith(marker):
            name, code = text[len(marker) :].rstrip("`"), its_code
            param = f"{param}.{name}" if param else name
    hint = f"; did you mean `{meant}`?" if meant else ""
    return RequestError(f"{param}: {text}{hint}" if param else text, param=param or None, code=code)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Own:
    """Fields that each endpoint reads in its own way; as in `Call`."""

    chat: bool
    max_tokens: int | None
    logprobs: int
    prompts: tuple[str | list[int], ...] = ()
    messages: list[dict[str, Any]] = field(default_factory=list)
    echo: bool = False
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continues: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolUse | None = None
    answer: GrammarSpec | None = None
    """Form of the answer, as its model writes it."""


def _call(
    body: CompletionBody | ChatBody, headers: Mapping[str, str], config: GatewayConfig, card: ModelCard, own: _Own
) -> Call:
    check_model(body.model, card)
    n = returned = body.n or 1
    if body.best_of is not None and body.best_of != n:
        n = _best_of(body.best_of, n, chat=own.chat, stream=bool(body.stream))
    if n > 1 and n > (most := min(bounds.BOUNDS.choices, config.own_waiting_requests // max(1, len(own.prompts)))):
        name = "n" if n == returned else "best_of"
        raise RequestError(f"{name} is {n}, but at most {most} choices per prompt are served here.", param=name)
    if body.use_beam_search:
        raise _refused("use_beam_search", "beam search is not supported")
    min_tokens = body.min_tokens or 0
    if own.max_tokens is not None and min_tokens > own.max_tokens:
        raise RequestError(f"min_tokens ({min_tokens}) exceeds max_tokens ({own.max_tokens}).", param="min_tokens")
    if isinstance(body.metadata, dict) and len(body.metadata) > bounds.BOUNDS.metadata_keys:
        raise RequestError(
            f"metadata has {len(body.metadata)} keys, but at most {bounds.BOUNDS.metadata_keys} are taken.",
            param="metadata",
        )
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true.", param="stream_options")
    prompt_logprobs = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    if prompt_logprobs >= 0 and body.stream:
        raise _refused("prompt_logprobs", "they come with a whole answer, not with a stream")
    if prompt_logprobs >= 0 and own.echo and own.logprobs >= 0:
        raise _refused("prompt_logprobs", "echo with logprobs has the prompt's own already")
    wishes = body.cohort or CohortOptions()
    traffic_class, slo, online = class_and_slo(wishes, headers, config)
    wanted = _grammar_spec(body, own)
    return Call(
        chat=own.chat,
        prompts=own.prompts,
        messages=own.messages,
        # Choices are ranked by what the model thinks of their tokens.
        sampling=_sampling(
            body, card, min_tokens=min_tokens, logprobs=own.logprobs if n == returned else max(0, own.logprobs)
        ),
        shows_logprobs=own.logprobs >= 0,
        returned_choices=returned,
        max_tokens=own.max_tokens,
        max_tokens_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        min_tokens=min_tokens,
        n=n,
        seed=body.seed,
        stop_strings=_stop_strings(body.stop),
        stop_token_ids=tuple(card.known_tokens(body.stop_token_ids or [], "stop_token_ids")),
        ignore_eos=bool(body.ignore_eos),
        traffic_class=traffic_class,
        slo=slo,
        priority=body.priority or 0,
        online=online,
        if_late=if_late_of(wishes, headers, slo),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        echo=own.echo,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=bool(body.return_token_ids),
        add_special_tokens=own.add_special_tokens,
        add_generation_prompt=own.add_generation_prompt,
        continues=own.continues,
        includes_stop=bool(body.include_stop_str_in_output),
        keeps_tokens=body.truncate_prompt_tokens,
        template_variables=own.template_variables,
        grammar_spec=wanted,
        tools=own.tools,
        adapter=card.adapter_of(body.model),
    )


def _best_of(best_of: int, n: int, *, chat: bool, stream: bool) -> int:
    """Return the number of choices to generate. Raises `RequestError`."""
    if chat:
        raise _refused("best_of", "the answers to a chat are not ranked")
    if best_of < n:
        raise _refused("best_of", f"of {best_of} choices there are no {n} best")
    if stream:
        raise _refused("best_of", "which choice is the best is known when all are whole, not in a stream")
    return best_of


def _grammar_spec(body: CompletionBody | ChatBody, own: _Own) -> GrammarSpec | None:
    tools = own.tools
    if tools is None or tools.grammar_spec is None:
        return own.answer if own.chat else grammar_spec_of(body)
    if body.ignore_eos:
        raise _refused("ignore_eos", "an answer that must be calls ends with them")
    return tools.grammar_spec


def _sampling(body: CompletionBody | ChatBody, card: ModelCard, *, min_tokens: int, logprobs: int) -> SamplingParams:
    """Return the sampling parameters. The model's defaults fill in what the request does not name."""
    defaults = card.sampling
    temperature = defaults.temperature if body.temperature is None else body.temperature
    repetition = defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
    return SamplingParams(
        max_tokens=0,
        min_tokens=min_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        repetition_penalty=repetition,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias, card),
        logprobs=logprobs,
    )


def _max_tokens(old_name: int | None, new_name: int | None) -> int | None:
    if old_name is not None and new_name is not None and old_name != new_name:
        raise RequestError(
            f"max_tokens ({old_name}) and max_completion_tokens ({new_name}) contradict each other.",
            param="max_completion_tokens",
        )
    return old_name if new_name is None else new_name


def read_prompts(field: msgspec.Raw, config: GatewayConfig, card: ModelCard) -> tuple[str | list[int], ...]:
    """Return the prompts of a completion or the inputs of embeddings. Raises `RequestError`."""
    try:
        return prompts(bytes(field), config, card)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _no_json(error) from error


def _no_json(error: Exception) -> RequestError:
    return RequestError(f"The body is not valid JSON: {error}")


def class_and_slo(
    options: CohortOptions, headers: Mapping[str, str], config: GatewayConfig
) -> tuple[TrafficClass, Slo, bool]:
    """Return class and SLO; headers override the body, as proxies set them. Admission adds default targets."""
    traffic_class: TrafficClass = options.traffic_class or config.default_class
    named = headers.get(CLASS_HEADER)
    if named is not None:
        match named.strip().lower():
            case "rt":
                traffic_class = "rt"
            case "be":
                traffic_class = "be"
            case other:
                raise RequestError(
                    f"{CLASS_HEADER}: {printable(other)!r} is neither 'rt' nor 'be'.", param=CLASS_HEADER
                )
    ttft_ms = _milliseconds(headers, TTFT_HEADER) or options.ttft_slo_ms
    tpot_ms = _milliseconds(headers, TPOT_HEADER) or options.tpot_slo_ms
    slo = Slo(
        ttft_s=ttft_ms / 1000 if ttft_ms else 0.0,
        tpot_s=tpot_ms / 1000 if tpot_ms else 0.0,
        deadline_s=options.deadline_ms / 1000 if options.deadline_ms else 0.0,
    )
    return traffic_class, slo, options.online is not False


def if_late_of(options: CohortOptions, headers: Mapping[str, str], slo: Slo) -> IfLate:
    """Return `if_late`. A client with a TTFT SLO and no choice gets an error at once rather than a late answer."""
    named = headers.get(IF_LATE_HEADER)
    if named is None:
        return options.if_late or ("refuse" if slo.ttft_s else "")
    match named.strip().lower():
        case "refuse" | "best_effort" | "serve" as outcome:
            return outcome
        case other:
            raise RequestError(
                f"{IF_LATE_HEADER}: {printable(other)!r} is none of 'refuse', 'best_effort' and 'serve'.",
                param=IF_LATE_HEADER,
            )


def _milliseconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not LEAST_MS <= value <= MOST_MS:  # also false for NaN
        raise RequestError(f"{name}: {printable(text)!r} is no number of milliseconds.", param=name)
    return value


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop or []))
    longest, characters = max(map(len, stops), default=0), sum(map(len, stops))
    if longest > (most := bounds.BOUNDS.stop_length):
        raise RequestError(
            f"stop: a stop string has {longest} characters, but at most {most} are watched for.", param="stop"
        )
    if characters > (most := bounds.BOUNDS.stop_characters):
        raise RequestError(
            f"stop: the stop strings have {characters} characters together, but at most {most} are watched for.",
            param="stop",
        )
    return stops


def _logit_bias(bias: Mapping[str, float] | None, card: ModelCard) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > (most := bounds.BOUNDS.logit_biases):
        raise RequestError(f"logit_bias has {len(bias)} entries, but at most {most} are taken.", param="logit_bias")
    if bad := next((key for key in bias if not (key.isascii() and key.isdecimal() and len(key) < 20)), None):
        raise RequestError(f"logit_bias: {printable(bad)!r} is no token id.", param="logit_bias")
    if "" in bias:
        raise RequestError("logit_bias: '' is no token id.", param="logit_bias")
    ids = [int(key) for key in bias]
    card.known_tokens(ids, "logit_bias")
    return dict(zip(ids, bias.values(), strict=True))


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return one chat message with its content as text. The template may use unknown keys."""
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is missing.", param=f"{where}.role", code="missing_required_parameter")
    if role not in ROLES:
        raise RequestError(f"{where}.role: {printable(role)!r} is none of {', '.join(ROLES)}.", param=f"{where}.role")
    for key in ("function_call", "audio"):
        if message.get(key):
            raise _refused(f"{where}.{key}", "not supported in messages")
    if message.get("tool_calls"):
        message = {**message, "tool_calls": read_calls(message["tool_calls"], f"{where}.tool_calls")}
    elif "tool_calls" in message:  # templates ask whether the key is there
        message = {key: value for key, value in message.items() if key != "tool_calls"}
    call_id = message.get("tool_call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise RequestError(f"{where}.tool_call_id must be a text.", param=f"{where}.tool_call_id")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""  # clients send back an empty answer this way, and one that was calls alone
    if isinstance(content, list):
        content = "\n".join(_text_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError(f"{where}.content must be a text or a list of text parts.", param=f"{where}.content")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"{where}.name must be a text.", param=f"{where}.name")
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise RequestError(f"{where}.reasoning_content must be a text.", param=f"{where}.reasoning_content")
    return {**message, "content": content}


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise no_text(where, kind if isinstance(kind, str) else "none")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a text.", param=f"{where}.text")
    return text


def no_text(where: str, kind: str) -> RequestError:
    """Return the error of a part of a message that is no text."""
    what = next((name for mark, name in _MEDIA.items() if mark in kind), "")
    why = f"{what} cannot be read here, as the model is served for text alone; " if what else ""
    return RequestError(
        f"{where}: {why}only parts of type 'text' can be answered, this one's is {printable(kind)!r}.", param=where
    )


def _refuse_unsupported_chat_options(body: ChatBody) -> None:
    if body.functions:
        raise _refused("functions", "not supported; its successor tools is")
    if body.function_call not in (None, "none", "auto"):
        raise _refused("function_call", "not supported; its successor tool_choice is")
    if body.modalities not in (None, [], ["text"]):
        raise _refused("modalities", "only text is produced")
    for name in ("audio", "web_search_options"):
        if getattr(body, name) is not None:
            raise _refused(name, "not supported")
    if body.verbosity is not None:
        note("verbosity")


def _refused(param: str, reason: str) -> RequestError:
    return RequestError(f"{param}: {reason}.", param=param)


def grammar_spec_of(body: GeneratingBody) -> GrammarSpec | None:
    """Return the structure asked for. Raises `RequestError`, also for more than one."""
    found = [*_of_response_format(body.response_format), *_of_structured_outputs(body.structured_outputs)]
    found += _of_parts("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if len(found) > 1:
        raise RequestError(
            f"{found[1].param}: the answer is bound by {found[0].param} already; name one of them.",
            param=found[1].param,
        )
    if found and body.ignore_eos:
        raise RequestError(
            f"ignore_eos: an answer that is bound ({found[0].param}) ends where its grammar does.", param="ignore_eos"
        )
    return found[0] if found else None


def _of_response_format(spec: ResponseFormat | None) -> list[GrammarSpec]:
    if spec is None:
        return []
    match spec.type:
        case "text":
            return []
        case "json_object":
            return [GrammarSpec("json_schema", {"type": "object"}, "response_format")]
        case "json_schema":
            if spec.json_schema is None or spec.json_schema.schema is None:
                raise RequestError(
                    "response_format.json_schema.schema is missing.", param="response_format.json_schema.schema"
                )
            closes = spec.json_schema.strict is not False
            return [_schema(spec.json_schema.schema, "response_format.json_schema.schema", closes=closes)]
        case other:
            raise RequestError(
                f"response_format.type: {other[:100]!r} is none of 'text', 'json_object' and 'json_schema'.",
                param="response_format.type",
            )


def _of_structured_outputs(spec: StructuredOutputs | None) -> list[GrammarSpec]:
    if spec is None:
        return []
    for name in ("structural_tag", "whitespace_pattern"):
        if getattr(spec, name) is not None:
            raise RequestError(f"structured_outputs.{name}: not supported.", param=f"structured_outputs.{name}")
    found = _of_parts("structured_outputs.", spec.json, spec.regex, spec.choice, spec.grammar)
    if spec.json_object:
        found.append(GrammarSpec("json_schema", {"type": "object"}, "structured_outputs.json_object"))
    if spec.disable_any_whitespace:
        found = [_without_white_space(each) for each in found]
    return found


def _of_parts(
    prefix: str, schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[GrammarSpec]:
    found = [] if schema is None else [_schema(schema, f"{prefix}json")]
    parts: tuple[tuple[GrammarKind, Any], ...] = (("regex", regex), ("choice", choice), ("grammar", grammar))
    return found + [GrammarSpec(kind, content, f"{prefix}{kind}") for kind, content in parts if content is not None]


def _schema(schema: Any, param: str, *, closes: bool = True) -> GrammarSpec:
    """Read a schema, or its text, as vLLM does."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RequestError(f"{param}: the text is not valid JSON: {error}", param=param) from error
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{param} must be a JSON schema: an object, true or false.", param=param)
    return GrammarSpec("json_schema" if closes else "open_json_schema", schema, param)


def _without_white_space(wanted: GrammarSpec) -> GrammarSpec:
    if wanted.kind != "json_schema" or not isinstance(wanted.content, dict):
        return wanted
    compact = {"whitespace_flexible": False}
    return GrammarSpec("json_schema", {"x-guidance": compact, **wanted.content}, wanted.param)
