"""The database of resumable streams: which gateway has one, what a crash leaves, and what is over."""

from __future__ import annotations

from pathlib import Path

from cohort.common.messages import TokenLogprob
from cohort.common.types import Attempt, FinishReason, Request, SamplingParams
from cohort.services.gateway.generation.delta import Delta
from cohort.services.gateway.resume.resume_store import Claim, Ending, ResumeStore, StreamRecord, encoded

LATER_S = 100.0


def record() -> StreamRecord:
    request = Request(Attempt("a", 0), "gateway", [1, 2, 3], 3, SamplingParams(max_tokens=9, seed=7), 0.0)
    return StreamRecord(True, b"{}", {"x-cohort-class": "be"}, [request], "a", 1.0, "model")


def add(store: ResumeStore, token: str, *, owner: str = "alice", most: int = 1 << 20, own: int = 1 << 20) -> bool:
    return store.add(
        token, owner, "A", record(), output_bytes=100, expires_s=LATER_S, max_bytes=most, max_owner_bytes=own
    )


def claim(store: ResumeStore, token: str, holder: str, *, owner: str = "alice", now_s: float = 1.0) -> object:
    return store.claim(token, owner, holder, now_s=now_s, expires_s=LATER_S)


def said(*tokens: int, finish: FinishReason | None = None) -> bytes:
    return encoded([Delta(0, list(tokens), [TokenLogprob(-0.5, [], []) for _ in tokens], finish)])


def test_what_was_appended_is_there_for_another_process(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path / "streams.sqlite3")
    assert add(store, "t")
    assert store.append("A", [("t", said(4, 5))]) == {}
    assert store.append("A", [("t", said(6, finish=FinishReason.STOP))]) == {}
    other = ResumeStore(tmp_path / "streams.sqlite3")  # as after a kill: nothing was closed
    claimed = claim(other, "t", "B")
    assert isinstance(claimed, Claim)
    assert claimed.record == record() and claimed.ending is None and not claimed.charged
    assert (claimed.stored_deltas[0].tokens, claimed.stored_deltas[0].finish) == ([4, 5, 6], FinishReason.STOP)
    assert [each.logprob for each in claimed.stored_deltas[0].logprobs] == [-0.5] * 3


def test_only_one_gateway_has_a_stream(tmp_path: Path) -> None:
    first, second = (ResumeStore(tmp_path / "streams.sqlite3") for _ in range(2))
    add(first, "t")
    claim(second, "t", "B")
    assert first.append("A", [("t", said(4))]) == {"t": True}
    assert second.append("B", [("t", said(4))]) == {}
    assert not first.end("t", "A", Ending([0]), LATER_S), "not its to charge"
    assert not first.release("t", "A", LATER_S) and not first.discard("t", "A", 1.0)
    assert second.end("t", "B", Ending([0], "late", 504, "timeout_error"), LATER_S)
    claimed = claim(first, "t", "A")
    assert isinstance(claimed, Claim) and claimed.stored_deltas[0].tokens == [4] and claimed.charged
    assert claimed.ending is not None and claimed.ending.error is not None and claimed.ending.error.status == 504
    assert second.append("B", [("t", said(5))]) == {"t": False}, "it is over"


def test_what_is_cancelled_elsewhere_is_charged_where_it_ran(tmp_path: Path) -> None:
    first, second = (ResumeStore(tmp_path / "streams.sqlite3") for _ in range(2))
    for token in ("t", "u"):
        add(first, token)
        assert not second.cancel(token, "bob", 1.0)
        assert second.cancel(token, "alice", 1.0) and not second.cancel(token, "alice", 1.0)
        assert claim(second, token, "B") == "gone"
    assert first.append("A", [("t", said(4))]) == {"t": False}
    assert first.discard("t", "A", 1.0), "charged here"
    assert first.end("u", "A", Ending([0]), LATER_S), "charged here, and still gone"
    assert claim(second, "u", "B") == "gone"


def test_a_stream_that_is_left_says_what_was_charged(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path / "streams.sqlite3")
    add(store, "t")
    store.append("A", [("t", said(4))])
    assert store.release("t", "A", LATER_S)
    assert store.append("A", [("t", said(5))]) == {"t": True}
    claimed = claim(store, "t", "B")
    assert isinstance(claimed, Claim) and claimed.charged and claimed.stored_deltas[0].tokens == [4]


def test_bounds_and_owners(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path / "streams.sqlite3")
    assert add(store, "t", own=2000) and not add(store, "u", own=2000)
    assert add(store, "v", owner="bob", own=2000)
    assert not add(store, "w", owner="carol", most=3000)
    assert claim(store, "t", "B", owner="bob") is None and claim(store, "unknown", "B") is None


def test_time_takes_the_content_first_and_then_the_memory_of_it(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path / "streams.sqlite3")
    add(store, "t")
    add(store, "u")
    store.append("A", [("t", said(4))])
    assert claim(store, "t", "B", now_s=LATER_S) == "gone", "before any sweep"
    store.refresh(["t", "u"], "B", LATER_S + 50)
    store.refresh(["u"], "A", LATER_S + 50)
    store.sweep(LATER_S + 10)
    assert isinstance(claim(store, "u", "A", now_s=LATER_S + 10), Claim), "its gateway lives"
    store.sweep(LATER_S + 60)
    assert claim(store, "t", "B", now_s=LATER_S + 60) == "gone"
    store.sweep(LATER_S + 10_000)
    assert claim(store, "t", "B", now_s=LATER_S + 10_000) is None
