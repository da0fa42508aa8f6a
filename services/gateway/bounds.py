"""Bounds that no operator chooses: of one body, of what processes compile and render for it, of files and batches.

Read as `bounds.BOUNDS.x` at each call, so that a test can put others there. What an operator does choose is in
`common/config/gateway.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    # Of one request; beyond: 400. Choices and tools are OpenAI's.
    choices: int = 128  # all its prompts together, half of engine.max_rows by default
    inputs: int = 2048  # to be embedded, each a request; OpenAI's
    tools: int = 128
    messages: int = 4096
    metadata_keys: int = 64  # taken and left unread
    nesting: int = 32  # lists and objects within each other
    logit_biases: int = 1024  # an array of each is kept
    stop_length: int = 256  # characters of one stop string, which may be held back from a stream
    stop_characters: int = 1024  # of all, one automaton
    # As JSON, of what binds an answer: one schema, regular expression or grammar, or the tools of a chat.
    grammar_bytes: int = 65_536
    grammar_cpu_s: float = 0.5  # to compile one; workers compile it again
    grammar_memory_bytes: int = 512 << 20  # of the process that compiles them
    # Of one API key that wait for that process, or for the chat template's, and a request's wait; beyond: 429.
    grammars_waiting: int = 128  # as many as choices
    chats_waiting: int = 4096  # as many as requests
    turn_wait_s: float = 30.0  # a new process included, which takes seconds
    grammars_passed_bytes: int = 16 << 20  # kept, not to be compiled again: 256 of the largest
    # Of files and batches; the first two are OpenAI's. Beyond: 413, a failed batch, 429, 507, 429.
    file_bytes: int = 200 << 20
    batch_lines: int = 50_000
    unfinished_batches: int = 256
    files: int = 10_000  # of one API key
    uploads: int = 64  # under way at all gateways of a port
    batches: int = 10_000  # of one API key, ended ones included; beyond: the oldest that ended is forgotten
    upload_idle_s: float = 60.0  # with less than as many seconds' `upload_bytes_per_s`; beyond: 408
    upload_bytes_per_s: int = 1024
    upload_whole_s: float = 3600.0
    # Time after which a batch whose output the disk refuses has failed; the next start writes its results.
    output_s: float = 3600.0
    # Kept, oldest first out; and of resumable streams, beyond which one has no token: 100,000 of 2 KB.
    responses: int = 10_000
    streams_bytes: int = 256 << 20
    # Of a body; beyond: 408, and 429.
    body_idle_s: float = 30.0  # without a byte
    body_whole_s: float = 120.0  # 4 MiB at 35 KB/s
    bodies: int = 128  # times the largest body: bytes in flight together, read or parsed but not accepted


BOUNDS = Bounds()
