"""The database of resumable streams: which gateway has one, what a crash leaves, and what is over."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.messages import TokenLogprob
from cohort.common.types import Attempt, FinishReason, Request, SamplingParams
from cohort.services.gateway.generation.delta import Delta
from cohort.services.gateway.resume.resume_session import ResumeLog, Session
from cohort.services.gateway.resume.resume_store import Claim, Ending, ResumeStore, StreamRecord, encoded
from tests.examples import examples

LATER_S = 100.0


def record() -> StreamRecord:
    request = Request(Attempt("a", 0), "gateway", [1, 2, 3], 3, SamplingParams(max_tokens=9, seed=7), 0.0)
    return StreamRecord(True, b"{}", {"x-cohort-class": "be"}, [request], "a", 1.0, "model")


def add(
    store: ResumeStore,
    token: str,
    *,
    owner: str = "alice",
    most: int = 1 << 20,
    own: int = 1 << 20,
    background: bool = False,
) -> bool:
    return store.add(
        token,
        owner,
        "A",
        record(),
        output_bytes=100,
        expires_s=LATER_S,
        max_bytes=most,
        max_owner_bytes=own,
        background=background,
    )


def claim(store: ResumeStore, token: str, holder: str, *, owner: str = "alice", now_s: float = 1.0) -> object:
    return store.claim(token, owner, holder, now_s=now_s, expires_s=LATER_S)


def said(*tokens: int, finish: FinishReason | None = None) -> bytes:
    return encoded([Delta(0, list(tokens), [TokenLogprob(-0.5, [], []) for _ in tokens], finish)])


def session_of(claimed: Claim, prompt: int, completion: int) -> Session:
    """Return a session that goes on with a claim and has used as many tokens in all."""
    session = Session("t", "t", "alice", ResumeLog(), *[None] * 5)  # type: ignore[arg-type]
    session.answering = SimpleNamespace(used=lambda: (prompt, completion))  # type: ignore[assignment]
    session.charged_tokens = claimed.charged
    return session


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
    assert not first.release("t", "A", LATER_S, 4) and not first.discard("t", "A", 1.0)
    assert second.end("t", "B", Ending([0], "late", 504, "timeout_error"), LATER_S)
    claimed = claim(first, "t", "A")
    assert isinstance(claimed, Claim) and claimed.stored_deltas[0].tokens == [4]
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
    assert store.release("t", "A", LATER_S, 4)
    assert store.append("A", [("t", said(5))]) == {"t": True}
    claimed = claim(store, "t", "B")
    assert isinstance(claimed, Claim) and claimed.charged == 4 and claimed.stored_deltas[0].tokens == [4]


@settings(max_examples=examples(1))
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=6), st.integers(0, 5))
def test_every_token_is_charged_once_whichever_gateways_are_killed(
    prompt: int, gateways: list[tuple[int, bool]], last: int
) -> None:
    """Each gateway generates some tokens, then releases the stream or is killed; the last one ends it."""
    with TemporaryDirectory() as folder:
        store, holder, paid = ResumeStore(Path(folder) / "streams.sqlite3"), "A", 0
        add(store, "t")
        for number, (count, is_killed) in enumerate([*gateways, (last, False)]):
            claimed = claim(store, "t", holder := f"gateway {number}")
            assert isinstance(claimed, Claim)
            earlier = len(claimed.stored_deltas[0].tokens) if claimed.stored_deltas else 0
            session = session_of(claimed, prompt, earlier + count)
            if count:
                store.append(holder, [("t", said(*range(count)))])
            if not is_killed:
                used = session.used()
                paid += sum(used)
                store.release("t", holder, LATER_S, session.charged_tokens + sum(used))
        store.close()
    assert paid == prompt + sum(count for count, _ in gateways) + last


def test_an_older_database_is_charged_no_more(tmp_path: Path) -> None:
    """It knew only that what it had was charged, not how much that was."""
    store = ResumeStore(tmp_path / "streams.sqlite3")
    for token, charged in (("t", 1), ("u", 0)):
        add(store, token)
        store._db.execute("UPDATE streams SET charged = ? WHERE token = ?", (charged, token))
    store._db.execute("ALTER TABLE streams DROP COLUMN background")
    store._db.execute("PRAGMA user_version = 2")
    store.close()
    store = ResumeStore(tmp_path / "streams.sqlite3")
    claims = [claim(store, token, "B") for token in ("t", "u")]
    used = [session_of(each, 7, 1000).used() for each in claims if isinstance(each, Claim)]
    assert used == [(0, 0), (7, 1000)]


def test_a_claim_reads_as_many_bytes_as_are_known_before(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path / "streams.sqlite3")
    for token in ("t", "u"):
        add(store, token)
    deltas = [said(*range(count)) for count in (1, 5, 70)]
    store.append("A", [("t", data) for data in deltas])
    content = len(msgspec.msgpack.encode(record()))
    assert store.length("t", "alice") == content + sum(map(len, deltas))
    assert (store.length("u", "alice"), store.length("t", "bob"), store.length("none", "alice")) == (content, 0, 0)
    store.cancel("t", "alice", 1.0)
    assert store.length("t", "alice") == 0


def test_bounds_and_owners(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path / "streams.sqlite3")
    assert add(store, "t", own=2000) and not add(store, "u", own=2000)
    assert add(store, "v", owner="bob", own=2000)
    assert not add(store, "w", owner="carol", most=3000)
    assert claim(store, "t", "B", owner="bob") is None and claim(store, "unknown", "B") is None


def test_what_a_gateway_left_in_the_background_is_found(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path / "streams.sqlite3")
    add(store, "t", background=True)
    add(store, "u")
    assert store.left(LATER_S) == [] and store.left(LATER_S + 1) == [("t", "alice")]
    store.refresh(["t", "u"], "A", LATER_S + 50, LATER_S + 500)
    assert store.left(LATER_S + 499) == []
    assert store.record("t", "alice") == record() and store.record("t", "bob") is None
    assert store.release("t", "A", LATER_S, 4) and store.left(0.0) == [("t", "alice")]
    store.claim("t", "alice", "B", now_s=1.0, expires_s=LATER_S, background_s=LATER_S + 500)
    assert store.left(LATER_S + 499) == []
    store.end("t", "B", Ending([0]), LATER_S)
    assert store.left(LATER_S + 1) == [] and store.record("t", "alice") is None


def test_time_takes_the_content_first_and_then_the_memory_of_it(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path / "streams.sqlite3")
    add(store, "t")
    add(store, "u")
    store.append("A", [("t", said(4))])
    assert claim(store, "t", "B", now_s=LATER_S) == "gone", "before any sweep"
    store.refresh(["t", "u"], "B", LATER_S + 50, LATER_S)
    store.refresh(["u"], "A", LATER_S + 50, LATER_S)
    store.sweep(LATER_S + 10)
    assert isinstance(claim(store, "u", "A", now_s=LATER_S + 10), Claim), "its gateway lives"
    store.sweep(LATER_S + 60)
    assert claim(store, "t", "B", now_s=LATER_S + 60) == "gone"
    store.sweep(LATER_S + 10_000)
    assert claim(store, "t", "B", now_s=LATER_S + 10_000) is None
