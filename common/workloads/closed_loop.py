"""The running side of a `ClosedLoopPart`: which user asks next when a response ends.

Pure bookkeeping, hosted by the simulator: it calls `start` at the part's `start_s` and `answered` whenever a request of
this part ended (finished, failed or refused alike, or its user would wait forever), and sends the requests it returns
at once.
"""

from __future__ import annotations

from dataclasses import replace

from cohort.common.workloads.items import ClosedLoopPart, WorkItem


class ClosedLoopUsers:
    def __init__(self, part: ClosedLoopPart) -> None:
        self._part = part
        self._asked = 0
        self._open = 0

    @property
    def open_requests(self) -> int:
        """Questions without an answer yet; never above the part's concurrency."""
        return self._open

    @property
    def asked(self) -> int:
        return self._asked

    def start(self, now_s: float) -> list[WorkItem]:
        """The first question of every user, arriving now."""
        return self._ask(now_s, self._part.concurrency)

    def answered(self, now_s: float) -> list[WorkItem]:
        """One answer is complete: the next requests. Empty in the middle of a batch, and when the part is through."""
        if self._open == 0:
            raise ValueError("an answer to a question that was not asked")
        self._open -= 1
        if not self._part.in_batches:
            return self._ask(now_s, 1)
        return [] if self._open else self._ask(now_s, self._part.concurrency)

    def _ask(self, now_s: float, count: int) -> list[WorkItem]:
        part, questions = self._part, []
        for _ in range(count):
            cycling = part.until_s != float("inf")
            if now_s >= part.until_s or (self._asked >= len(part.items) and not cycling):
                break
            questions.append(replace(part.items[self._asked % len(part.items)], arrival_s=now_s))
            self._asked += 1
        self._open += len(questions)
        return questions
