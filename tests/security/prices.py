"""What each field of each request costs: what it is charged to before anything of it is done, and what is refused.

`ROWS` has every field whose size or value makes us compute or hold something, `FREE` those that cost no more than their
own bytes, which count with the body. A number within a range, a choice of words or a struct around other fields costs
nothing by its type; an integer or a flag may be a count, so these are listed. `ROUTES` has what a call itself costs.

    python -m tests.security.prices --write    makes the table of docs/security.md from this one

A field is named by the struct that declares it (`CompletionBody.prompt`); what lies outside of bodies by its operation
(`createFile.file`, `listFiles.limit`, `getFile.{id}`). `test_prices.py` compares the table with what the API parses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec import inspect

from cohort.services.gateway.batches.batch_lines import MAX_CUSTOM_ID, _Line
from cohort.services.gateway.batches.batch_uploads import FIELD_BYTES
from cohort.services.gateway.bounds import BOUNDS
from cohort.services.gateway.http.bodies import MAX_LOGPROBS, MAX_STOP_STRINGS
from cohort.services.gateway.openapi_operations import OPERATIONS, Operation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
OPEN = "open"
"""Price or bound that does not exist yet. `test_prices.py` lists these, so that none is added."""


@dataclass(frozen=True)
class Row:
    """`fields`: `Struct: field field; Struct: field`. `bound` names those of `bounds.BOUNDS` in braces. `beyond`: the
    status, or what happens instead. `tested`: a test of it elsewhere, where no request shows it alone."""

    what: str
    fields: str
    price: str
    bound: str
    beyond: str
    tested: str = ""

    @property
    def places(self) -> list[str]:
        return places_of(self.fields)

    @property
    def bound_text(self) -> str:
        """The bound with its numbers."""
        figures = {name: f"{value:,}" if isinstance(value, int) else f"{value:g}" for name, value in _FIGURES.items()}
        return self.bound.format(**figures)


def places_of(fields: str) -> list[str]:
    groups = (group.partition(":") for group in fields.split(";") if group.strip())
    return [f"{struct.strip()}.{name}" for struct, _, names in groups for name in names.split()]


_FIGURES = asdict(BOUNDS) | {"scores": MAX_LOGPROBS, "stop_strings": MAX_STOP_STRINGS, "field_bytes": FIELD_BYTES}
_FIGURES |= {"custom_id": MAX_CUSTOM_ID, "file_mib": BOUNDS.file_bytes >> 20, "streams_mib": BOUNDS.streams_bytes >> 20}
_FIGURES |= {"grammar_mib": BOUNDS.grammar_memory_bytes >> 20}

_WORK = "`gateway.max_request_work`"
_UNITS = f"{_WORK}, the key's tokens"
_BOUNDS_TESTS = "tests/security/test_request_bounds.py"
_MEMORY_TESTS = "tests/security/test_request_memory.py"

ROWS: tuple[Row, ...] = (
    Row(
        "tokens: of prompts",
        "CompletionBody: prompt; ChatBody: messages; CountTokensBody: messages system; InputMessage: content;"
        "InputBlock: type text id name input tool_use_id content; ResponsesBody: input instructions;"
        "InputItem: type id content call_id name arguments output; ContentPart: type text",
        _UNITS,
        "the model's context",
        "400",
    ),
    Row(
        "tokens: of answers",
        "GeneratingBody: max_tokens max_completion_tokens min_tokens ignore_eos; MessagesBody: max_tokens;"
        "ResponsesBody: max_output_tokens",
        _UNITS,
        "the context; `gateway.max_request_work` units",
        "400",
    ),
    Row("choices", "GeneratingBody: n best_of", _UNITS, "{choices} with all prompts", "400"),
    Row(
        "scores",
        "GeneratingBody: prompt_logprobs; CompletionBody: logprobs echo; ChatBody: logprobs top_logprobs;"
        "ResponsesBody: top_logprobs include",
        _WORK,
        "{scores} a token",
        "400",
    ),
    Row(
        "stops: texts",
        "GeneratingBody: stop; MessagesBody: stop_sequences",
        _WORK,
        "{stop_strings}, of {stop_length} characters, {stop_characters} together",
        "400",
    ),
    Row("stops: tokens", "GeneratingBody: stop_token_ids", f"{_WORK}, for each choice", "256", "400"),
    Row("biases", "GeneratingBody: logit_bias", f"{_WORK}, for each choice", "{logit_biases}", "400"),
    Row(
        "grammars: compiled",
        "GeneratingBody: guided_json guided_regex guided_choice guided_grammar; JsonSchemaFormat: schema;"
        "StructuredOutputs: json regex choice grammar json_object; TextFormat: schema; OutputFormat: schema;"
        "ResponseFormat: type; TextFormat: type",
        f"{_WORK}, for each choice",
        "{grammar_bytes} bytes, {grammar_cpu_s} s, {grammar_mib} MiB",
        "400",
    ),
    Row(
        "grammars: masks of steps",
        "ChatBody: tool_choice parallel_tool_calls; ResponsesBody: tool_choice parallel_tool_calls;"
        "MessagesToolChoice: name disable_parallel_tool_use; NamedFunction: name; NamedTool: name;"
        "StructuredOutputs: disable_any_whitespace",
        OPEN,
        OPEN,
        "–",
    ),
    Row(
        "tools",
        "ChatBody: tools; CountTokensBody: tools; ResponsesBody: tools; FunctionTool: name description parameters;"
        "MessagesTool: name description type input_schema; ResponsesTool: type name description parameters",
        f"{_UNITS}: as prompts",
        "{tools}",
        "400",
    ),
    Row("messages", "", "bodies' bytes", "{messages}", "400"),
    Row(
        "templates: variables",
        "ChatBody: chat_template_kwargs; TokenizeBody: chat_template_kwargs",
        OPEN,
        "5 s, 512 MiB a chat",
        "400",
        tested="tests/security/test_chat_template.py",
    ),
    Row(
        "text: `/tokenize`",
        "TokenizeBody: prompt messages tools return_token_strs",
        OPEN,
        "`gateway.max_request_work` tokens",
        "400",
    ),
    Row("text: `/detokenize`", "DetokenizeBody: tokens", OPEN, "`gateway.max_request_work` ids", "400"),
    Row(
        "metadata",
        "GeneratingBody: metadata; ResponsesBody: metadata; BatchBody: metadata",
        "bodies' bytes",
        "{metadata_keys} keys; 16 where kept",
        "400",
    ),
    Row("nesting", "", "counted before decoding", "{nesting} deep", "400"),
    Row("values", "", "counted before decoding", "texts, lists, values of a full request", "400", tested=_BOUNDS_TESTS),
    Row("bodies: one", "", "bodies' bytes", "`gateway.max_body_bytes`", "413"),
    Row(
        "bodies: together, slow",
        "",
        "bodies' bytes",
        "{bodies} of the largest; {body_idle_s} s idle, {body_whole_s} s whole",
        "429, 408",
        tested=_MEMORY_TESTS,
    ),
    Row(
        "open requests",
        "GeneratingBody: stream; MessagesBody: stream; ResponsesBody: stream",
        "`gateway.max_open_work`, beyond plain ones",
        "`gateway.max_waiting_requests`, `gateway.max_waiting_tokens`",
        "429",
        tested=_BOUNDS_TESTS,
    ),
    Row(
        "stored: responses",
        "ResponsesBody: store",
        "`responses.storage_bytes`, `keys.owner_share`",
        "{responses}",
        "oldest go",
        tested="tests/services/gateway/apis/test_responses_store.py",
    ),
    Row(
        "stored: earlier turns",
        "ResponsesBody: previous_response_id; listInputItems: {id} after",
        OPEN,
        OPEN,
        "–",
    ),
    Row(
        "stored: reads",
        "getResponse: {id}; deleteResponse: {id}; cancelResponse: {id}; getFile: {id}; getFileContent: {id};"
        "deleteFile: {id}; getBatch: {id}; cancelBatch: {id}",
        OPEN,
        "one",
        "404",
    ),
    Row(
        "stored: streams",
        "createCompletion: x-cohort-resume; createChatCompletion: x-cohort-resume; createResponse: x-cohort-resume;"
        "createMessage: x-cohort-resume; resumeStream: {id} Last-Event-ID; cancelStream: {id}",
        "`keys.owner_share`",
        "{streams_mib} MiB",
        "no token",
        tested="tests/services/gateway/resume/test_resume_store.py",
    ),
    Row(
        "listings",
        "listInputItems: limit; listFiles: limit; listBatches: limit; getUsage: days",
        "the page",
        "100; files 10,000",
        "400",
    ),
    Row(
        "files: one",
        "createFile: file",
        "`batch.storage_bytes`, `keys.owner_share`",
        "{file_mib} MiB",
        "413",
    ),
    Row(
        "files: all of a key",
        "",
        "`batch.storage_bytes`, `keys.owner_share`",
        "{files}; {uploads} uploads; {upload_bytes_per_s} bytes/s over {upload_idle_s} s, {upload_whole_s} s whole",
        "507, 429, 408",
        tested="tests/security/batches/test_batches_uploads.py",
    ),
    Row(
        "files: other fields",
        "createFile: purpose expires_after[anchor] expires_after[seconds]",
        "the form's 64 KiB",
        "{field_bytes} bytes",
        "400",
    ),
    Row(
        "batches",
        "BatchBody: input_file_id",
        "`batch.storage_bytes`, `keys.owner_share`",
        "{unfinished_batches} not ended, {batches} kept; output {output_s} s",
        "429",
        tested="tests/services/gateway/batches/test_batches.py",
    ),
    Row(
        "batches: lines",
        "_Line: custom_id method url body",
        "the key's `be` limits, as requests",
        "{batch_lines}; ids {custom_id} characters",
        "the batch fails",
        tested="tests/services/gateway/batches/test_batch_lines.py",
    ),
    Row(
        "adapters",
        "GeneratingBody: model; CountTokensBody: model; ResponsesBody: model; TokenizeBody: model;"
        "DetokenizeBody: model; getModel: {name}",
        OPEN,
        "those of `model.lora`",
        "404",
    ),
)

FREE = """
BatchBody: endpoint completion_window; ExpiresAfter: seconds;
ChatBody: add_generation_prompt audio function_call functions modalities prediction reasoning_effort verbosity
    web_search_options;
CohortOptions: online;
CompletionBody: add_special_tokens suffix;
ContentPart: annotations detail file_data file_id file_url filename image_url logprobs;
CountTokensBody: cache_control;
FunctionTool: strict;
GeneratingBody: guided_decoding_backend priority prompt_cache_key prompt_cache_retention return_token_ids
    safety_identifier seed service_tier skip_special_tokens store top_k use_beam_search user;
InputBlock: cache_control citations is_error source; InputItem: phase status;
JsonSchemaFormat: description name strict;
MessagesBody: container context_management mcp_servers priority seed service_tier top_k;
MessagesMetadata: user_id; MessagesTool: cache_control eager_input_streaming strict;
OutputConfig: effort;
ResponsesBody: background context_management conversation max_tool_calls moderation priority prompt prompt_cache_key
    prompt_cache_retention reasoning safety_identifier seed service_tier top_k user;
ResponsesStreamOptions: include_obfuscation; ResponsesTool: strict;
StreamOptions: continuous_usage_stats include_obfuscation include_usage;
StructuredOutputs: disable_fallback structural_tag whitespace_pattern;
TextFormat: description name strict; TextOptions: verbosity; Thinking: type;
TokenizeBody: add_generation_prompt add_special_tokens;
getResponse: stream;
listFiles: purpose after; listBatches: after
"""
"""Fields that cost no more than their own bytes: they name, choose or tolerate, or are refused unless empty."""

ROUTES: dict[str, str] = {
    "the key's requests": "createCompletion createChatCompletion createResponse createMessage countTokens"
    " cancelResponse",
    "files and batches": "createFile createBatch",
    "constant": "listModels getModel getUsage health ready version metrics front openapi docs chat",
    OPEN: "tokenize detokenize resumeStream cancelStream getResponse deleteResponse listInputItems listFiles getFile"
    " getFileContent deleteFile listBatches getBatch cancelBatch",
}
"""What a call itself is charged to, whatever it has in it: operations by price."""


# -- The fields that there are -------------------------------------------------------------------------------------


def fields_of(kind: inspect.Type, seen: set[type]) -> Iterator[str]:
    """Yield the fields of all structs in a type, through lists, maps and unions, but those that are free by type."""
    match kind:
        case inspect.StructType():
            if kind.cls in seen:
                return
            seen.add(kind.cls)
            for field in kind.fields:
                if not free_by_type(field.type):
                    yield f"{_owner(kind.cls, field.name)}.{field.encode_name}"
                yield from fields_of(field.type, seen)
        case inspect.UnionType():
            for each in kind.types:
                yield from fields_of(each, seen)
        case inspect.ListType():
            yield from fields_of(kind.item_type, seen)
        case inspect.DictType():
            yield from fields_of(kind.key_type, seen)
            yield from fields_of(kind.value_type, seen)
        case inspect.Metadata():
            yield from fields_of(kind.type, seen)


def free_by_type(kind: inspect.Type) -> bool:
    match kind:
        case inspect.NoneType() | inspect.LiteralType() | inspect.StructType():
            return True
        case inspect.FloatType():
            return not (kind.ge is kind.gt is None or kind.le is kind.lt is None)
        case inspect.UnionType():
            return all(free_by_type(each) for each in kind.types)
    return False


def _owner(struct: type, name: str) -> str:
    """Return the name of the struct that declares a field, which others inherit."""
    return next(each.__name__ for each in reversed(struct.__mro__) if name in each.__dict__.get("__annotations__", {}))


def outside_of_body(operation: Operation) -> Iterator[str]:
    """Yield parameters in path, query and headers, and a form's parts, but choices among words and reals."""
    names = re.findall(r"\{\w+\}", operation.path)
    for parameter in operation.parameters:
        schema: Any = parameter["schema"]
        if schema.get("type") != "number" and len(schema.get("enum", ())) < 2:
            names.append(parameter["name"])
    names += (operation.form or {}).get("properties", {})
    return (f"{operation.id}.{name}" for name in names)


def fields() -> set[str]:
    """Return all fields that must have a price or be listed as free."""
    seen: set[type] = set()
    found = {each for row in OPERATIONS if row.body for each in fields_of(inspect.type_info(row.body), seen)}
    found |= set(fields_of(inspect.type_info(_Line), seen))
    found |= {each for row in OPERATIONS for each in outside_of_body(row)}
    return found


# -- The page ------------------------------------------------------------------------------------------------------

HEAD = "| what | charged to | at most | beyond |\n|---|---|---|---|\n"


def table() -> str:
    rows = [*ROWS, Row("calls that generate", "", "the key's requests", "`keys.limits`", "429")]
    rows.append(Row("other calls", "", OPEN, "a body's", "–"))
    return HEAD + "".join(f"| {row.what} | {row.price} | {row.bound_text} | {row.beyond} |\n" for row in rows)


def on_page(page: str) -> str:
    """Return the page's own table, or "" if there is none."""
    found = re.search(re.escape(HEAD) + r"(?:\|.*\n)*", page)
    return found[0] if found else ""


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(on_page(text), table()), encoding="utf-8")
