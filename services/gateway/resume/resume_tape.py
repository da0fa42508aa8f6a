"""All that a resumable stream was given so far, for whichever connection reads it.

    Streams ─▶ put ─▶ unwritten ─▶ journal ─▶ written ─▶ log ─▶ the reader of now

A mailbox that remembers: `streams.py` fills it as any other, `resume_journal.py` writes what came before a reader sees
it, and a later connection reads from the place that its client names. Its size is that of the request's output, which
`preparation.py` bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cohort.common.errors import RequestError
from cohort.common.messages import TokenLogprob
from cohort.common.types import FinishReason
from cohort.services.gateway.generation.delta import Delta, Mailbox


class Tape(Mailbox):
    def __init__(self, body: bytes, *, indexes: Sequence[int] = (), log: dict[int, Delta] | None = None) -> None:
        """`body`: of the request, until it is written. `indexes`: the choices that are put here by their place among
        these; () = all of them. `log`: by choice, what an earlier gateway wrote."""
        super().__init__()
        self.body = body
        self.log: dict[int, Delta] = log or {}
        self.error: RequestError | None = None
        """Read by the reader, so that there is nothing after it."""
        self.reader: Mailbox = Mailbox()
        self._indexes = indexes
        self._unwritten: dict[int, Delta] = {}
        self._changed: Callable[[], None] | None = None

    def put(
        self,
        index: int,
        *,
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
        finish: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> None:
        unwritten = self._of(index)
        unwritten.tokens += tokens
        unwritten.logprobs += logprobs
        unwritten.finish = finish or unwritten.finish
        unwritten.error = error or unwritten.error
        if self._changed is not None:
            self._changed()

    def put_plain(self, index: int, tokens: Sequence[int]) -> None:
        """Never past what writes it."""
        self._of(index).tokens += tokens
        if self._changed is not None:
            self._changed()

    def _of(self, index: int) -> Delta:
        choice = self._indexes[index] if self._indexes else index
        unwritten = self._unwritten.get(choice)
        if unwritten is None:
            unwritten = self._unwritten[choice] = Delta(choice)
        return unwritten

    def begin(self, changed: Callable[[], None]) -> None:
        """From now on `changed` is called whenever there is something to write."""
        self._changed = changed
        if self._unwritten:
            changed()

    def take_unwritten(self) -> list[Delta]:
        deltas, self._unwritten = list(self._unwritten.values()), {}
        return deltas

    def written(self, deltas: Sequence[Delta]) -> None:
        """These may be seen now."""
        for delta in deltas:
            known = self.log.get(delta.index)
            if known is None:
                known = self.log[delta.index] = Delta(delta.index)
            known.merge(delta)
            self.error = delta.error or self.error
            self._hand(delta)

    def read_on(self, mailbox: Mailbox) -> None:
        """Another reader, which has what it needs of the log; the one before gets nothing more."""
        self.reader = mailbox

    def _hand(self, delta: Delta) -> None:
        if not (delta.logprobs or delta.finish or delta.error):
            self.reader.put_plain(delta.index, delta.tokens)
            return
        self.reader.put(
            delta.index, tokens=delta.tokens, logprobs=delta.logprobs, finish=delta.finish, error=delta.error
        )
