"""The JSON of errors: in OpenAI's shape, and in Anthropic's for what is asked under `/v1/messages`.

Called wherever an error leaves the gateway. Pure; decides words and shapes, never a status.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from cohort.common.errors import RequestError
from cohort.services.gateway.http.service_headers import printable

MESSAGES_PATH = "/v1/messages"
_MESSAGE_CHARACTERS = 2000
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""OpenAI's names of what a status alone says. Errors without a name have their status, which a stream has no other
place for."""


class OpenAiProblem(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class OpenAiError(msgspec.Struct, frozen=True):
    error: OpenAiProblem


class AnthropicProblem(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True):
    """`type` is "error"."""

    type: str
    error: AnthropicProblem


def message_of(error: RequestError) -> str:
    """Return the error for a person: marks of Markdown, as decoders put around names, are left out."""
    return printable(error.message.replace("`", ""), _MESSAGE_CHARACTERS)


def error_body(error: RequestError) -> OpenAiError:
    return OpenAiError(
        OpenAiProblem(
            message=message_of(error),
            type=error.type_,
            param=None if error.param is None else printable(error.param, 200),
            code=error.code or _CODES.get(error.status) or str(error.status),
        )
    )


def anthropic_error(error: RequestError) -> AnthropicError:
    return AnthropicError("error", AnthropicProblem(_anthropic_type(error.status), message_of(error)))


def shaped_error(error: RequestError, path: str) -> AnthropicError | OpenAiError:
    """Return the error in the format of the API that serves `path`."""
    if path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/"):
        return anthropic_error(error)
    return error_body(error)


def renamed(error: RequestError, names: Sequence[tuple[str, str]]) -> RequestError:
    """Rename a chat's field in an error for another API. `names`: regular expressions for the beginning of a field's
    path, and replacements; the first match counts."""
    if error.param is None:
        return error
    for pattern, name in names:
        param, found = re.subn(rf"^{pattern}(?![\w])", name, error.param)
        if not found:
            continue
        message = error.message
        if message.startswith(error.param):
            message = param + message.removeprefix(error.param)
        return RequestError(
            message,
            status=error.status,
            type_=error.type_,
            param=param,
            code=error.code,
            retry_after_s=error.retry_after_s,
        )
    return error


def retry_after(error: RequestError) -> str | None:
    """Return the wait in whole seconds, at least one."""
    return None if error.retry_after_s is None else str(max(1, math.ceil(error.retry_after_s)))


def _anthropic_type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 404:
            return "not_found_error"
        case 408 | 504:
            return "timeout_error"
        case 413:
            return "request_too_large"
        case 429:
            return "rate_limit_error"
        case 503:
            return "overloaded_error"
        case _:
            return "api_error" if status >= 500 else "invalid_request_error"
