"""The store: what survives, what is visible to whom, and that a line is finished once."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cohort.common.errors import ConfigError
from cohort.services.gateway.batches.batch_records import FinishedLine, LineError, PendingLine, StoredBatch, StoredFile
from cohort.services.gateway.batches.batch_store import BatchStore
from tests.examples import examples

NOW_S = 1000.5
LINES = [PendingLine(number, number * 10, 9, f"c{number}") for number in range(1, 6)]


def file(file_id: str = "file-a", owner: str = "me", **more: object) -> StoredFile:
    values = {"purpose": "batch", "filename": "x", "bytes": 50, "created_at": 1, "expires_at": 10_000, **more}
    return StoredFile(seq=0, id=file_id, owner=owner, **values)  # type: ignore[arg-type]


def batch(batch_id: str = "batch_a", owner: str = "me") -> StoredBatch:
    return StoredBatch(
        seq=0,
        id=batch_id,
        owner=owner,
        status="validating",
        endpoint="/v1/completions",
        input_file_id="file-a",
        completion_window="24h",
        created_at=1000,
        expires_at=2000,
        output_retention_s=100,
        metadata={"k": "v"},
    )


def done(number: int, *, succeeded: bool = True, result: bytes = b"r") -> FinishedLine:
    return FinishedLine(number, succeeded, result, input_tokens=3, cached_tokens=1, output_tokens=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "batches.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[BatchStore]:
    store = BatchStore(path)
    yield store
    store.close()


def running(store: BatchStore) -> StoredBatch:
    store.add_file(file())
    store.add_batch(batch())
    store.add_lines("batch_a", LINES, first=True)
    store.begin("batch_a", NOW_S, model="m")
    return current(store)


def current(store: BatchStore) -> StoredBatch:
    found = store.batch("batch_a")
    assert found is not None
    return found


def test_a_batch_from_begin_to_end(store: BatchStore) -> None:
    begun = running(store)
    assert (begun.status, begun.in_progress_at, begun.total, begun.model) == ("in_progress", 1000, 5, "m")
    assert begun.metadata == {"k": "v"}
    for number in (1, 2, 3, 5):
        assert store.finish_line("batch_a", done(number, succeeded=number != 2))
    assert [line.number for line in store.pending("batch_a", after=0, limit=9)] == [4]
    assert store.finish_line("batch_a", done(4))
    store.begin_finalizing("batch_a", NOW_S + 1)
    assert current(store).status == "finalizing"
    assert [number for number, _ in store.results("batch_a", succeeded=True, after=0, page_bytes=999)] == [1, 3, 4, 5]
    assert store.results("batch_a", succeeded=False, after=0, page_bytes=999) == [(2, b"r")]
    store.end("batch_a", NOW_S + 2, "completed", output=file("file-o", purpose="batch_output"), errors=None)
    ended = current(store)
    assert (ended.status, ended.finalizing_at, ended.completed_at) == ("completed", 1001, 1002)
    assert (ended.completed, ended.failed, ended.input_tokens, ended.output_tokens) == (4, 1, 15, 10)
    assert (ended.output_file_id, ended.error_file_id) == ("file-o", None)
    assert store.file("file-o", "me", NOW_S) is not None
    assert store.unfinished() == [] and store.counts() == {"completed": 1}


def test_results_are_paged_by_bytes(store: BatchStore) -> None:
    running(store)
    for number, size in ((1, 10), (2, 40), (3, 1), (4, 1), (5, 100)):
        store.finish_line("batch_a", done(number, result=b"r" * size))
    pages, after = [], 0
    while page := store.results("batch_a", succeeded=True, after=after, page_bytes=40):
        pages.append([number for number, _ in page])
        after = page[-1][0]
    assert pages == [[1, 2], [3, 4, 5]], "a page ends with the result that fills it"


def test_lines_count_as_stored_until_their_batch_ends(store: BatchStore) -> None:
    running(store)
    before = store.usage("me")
    assert before.owner_bytes == before.bytes and store.usage("you").owner_bytes == 0
    store.finish_line("batch_a", done(1, result=b"r" * 1000))
    assert store.usage("me").bytes == before.bytes + 2000, "in the database, and later in the output file"
    store.add_batch(batch("batch_b", "you"))
    store.add_lines("batch_b", LINES, first=True)
    store.add_lines("batch_b", LINES, first=True)
    assert store.usage("you").owner_bytes == before.bytes - 50, "a validation that starts over counts once"
    store.begin_finalizing("batch_a", NOW_S)
    store.end("batch_a", NOW_S, "completed", output=None, errors=None)
    store.fail("batch_b", NOW_S, [])
    assert store.usage("me").bytes == 50


def test_results_without_files_stay_and_count(store: BatchStore) -> None:
    """Until the batch is opened again, or forgotten with all it has; one that ended is never opened again."""
    running(store)
    store.finish_line("batch_a", done(1, result=b"r" * 1000))
    before = store.usage("me").bytes
    store.begin_finalizing("batch_a", NOW_S)
    store.leave_unwritten("batch_a", NOW_S + 1, [LineError("output_not_written", "full")])
    left = current(store)
    assert (left.status, left.failed_at, len(left.errors or [])) == ("failed", 1001, 1)
    assert store.unfinished() == [] and store.usage("me").bytes == before
    assert store.reopen_unwritten() == 1 and store.unfinished() == ["batch_a"]
    assert (current(store).status, current(store).failed_at, current(store).errors) == ("finalizing", None, None)
    assert len(store.results("batch_a", succeeded=True, after=0, page_bytes=9999)) == 1
    store.give_up("batch_a", NOW_S + 2, [LineError("internal_error", "defect")])
    assert store.reopen_unwritten() == 0 and current(store).status == "failed"


def test_a_batch_that_cannot_be_run_fails_from_wherever_it_is(store: BatchStore) -> None:
    running(store)
    store.finish_line("batch_a", done(1))
    store.give_up("batch_a", NOW_S, [LineError("internal_error", "")])
    found = current(store)
    assert (found.status, found.completed, found.failed, found.failed_at) == ("failed", 1, 4, 1000)
    store.give_up("batch_a", NOW_S + 9, [])
    store.end("batch_a", NOW_S + 9, "completed", output=None, errors=None)
    assert current(store) == found, "it has ended"


def test_deleted_rows_give_their_space_back(store: BatchStore, path: Path) -> None:
    running(store)
    for number in range(1, 6):
        store.finish_line("batch_a", done(number, result=bytes(4_000_000)))
    store.begin_finalizing("batch_a", NOW_S)
    store.end("batch_a", NOW_S, "completed", output=None, errors=None)
    rounds = 1
    while store.shrink():
        rounds += 1
    assert rounds > 1 and path.stat().st_size < 200_000
    assert path.with_name(path.name + "-wal").stat().st_size < 200_000


def test_a_line_is_finished_once(store: BatchStore) -> None:
    running(store)
    assert store.finish_line("batch_a", done(1, result=b"first"))
    assert not store.finish_line("batch_a", done(1, succeeded=False, result=b"second"))
    assert store.results("batch_a", succeeded=True, after=0, page_bytes=999) == [(1, b"first")]
    assert (current(store).completed, current(store).failed, current(store).input_tokens) == (1, 0, 3)


def test_a_late_line_does_not_change_an_output_in_writing(store: BatchStore) -> None:
    running(store)
    store.begin_finalizing("batch_a", NOW_S)
    assert not store.finish_line("batch_a", done(1))
    assert current(store).completed == 0


def test_killed_in_the_middle_of_a_batch(store: BatchStore, path: Path, tmp_path: Path) -> None:
    """The files as they are at this very moment, log included, are what a killed process leaves."""
    running(store)
    store.finish_line("batch_a", done(2, result=b"kept"))
    store.finish_line("batch_a", done(4, succeeded=False))
    store._db.execute("BEGIN IMMEDIATE")
    store._db.execute("UPDATE lines SET succeeded = 1, result = x'00' WHERE number = 1")  # never committed
    left = tmp_path / "left"
    left.mkdir()
    for name in tmp_path.glob("batches.sqlite*"):
        shutil.copy(name, left)
    store._db.execute("ROLLBACK")

    again = BatchStore(left / path.name)
    assert again.unfinished() == ["batch_a"]
    assert [line.number for line in again.pending("batch_a", after=0, limit=9)] == [1, 3, 5]
    assert again.results("batch_a", succeeded=True, after=0, page_bytes=999) == [(2, b"kept")]
    found = again.batch("batch_a")
    assert found is not None and (found.status, found.completed, found.failed) == ("in_progress", 1, 1)
    again.close()


def test_validating_again_starts_over(store: BatchStore) -> None:
    store.add_batch(batch())
    store.add_lines("batch_a", LINES[:3], first=True)
    store.add_lines("batch_a", LINES[:2], first=True)
    store.add_lines("batch_a", LINES[2:], first=False)
    store.begin("batch_a", NOW_S, model=None)
    assert current(store).total == 5


def test_a_bad_input_fails_the_batch_with_reasons(store: BatchStore) -> None:
    store.add_batch(batch())
    store.add_lines("batch_a", LINES, first=True)
    errors = [LineError("url_mismatch", "wrong", 2, "url"), LineError("empty_file", "nothing")]
    store.fail("batch_a", NOW_S, errors)
    assert (current(store).status, current(store).failed_at, current(store).errors) == ("failed", 1000, errors)
    assert store.pending("batch_a", after=0, limit=9) == []


def test_cancelling(store: BatchStore) -> None:
    running(store)
    assert store.cancel("batch_a", NOW_S)
    assert not store.cancel("batch_a", NOW_S + 5)
    assert (current(store).status, current(store).cancelling_at) == ("cancelling", 1000)
    assert store.finish_line("batch_a", done(1)), "an answer that is there counts"
    store.begin_finalizing("batch_a", NOW_S)
    assert current(store).status == "cancelling"
    store.end("batch_a", NOW_S + 9, "cancelled", output=None, errors=None)
    assert (current(store).status, current(store).cancelled_at) == ("cancelled", 1009)
    assert (current(store).completed, current(store).failed) == (1, 4)


def test_cancel_while_validating_wins(store: BatchStore) -> None:
    store.add_batch(batch())
    assert store.cancel("batch_a", NOW_S)
    store.begin("batch_a", NOW_S, model=None)
    store.fail("batch_a", NOW_S, [LineError("empty_file", "")])
    assert current(store).status == "cancelling"


def test_too_late_to_cancel(store: BatchStore) -> None:
    running(store)
    store.begin_finalizing("batch_a", NOW_S)
    assert not store.cancel("batch_a", NOW_S)


def test_every_owner_sees_its_own_rows(store: BatchStore) -> None:
    store.add_file(file("file-a", "me"))
    store.add_batch(batch("batch_a", "me"))
    assert store.file("file-a", "you", NOW_S) is None
    assert store.batch("batch_a", "you") is None and store.batch("batch_a", "me") is not None
    assert store.files("you", NOW_S, purpose=None, after=None, limit=9, newest_first=True) == []
    assert store.batches("you", after=None, limit=9) == []


def test_lists_are_pages(store: BatchStore) -> None:
    for number in range(5):
        store.add_file(file(f"file-{number}", purpose="batch" if number % 2 else "batch_output"))
        store.add_batch(batch(f"batch_{number}"))

    def ids(**options: object) -> list[str]:
        values = {"purpose": None, "after": None, "limit": 2, "newest_first": True, **options}
        return [found.id[-1] for found in store.files("me", NOW_S, **values)]  # type: ignore[arg-type]

    assert ids() == ["4", "3"] and ids(after="file-3") == ["2", "1"] and ids(after="file-0") == []
    assert ids(newest_first=False, after="file-1") == ["2", "3"]
    assert ids(purpose="batch") == ["3", "1"]
    assert ids(after="file-of-nobody") == []
    assert [found.id for found in store.batches("me", after="batch_3", limit=2)] == ["batch_2", "batch_1"]
    assert store.batches("me", after="batch_unknown", limit=2) == []


def test_retention(store: BatchStore) -> None:
    running(store)
    store.add_file(file("file-b", expires_at=500))
    store.add_file(file("file-a", expires_at=500))
    assert store.file("file-b", "me", NOW_S) is None, "expired, though not deleted yet"
    assert store.forget(NOW_S, 100.0) == ["file-b"], "the other one is being read"
    store.begin_finalizing("batch_a", NOW_S)
    store.end("batch_a", NOW_S, "completed", output=None, errors=None)
    assert store.forget(NOW_S + 50, 100.0) == ["file-a"]
    assert store.batch("batch_a") is not None
    store.forget(NOW_S + 101, 100.0)
    assert store.batch("batch_a") is None


def test_stored_bytes_and_use(store: BatchStore) -> None:
    assert store.usage("me").bytes == 0 and not store.file_in_use("file-a") and not store.held_files()
    running(store)
    assert store.usage("me").owner_bytes > 50 and store.file_in_use("file-a")
    store.delete_file("file-a")
    store.begin_finalizing("batch_a", NOW_S)
    store.end("batch_a", NOW_S, "completed", output=None, errors=None)
    assert store.usage("me").bytes == 0 and store.file_ids() == set() and store.held_files()


def test_another_version_is_refused(store: BatchStore, path: Path) -> None:
    store._db.execute("UPDATE meta SET value = 99")
    with pytest.raises(ConfigError, match=r"state\.folder: .* schema version 99"):
        BatchStore(path)


def test_rubbish_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no database at all" * 100)
    with pytest.raises(sqlite3.Error):
        BatchStore(tmp_path / "x")


class Batches(RuleBasedStateMachine):
    """Any order of calls against a dictionary that says what must be true; reopening changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "b.sqlite"
        self.store = BatchStore(self.path)
        self.store.add_batch(batch())
        self.status = "validating"
        self.results: dict[int, tuple[bool, bytes]] = {}

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @precondition(lambda self: self.status == "validating")
    @rule()
    def begin(self) -> None:
        self.store.add_lines("batch_a", LINES, first=True)
        self.store.begin("batch_a", NOW_S, model=None)
        self.status = "in_progress"

    @rule(number=st.integers(0, 6), succeeded=st.booleans(), result=st.binary(max_size=3))
    def finish(self, number: int, succeeded: bool, result: bytes) -> None:
        takes = self.status in ("in_progress", "cancelling") and self._has_lines
        expected = takes and 1 <= number <= 5 and number not in self.results
        assert self.store.finish_line("batch_a", done(number, succeeded=succeeded, result=result)) == expected
        if expected:
            self.results[number] = succeeded, result

    @rule()
    def cancel(self) -> None:
        expected = self.status in ("validating", "in_progress")
        assert self.store.cancel("batch_a", NOW_S) == expected
        if expected:
            self.status = "cancelling"

    @rule()
    def finalize(self) -> None:
        self.store.begin_finalizing("batch_a", NOW_S)
        self.status = "finalizing" if self.status == "in_progress" else self.status

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = BatchStore(self.path)

    @property
    def _has_lines(self) -> bool:
        return current(self.store).in_progress_at is not None

    @invariant()
    def agrees(self) -> None:
        found = current(self.store)
        assert found.status == self.status
        good = {number for number, (succeeded, _) in self.results.items() if succeeded}
        assert (found.completed, found.failed) == (len(good), len(self.results) - len(good))
        for succeeded in (True, False):
            assert self.store.results("batch_a", succeeded=succeeded, after=0, page_bytes=999) == sorted(
                (number, result) for number, (ok, result) in self.results.items() if ok == succeeded
            )
        pending = [line.number for line in self.store.pending("batch_a", after=0, limit=9)]
        assert pending == ([number for number in range(1, 6) if number not in self.results] if self._has_lines else [])


TestBatches = Batches.TestCase
TestBatches.settings = settings(max_examples=examples(0.3), stateful_step_count=15)
