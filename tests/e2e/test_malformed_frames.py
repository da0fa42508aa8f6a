"""Frames that are no message, on every ZeroMQ socket of every process of a running pipeline.

Random bytes, messages cut off, fields of the wrong type, a nesting bomb, megabytes of nothing, a wrong number of frames
are counted and skipped, and the pipeline serves as before. Control sockets count in `cohort_bus_malformed_total`,
the sockets of KV links in the worker's log.
"""

from __future__ import annotations

import random
import re
import time
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from cohort.common import messages
from cohort.common.codec import decode, encode
from cohort.common.errors import WireError
from cohort.common.messages import Message, Registered
from tests.e2e.pipeline import Pipeline
from tests.examples import nightly

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

NEWS_S = 20.0
"""Until a scrape of every process has the counts, on a busy machine."""


def frames() -> list[list[bytes]]:
    rng = random.Random(3)
    whole = encode(Registered(1))
    types = [each for each in vars(messages).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    tags = sorted({str(tag) for each in types if (tag := each.__struct_config__.tag)})
    wrong = [msgspec.msgpack.encode({"type": tag, "incarnation": {"a": [None]}, "instance": 7}) for tag in tags]
    wrong = [data for data in wrong if not decodes(data)]  # a message of other fields reads none of these
    assert len(wrong) > 20
    return [
        *([b"\xc1" + rng.randbytes(rng.randrange(200))] for _ in range(20)),  # 0xc1 begins nothing in msgpack
        *([whole[:end]] for end in range(len(whole))),
        *([data] for data in wrong),
        *([msgspec.msgpack.encode({"type": tag})[:-1]] for tag in tags),
        *([data] for data in mutations(rng, 150 if nightly() else 1)),
        [b"\x91" * 100_000],
        [b"\xc1" * (8 << 20)],
        [b"\xdd\xff\xff\xff\xff"],  # a list of 2**32 - 1 items
        [whole, whole],
        [whole] * 50,
    ]


ODD = [None, True, -1, 2**63, 1e300, "", "x" * 300, b"\xff" * 9, [], [[None]], {}, {"type": "x"}, {"a": [None]}]


def mutations(rng: random.Random, count: int) -> Iterator[bytes]:
    """Yield every message as often, with odd values in its own fields, some bytes changed, or cut off: no messages."""
    for kind in typing.get_args(Message):
        for _ in range(count):
            fields = {name: rng.choice(ODD) for name in kind.__struct_encode_fields__}
            data = bytearray(msgspec.msgpack.encode({"type": kind.__struct_config__.tag, **fields}))
            for _ in range(rng.randrange(3)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            del data[rng.choice([len(data), rng.randrange(len(data))]) :]
            if data and not decodes(bytes(data)):
                yield bytes(data)


def decodes(data: bytes) -> bool:
    try:
        decode(data)
    except WireError:
        return False
    return True


def malformed(pipeline: Pipeline) -> dict[str, float]:
    pattern = r'^cohort_bus_malformed_total\{[^}]*instance="([^"]+)"[^}]*\} (\S+)$'
    counted = re.findall(pattern, pipeline.metrics(), re.M)
    return {instance: float(value) for instance, value in counted}


def fewer(pipeline: Pipeline, before: dict[str, float], links: list[Path], sent: int) -> dict[str, float]:
    """Sockets that have not counted so many, and how many they have. To a link the longest is no message at all: its
    sender loses the connection before libzmq has taken it in, and comes again. Under a name of its own it would be
    refused as long as what came before is unread, and the rest lost."""
    counted = {name: value - before[name] for name, value in malformed(pipeline).items()}
    for path in links:
        log = (pipeline.folder / f"{path.name.removesuffix('.kv.sock')}.log").read_text(errors="replace")
        lines = [line for line in log.splitlines() if "malformed transfer message skipped" in line]
        counted[path.name] = sum(int(line.partition('"times":')[2].partition(",")[0]) for line in lines) + 1
    return {name: count for name, count in counted.items() if count < sent}


def is_link(path: Path) -> bool:
    return path.name.endswith(".kv.sock")


def send(sockets: list[Path], sent: list[list[bytes]]) -> None:
    context = zmq.Context()
    try:
        for path in sockets:
            stranger = context.socket(zmq.DEALER)
            if not is_link(path):  # peers of links have no name of their own
                stranger.setsockopt(zmq.IDENTITY, b"stranger")
            stranger.setsockopt(zmq.LINGER, 10_000)
            stranger.connect(f"ipc://{path}")
            for parts in sent:
                stranger.send_multipart(parts)
            stranger.close()
    finally:
        context.term()  # when all is sent, or the linger is over


def test_every_socket_counts_and_skips_what_is_no_message(
    tmp_path_factory: pytest.TempPathFactory, small_model: Path
) -> None:
    with Pipeline(tmp_path_factory.mktemp("frames"), small_model, preset="disaggregated") as pipeline:
        send_and_count(pipeline)


def send_and_count(pipeline: Pipeline) -> None:
    sent, before = frames(), malformed(pipeline)
    sockets = sorted((pipeline.folder / "run").glob("*.sock"))
    control, links = [path for path in sockets if not is_link(path)], [path for path in sockets if is_link(path)]
    assert {path.name.removesuffix(".sock") for path in control} == set(pipeline.names) == set(before)
    assert len(links) == len(pipeline.config.instance_roles)
    send(sockets, sent)
    deadline = time.monotonic() + NEWS_S
    while missing := fewer(pipeline, before, links, len(sent)):
        assert time.monotonic() < deadline, f"of {len(sent)}: {missing}"
        time.sleep(0.25)
    assert all(process.poll() is None for process in pipeline.processes.values())
    bodies = [{"prompt": f"Number {number}:", "max_tokens": 6, "ignore_eos": True} for number in range(4)]
    answers = pipeline.complete_all(bodies)
    assert [(answer.error, answer.finish) for answer in answers] == [("", "length")] * 4
    assert all(answer.extras["instances"] == ["prefill-0", "decode-0"] for answer in answers)  # over the links
    pipeline.assert_nothing_left()
