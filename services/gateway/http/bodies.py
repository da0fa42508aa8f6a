"""The bodies of POST requests, field by field, as clients send them.

Types and ranges live here; rules on more than one field, the model or the configuration are in `parsing.py`.
Every field is in one of four groups: honoured; tolerated (documented below: it cannot change the answer); ignored, and
named in the answer's header; refused with a reason unless it has the value that asks for nothing. A key in none of them
is ignored and named, or refused (`gateway.unknown_fields`, `ignored_fields.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from cohort.common.types import TrafficClass

OutcomeIfLate = Literal["refuse", "best_effort", "serve"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
# Of an SLO, in the body or a header: one that is not 0 seconds, which would mean none.
LEAST_MS, MOST_MS = 1e-3, 1e9
Milliseconds = Annotated[float, msgspec.Meta(ge=LEAST_MS, le=MOST_MS)]
Signed64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, msgspec.Meta(min_length=1)]
# What is decoded by hand, as `/openapi.json` says it.
Prompt = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    "minItems": 1,
                },
            ]
        }
    ),
]
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Message = Annotated[
    dict[str, Any],
    msgspec.Meta(
        extra_json_schema={
            "properties": {
                "role": {"type": "string", "minLength": 1},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "items": {"anyOf": [{"type": "string"}, _TEXT_PART]}},
                        {"type": "null"},
                    ]
                },
                "name": {"type": ["string", "null"]},
                "tool_call_id": {"type": ["string", "null"]},
            },
            "required": ["role"],
        }
    ),
]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # tolerated: we add no padding to obfuscate chunk sizes


class CohortOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cohort's own part of a body: class, SLO, and what happens where no worker can keep its TTFT: an error at once,
    the answer as best-effort, or late. The x-cohort-… headers override it."""

    traffic_class: TrafficClass | None = msgspec.field(default=None, name="class")
    ttft_slo_ms: Milliseconds | None = None
    tpot_slo_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    if_late: OutcomeIfLate | None = None
    online: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`strict` false opens objects that say nothing of properties they do not name; an answer always keeps to its
    schema."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Structured outputs, as vLLM names them; `structural_tag` and `whitespace_pattern` are refused."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None  # tolerated: there is nothing to fall back to
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`strict` false opens objects that say nothing of properties they do not name; where calls are bound, they always
    keep to their schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Choice among some of the tools: the model sees no other."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], msgspec.Meta(min_length=1)]


class AllowedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


class GeneratingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Honoured.
    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    seed: Signed64 | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    n: AtLeastOne | None = None
    best_of: AtLeastOne | None = None  # of a chat: refused unless it is n
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cohort: CohortOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    # Tolerated: there is one library for grammars.
    guided_decoding_backend: str | None = None
    # Tolerated: they label or route a request at OpenAI and never change an answer.
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Refused unless they ask for nothing.
    use_beam_search: bool | None = None


class CompletionBody(GeneratingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Prompt  # `prompt_field.py` decodes it, one prompt at a time
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None  # refused


class ChatBody(GeneratingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions. Messages stay maps: their keys are the chat template's business."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Tolerated: a predicted output only saves time.
    prediction: Any = None
    # Refused unless they ask for nothing.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    # Ignored, and named in the answer's header.
    verbosity: str | None = None
