"""Sections of the gateway: HTTP, API keys, batch jobs and kept answers."""

from __future__ import annotations

from typing import Literal

from cohort.common.config.kinds import Fraction, NotNegative, NotNegativeReal, Port, Positive, Seconds, Section


class GatewayConfig(Section, frozen=True):
    host: str = "127.0.0.1"  # address clients connect to; 0.0.0.0 = every interface
    port: Port = 8000  # port clients connect to; 0 = any free one, chosen by the launcher
    # gateway processes that listen on that port side by side; each owns the requests of the connections it is given and
    # has an equal part of what may wait, be open or be uploaded; limits of keys hold for all together
    processes: Positive = 1
    # accepted bearer tokens; empty = open; `env:NAME` reads a variable. /health, /ready, /version, /metrics need none
    api_keys: tuple[str, ...] = ()
    tls_cert: str = ""  # certificate with its chain, a PEM file: clients come by https; read again when it changes
    tls_key: str = ""  # its key, a PEM file without a passphrase; both or none
    open: bool = False  # true: `host` may be reachable from other machines although no api_keys are set
    max_waiting_requests: Positive = 4096  # not yet placed; beyond: 429
    max_waiting_tokens: Positive = 4_000_000  # prompt + predicted output of those
    # longest request body, a line of a batch too; a megabyte may take the event loop 5 ms; beyond: 413
    max_body_bytes: Positive = 4_194_304
    default_prediction_tokens: Positive = 256  # mean when the predictor is silent
    default_max_tokens: NotNegative = 0  # chat completions without max_tokens; 0 = what the context leaves
    default_class: Literal["rt", "be"] = "rt"  # of a request that names none: rt = real-time, be = best-effort
    rt_ttft_slo_s: Seconds = 2.0  # TTFT target of a real-time request that names none
    rt_tpot_slo_s: Seconds = 0.2  # TPOT target of a real-time request that names none
    # a field of a body that nobody knows, as other servers' are: warn = the request is answered without it, and the
    # answer's header x-cohort-ignored-fields names it; refuse = 400
    unknown_fields: Literal["warn", "refuse"] = "warn"
    request_timeout_s: Seconds = 3600.0  # the longest a request may live, queueing included
    write_timeout_s: Seconds = 60.0  # a client that takes nothing of its answer for so long is given up
    # names that Host and a browser's Origin may have besides localhost; empty: any Host, but none more on loopback
    allowed_hosts: tuple[str, ...] = ()
    # units of one request: choices × (64 + prompt + max_tokens × (1 + log-probabilities)), echo and biases beside
    max_request_work: Positive = 524_288
    # such units of all open requests beyond one plain answer each: bounds the gateway's memory; beyond: 429
    max_open_work: Positive = 786_432
    # a stream whose client asked for it can be resumed within so long after its connection broke; 0 = none can
    resume_s: NotNegativeReal = 120.0

    # Bounds of several processes are divided: none of them sees what the others hold, and together they keep the bound.

    @property
    def of_all(self) -> str:
        """Ending of messages about a divided bound."""
        return "" if self.processes == 1 else f", this gateway's of {self.processes}"

    @property
    def own_waiting_requests(self) -> int:
        """Share of `max_waiting_requests` in each process; together they may exceed it by rounding."""
        return -(-self.max_waiting_requests // self.processes)

    @property
    def own_waiting_tokens(self) -> int:
        return -(-self.max_waiting_tokens // self.processes)

    @property
    def own_open_work(self) -> int:
        """Share of `max_open_work`, at least one of the largest requests, as far as one may be open at all."""
        largest = min(self.max_request_work, self.max_open_work)
        return max(largest, -(-self.max_open_work // self.processes))


class KeyLimits(Section, frozen=True):
    """Limits of one key; 0 = no limit. Beyond: 429."""

    requests_per_minute: NotNegative = 0  # that generate; lines of batches count as best-effort
    tokens_per_minute: NotNegative = 0  # prompt and completion
    tokens_per_day: NotNegative = 0  # prompt and completion; a day of UTC
    concurrent_requests: NotNegative = 0  # open at once


class KeysConfig(Section, frozen=True):
    """API keys in a file (`cohort keys add`), the limits of every key that names none of its own, and how keys share
    the cluster. Limits hold for `gateway.api_keys` too, and for all gateway processes of a port together."""

    file: str = ""  # of `cohort keys`; read again when it changes; "" = `gateway.api_keys` alone
    # where several keys ask: the cluster's work by their weights while they wait; false = in the scheduler's order
    fair_sharing: bool = True
    # where several keys ask: the most that one has of waiting requests and tokens (429), of files and results (507), of
    # uploads and batches not ended (429), of kept responses and resumable streams
    owner_share: Fraction = 0.5
    limits: KeyLimits = KeyLimits()  # of a key for each class, rt and be


class StateConfig(Section, frozen=True):
    """Folder of what outlives a process: files, batches and kept responses, resumable streams, usage of keys, what was
    learned of output lengths and step times. Pipelines of one machine may share the folder."""

    folder: str = ""  # batches, streams, usage of keys, what was learned: back it up; "" = the cache folder
    retention_s: Seconds = 2_592_000.0  # files, ended batches and kept responses are deleted after so long


class BatchConfig(Section, frozen=True):
    """Files and batch jobs of the gateway (/v1/files, /v1/batches), kept on its disk."""

    concurrency: Positive = 128  # lines of all batches in work at once
    storage_bytes: Positive = 21_474_836_480  # files and results together; beyond: no uploads (507), no further lines


class ResponsesConfig(Section, frozen=True):
    """Answers of /v1/responses that are kept for `previous_response_id` and to be read again, beside the batches.
    Beyond a limit the oldest go first: of the API key that exceeds its share, else of the one with the most bytes."""

    storage_bytes: NotNegative = 1_073_741_824  # with the items they were made from; 0 = none is kept
