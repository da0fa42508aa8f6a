"""What a recording says, and that replaying it notices every difference."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest

from cohort.common.config import dump_config, load_config
from cohort.common.errors import ConfigError
from cohort.common.machines.events import (
    LinkAddresses,
    PromptScores,
    Received,
    ReportDue,
    RunsSent,
    Sampled,
    StepEnded,
    Tick,
    WorkerEvent,
)
from cohort.common.machines.recorder import Recorded, WorkerHeader
from cohort.common.machines.replayer import Replayed, replay
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import KvAccepted, KvGrant, Registered, TokenLogprob
from cohort.common.policies import compose
from cohort.common.types import Attempt, Role
from tests.common.machines.small_worker import segment, setup
from tests.common.policies.dynaserve.test_slo_batching import scheduler as slo_batching
from tests.common.test_tokens import read_again

R = Attempt("r", 1)


def record(path: Path) -> list[str]:
    """Everything a prefill worker is told of one request, from its registration on; the transfer ids it chose."""
    config, made = load_config(), setup(Role.PREFILL)
    capacity = made.capacity
    kv = compose.allocation(config, capacity.geometry, capacity.num_blocks, capacity.host_blocks)
    with path.open("wb") as file:
        recorded = Recorded(
            WorkerMachine(made, compose.iteration(config), kv, Random(5)),
            WorkerHeader(made, 5, dump_config(config)),
            file.write,
        )
        recorded.handle(0.0, LinkAddresses({"link": b"\x00\xff"}), ReportDue(7))
        recorded.handle(0.1, Received("manager", Registered(1)))
        effects = recorded.handle(0.2, Received("manager", segment(0)))
        offer = effects[2].message  # type: ignore[union-attr]
        grant = KvGrant(R, offer.transfer_id, 77, 5.0, [4, 9, 2], 0, {"link": b"\x01"})  # type: ignore[union-attr]
        recorded.handle(0.25, Received("decode", grant))
        scores = PromptScores(R, 0, [TokenLogprob(-1.5, [3], [-1.0])])
        recorded.handle(0.3, StepEnded([Sampled(R, 41, TokenLogprob(-0.5))], 0.1, [scores]))
        recorded.handle(0.4, RunsSent(77, None, 3), Received("decode", KvAccepted(R, 77)))
        recorded.handle(0.5, Tick(), ReportDue(8))
        recorded.check()
    return path.read_text().splitlines()


def test_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "prefill.jsonl"
    lines = record(path)
    assert replay(path) == Replayed("prefill", calls=7, plans=1, rows=1, effects=10, difference="")
    header = msgspec.json.decode(lines[0])
    assert (header["machine"], header["seed"], header["setup"]["instance"]) == ("worker", 5, "prefill")
    call = msgspec.json.decode(lines[3])
    assert [event["message"]["type"] for event in call["events"]] == ["StartSegment"]
    assert call["effects"][-1] == "StartStep r#1 [0, 12); padded to 0"


def test_events_come_back_as_they_were() -> None:
    events: list[WorkerEvent] = [
        LinkAddresses({"link": b"\x00\xff"}),
        Received("manager", segment(0)),
        StepEnded(
            [Sampled(R, 41, TokenLogprob(-0.1, [1], [-0.2]))], 0.1 + 0.2, [PromptScores(R, 3, [TokenLogprob(-2.0)])]
        ),
        RunsSent(77, "broken", 3),
        Tick(),
    ]
    assert read_again(events, list[WorkerEvent]) == events


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        (4, "[0, 12)", "[0, 11)"),  # what was planned
        (6, "41,[-0.5", "42,[-0.5"),  # what was told
        (6, '"now_s":0.3,', '"now_s":0.35,'),  # when: the times of the first token
        (1, '"seed":5', '"seed":6'),  # what it was made of: transfer ids are random numbers
    ],
)
def test_every_difference_is_noticed(tmp_path: Path, line: int, old: str, new: str) -> None:
    path = tmp_path / "prefill.jsonl"
    lines = record(path)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    path.write_text("\n".join(lines))
    assert "recorded" in replay(path).difference


def test_earlier_learned_state_of_a_scheduler_is_part_of_the_recording(tmp_path: Path) -> None:
    """A recorded worker is no other one than it would be: its reports carry the step times it kept over a restart."""
    config, made, path = load_config(preset="dynaserve"), setup(Role.UNIFIED), tmp_path / "unified.jsonl"
    scheduler = compose.iteration(config)
    assert scheduler.learned is not None
    state = slo_batching().learned.export_state()
    scheduler.learned.import_state(state)
    capacity = made.capacity
    kv = compose.allocation(config, capacity.geometry, capacity.num_blocks, capacity.host_blocks)
    with path.open("wb") as file:
        header = WorkerHeader(made, 5, dump_config(config), state)
        recorded = Recorded(WorkerMachine(made, scheduler, kv, Random(5)), header, file.write)
        recorded.handle(0.0, LinkAddresses({"link": b"here"}), ReportDue(7))
        recorded.handle(0.1, Received("manager", Registered(1)), ReportDue(7))
    assert (replay(path).calls, replay(path).difference) == (2, "")
    first, *calls = path.read_bytes().splitlines()
    forgot = msgspec.json.decode(first) | {"learned": ""}
    path.write_bytes(b"\n".join([msgspec.json.encode(forgot), *calls]))
    assert replay(path).difference.startswith("line 3: recorded")


@pytest.mark.parametrize("text", ["", "{}\n", '{"machine":"toaster"}\n', "not json\n"])
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a recording"):
        replay(path)
