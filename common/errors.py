"""Every error Cohort raises on purpose, with the name an operator will search for.

Where each is caught: `ConfigError` ends a process at start with the option's name; `RequestError` becomes an HTTP
answer at the gateway; everything else is an internal fault that its owner turns into a retry or a clear failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import Future


class CohortError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(CohortError):
    """A configuration file or option is wrong; the message names file, key and what would be right."""


class NoDeviceLeft(ConfigError):
    """Other workers have every share of every GPU; its process ends with a status of its own, to be started later."""


class ModelError(CohortError):
    """A model folder cannot be served; the message says what is missing or unsupported."""


TOO_LONG = "context_length_exceeded"
"""OpenAI's code of a request beyond the model's context, which clients match on."""


class RequestError(CohortError):
    """A request that must be answered with an HTTP error. `status` is the HTTP status; `type_`, `param` and `code`,
    OpenAI's name of the error where it has one, fill the error body that clients parse."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type_ = type_
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return f"RequestError({self.status} {self.type_}: {self.message})"


def busy(message: str, retry_after_s: float) -> RequestError:
    """Return the refusal (429) of a request that could be served later."""
    return RequestError(message, status=429, type_="rate_limit_error", retry_after_s=retry_after_s)


class WireError(CohortError):
    """Bytes that are not a message of ours, or a message to the wrong receiver."""


class PeerUnreachable(CohortError):
    """A message could not be handed to the peer: not connected, or its queue is full."""


class TransferError(CohortError):
    """A KV transfer failed; its blocks must not be read."""


class TransferTimeout(TransferError):
    """A KV transfer did not finish before its deadline."""


class BufferStranded(TransferTimeout):
    """A transfer did not end and could not be silenced: keep the buffer out of use until `settled` is done."""

    def __init__(self, message: str, settled: Future[None]) -> None:
        super().__init__(message)
        self.settled = settled


class ChecksumMismatch(TransferError):
    """KV bytes arrived that are not the bytes that were sent."""


class LeaseExpired(CohortError):
    """A lease was not renewed before its deadline; its blocks are free again."""


class OutOfBlocks(CohortError):
    """An allocation needs more KV blocks than there are; the caller waits, preempts or refuses."""


class InvariantViolated(CohortError):
    """A `check()` found state that must not exist. Always a defect of ours."""
