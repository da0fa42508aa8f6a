"""The ledger: every request this gateway owns, from its arrival to its last token.

    OPEN ──submitted──▶ WAITING ──placed──▶ PLACED ──token──▶ RUNNING
      ▲                    │                   │                 │
      └────── lost: attempt + 1, tokens so far become prompt ────┤
                                                                 ▼
                                                    ended (forgotten; one final delivery)

Decides what a message about a request means: which of its tokens are new, whether an attempt is lost and must be
resubmitted, when a request has ended. `gateway.py` performs the actions. Delivery is exactly once: whatever workers and
managers repeat, reorder or lose, the client gets every position once, in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from cohort.common.errors import InvariantViolated, RequestError, busy
from cohort.common.machines.effects import Deliver, Fail
from cohort.common.machines.entry import Entry, State
from cohort.common.messages import Placed, Refused, StageTimes, TokenUpdate
from cohort.common.policies.interface import MAX_RETRY_S, MIN_RETRY_S
from cohort.common.types import Attempt, FinishReason, InstanceId, Request, RequestId

_TOKENS_COME_S = 1.0
"""Time since a request's last token: longer than a worker's messages are apart, however far this gateway is behind."""


@dataclass(slots=True)
class Waiting:
    """Waiting requests of one owner that were never placed, and their prompt and expected output tokens."""

    requests: int = 0
    tokens: float = 0.0


# -- Actions that the ledger requests, besides the effects `Deliver` and `Fail` ------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitAttempt:
    """Hand the entry's current attempt to the manager."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """Ask the manager and these workers to free all that they hold of this attempt."""

    attempt: Attempt
    holders: tuple[InstanceId, ...]
    reason: str


Action = Deliver | Fail | SubmitAttempt | CancelAttempt


class Ledger:
    def __init__(self, *, stall_timeout_s: float, request_timeout_s: float, max_attempts: int) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._request_timeout_s = request_timeout_s
        self._max_attempts = max_attempts
        self._entries: dict[RequestId, Entry] = {}
        self.resubmitted_total = 0
        self.dropped_tokens_total = 0
        self.waiting_requests = 0
        """Requests that were never placed so far; admission bounds their number."""
        self.waiting_online = 0
        """Online requests among them; batch work starts nothing new meanwhile."""
        self.waiting_tokens = 0.0
        self._waiting_of: dict[str, Waiting] = {}
        """Waiting requests by owner; only of owners that have some."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: RequestId) -> Entry | None:
        return self._entries.get(request_id)

    def entries(self) -> Iterable[Entry]:
        return self._entries.values()

    def waiting_of(self, owner: str) -> Waiting:
        """Return the owner's waiting requests; none for an owner without a name."""
        return self._waiting_of.get(owner) or Waiting()

    # -- From the client's side ------------------------------------------------------------------------------------

    def open(
        self,
        now_s: float,
        request: Request,
        *,
        expected_output: float = 0.0,
        owner: str = "",
        together: tuple[RequestId, ...] = (),
    ) -> Entry:
        """Own a request. It is submitted when the caller decides (a prediction may come first). Output that it brings
        was generated for another gateway, and is not delivered again. `together`: as in `Entry`."""
        if request.request_id in self._entries:
            raise ValueError(f"request {request.request_id} is open already")
        known = list(request.tokens[request.prompt_tokens :])
        if known:
            request = msgspec.structs.replace(request, tokens=request.tokens[: request.prompt_tokens])
        entry = Entry(
            request=request,
            opened_s=now_s,
            expires_s=now_s + self._request_timeout_s,
            owner=owner,
            prediction=request.prediction,
            last_progress_s=now_s,
            queued_tokens=request.prompt_tokens + max(1.0, expected_output),
            sibling_ids=together,
            output=known,
        )
        assert entry.queued_tokens > 0, f"{entry} waits and counts for nothing"
        self._entries[request.request_id] = entry
        self.waiting_requests += 1
        self.waiting_online += request.online
        self.waiting_tokens += entry.queued_tokens
        if owner:
            own = self._waiting_of.setdefault(owner, Waiting())
            own.requests += 1
            own.tokens += entry.queued_tokens
        return entry

    def submit(self, request_id: RequestId) -> list[Action]:
        """Hand the current attempt over, unless that happened already or nothing is left to compute."""
        entry = self._entries.get(request_id)
        if entry is None or entry.state is not State.OPEN:
            return []
        finish = _finish_by_tokens(entry)
        if finish is not None:  # a client may ask for no token at all
            self._end(entry)
            return [Deliver(entry, [], [], finish)]
        return [SubmitAttempt(entry)]

    def submitted(self, now_s: float, request_id: RequestId) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.state is State.OPEN:
            entry.state = State.WAITING
            entry.last_progress_s = now_s
            entry.add_moment(now_s, "submitted")

    def undelivered(self, attempt: Attempt) -> None:
        entry = self._entries.get(attempt.request_id)
        if entry is not None and entry.attempt == attempt and entry.state is State.WAITING:
            entry.state = State.OPEN

    def close(self, request_id: RequestId, reason: str) -> list[Action]:
        """Free what the request holds everywhere: the client has enough (a stop string) or is gone."""
        entry = self._entries.get(request_id)
        if entry is None:
            return []
        self._end(entry)
        return self._release(entry, reason)

    def fail_all(self, error: RequestError) -> list[Action]:
        return [action for entry in list(self._entries.values()) for action in self._fail(entry, error)]

    # -- From workers ----------------------------------------------------------------------------------------------

    def next_tokens(self, now_s: float, sender: InstanceId, update: TokenUpdate) -> Deliver | None:
        """Deliver an update that holds the next tokens of a running request and nothing else, as nearly all do. None:
        it holds more than that, and `tokens` judges it (with the same result for all, in several times the time)."""
        attempt = update.attempt
        entry = self._entries.get(attempt.request_id)
        if entry is None or entry.state is not State.RUNNING or update.finish is not None:
            return None
        tokens, output = update.tokens, entry.output
        known = len(output)
        if (
            tokens
            and update.times is None
            and not update.logprobs
            and not entry.with_logprobs
            and update.position == entry.prompt_tokens + known
            and known + len(tokens) < entry.most_tokens
            and tokens[-1] not in entry.stop_ids
            and sender in entry.holders
            and attempt == entry.attempt
        ):
            assert not entry.queued_tokens, f"{entry} has tokens and counts as waiting"
            output.extend(tokens)
            entry.last_token_s = entry.last_progress_s = now_s
            return Deliver(entry, tokens, [])
        return None

    def tokens(self, now_s: float, sender: InstanceId, update: TokenUpdate) -> list[Action]:
        entry = self._entries.get(update.attempt.request_id)
        if entry is None:
            # Ended here (a stop string, say) while the worker went on: its next message would be void as well.
            return [] if update.finish is not None else [CancelAttempt(update.attempt, (sender,), "unknown request")]
        if update.attempt != entry.attempt:
            self.dropped_tokens_total += len(update.tokens)
            older = update.attempt < entry.attempt and update.finish is None
            return [CancelAttempt(update.attempt, (sender,), "superseded")] if older else []
        if update.times is not None and sender not in entry.times:
            entry.add_moment(now_s, "first token from", sender)
        self._note(entry, sender, update)
        return self._judge(now_s, entry, sender, update)

    def _judge(self, now_s: float, entry: Entry, sender: InstanceId, update: TokenUpdate) -> list[Action]:
        if update.finish is FinishReason.FAILED and update.is_clients:
            # Its grammar: the only cause so far. Whoever has the body puts the client's field in its place.
            return self._fail(entry, RequestError(f"The request cannot be answered: {update.error}", param="grammar"))
        if update.finish is FinishReason.FAILED:
            return self._broken(entry, f"The request failed on a worker: {update.error or 'no reason given'}")
        if update.finish is FinishReason.CANCELLED:
            return self._lost(entry, now_s, "cancelled", f"cancelled by {sender}")
        if update.position > entry.known:
            return self._lost(entry, now_s, "gap", f"tokens {entry.known} to {update.position} never arrived")
        if update.finish is not None and update.position + len(update.tokens) < entry.known:
            end = update.position + len(update.tokens)
            return self._lost(
                entry, now_s, "contradiction", f"{sender} ended it at {end}, but {entry.known} tokens are known"
            )
        new = entry.known - update.position
        tokens, logprobs = update.tokens[new:], update.logprobs[new:]
        self.dropped_tokens_total += len(update.tokens) - len(tokens)
        if entry.request.sampling.logprobs >= 0 and len(update.logprobs) != len(update.tokens):
            content = f"{len(update.tokens)} tokens with {len(update.logprobs)} log-probabilities"
            return self._broken(entry, f"{sender} sent {content}")
        if entry.request.sampling.prompt_logprobs >= 0 and not entry.output and tokens:
            entry.prompt_logprobs = update.prompt_logprobs
            if len(entry.prompt_logprobs) != entry.request.prompt_tokens - 1:
                content = f"{len(entry.prompt_logprobs)} log-probabilities for a prompt of"
                return self._broken(entry, f"{sender} sent {content} {entry.request.prompt_tokens} tokens")
        if entry.request.sampling.pooling and not entry.output and tokens:
            entry.pooled, last = update.pooled, entry.request.prompt_tokens - 1
            start = 0 if entry.request.sampling.pooling == "mean" else last
            if entry.pooled is None or (entry.pooled.start, entry.pooled.end) != (start, last + 1):
                span = "none" if entry.pooled is None else f"those of {entry.pooled.start} to {entry.pooled.end}"
                return self._broken(entry, f"{sender} sent {span} as states of positions {start} to {last + 1}")
        headroom = entry.request.sampling.max_tokens - len(entry.output)
        tokens, logprobs = tokens[:headroom], logprobs[:headroom]
        if tokens:
            if entry.first_token_s is None:
                entry.first_token_s = now_s
                entry.first_times = _sum_times(entry.times.values())
            entry.last_token_s = entry.last_progress_s = now_s
            entry.state = State.RUNNING
            self._leave_queue(entry)
            before = entry.known
            entry.output.extend(tokens)
            entry.logprobs.extend(logprobs)
            assert update.position + new == before, f"{entry}: position {update.position + new} is told after {before}"
            assert len(entry.output) <= entry.most_tokens, f"{entry} has more tokens than were asked for"
        finish = update.finish or _finish_by_tokens(entry)
        if finish is not None:
            self._end(entry)
        return [Deliver(entry, tokens, logprobs, finish)] if tokens or finish else []

    # -- From the manager ------------------------------------------------------------------------------------------

    def placed(self, now_s: float, message: Placed) -> list[Action]:
        entry = self._entries.get(message.attempt.request_id)
        if entry is None:
            # Cancelled while it was being placed. The manager got the cancel too; the workers may not have.
            return [CancelAttempt(message.attempt, tuple(message.instances), "cancelled")]
        if message.attempt != entry.attempt:
            return []
        if entry.state is not State.RUNNING:
            entry.state = State.PLACED
            self._leave_queue(entry)
            entry.last_progress_s = now_s
        if entry.first_token_s is None:
            entry.bucket_s = message.queued_s
        entry.placement_reason = message.reason
        entry.add_moment(now_s, "placed", ", ".join(message.instances), message.reason)
        if message.best_effort:
            entry.best_effort, entry.forecast_s = True, message.forecast_s
        entry.holders.update(message.instances)
        entry.instances.extend(name for name in message.instances if name not in entry.instances)
        return []

    def attempts_lost(
        self, now_s: float, attempts: Collection[Attempt], reason: str, *, unheld: bool = False
    ) -> list[Action]:
        """Submit these lost attempts again, in the order in which their requests came. The manager, which lets nothing
        overtake what it expects to come again, is sent those that are over. An `unheld` one whose tokens still arrive
        has been computed, and this gateway is behind: should they end too soon, the manager reports it again."""
        lost = {
            attempt: entry
            for attempt in attempts
            if (entry := self._entries.get(attempt.request_id)) is not None and attempt == entry.attempt
        }
        over = [attempt for attempt in attempts if attempt.request_id not in self._entries]
        actions: list[Action] = [CancelAttempt(attempt, (), "unknown request") for attempt in over]
        for entry in sorted(lost.values(), key=lambda entry: entry.request.arrival_s):
            if not (unheld and entry.state is State.RUNNING and now_s - entry.last_progress_s < _TOKENS_COME_S):
                actions += self._lost(entry, now_s, "lost", reason)
        return actions

    def refused(self, message: Refused) -> list[Action]:
        """Fail all choices of the request's HTTP request: the client gets one error, and no other is served in vain."""
        entry = self._entries.get(message.attempt.request_id)
        if entry is None or message.attempt != entry.attempt:
            return []
        error = _refusal(entry, message)
        actions: list[Action] = []
        for name in entry.sibling_ids or (entry.request_id,):
            each = self._entries.get(name)
            if each is not None:
                each.refused_because, each.forecast_s = message.cause or "other", message.forecast_s
                actions += self._fail(each, error)
        return actions

    def manager_replaced(self, now_s: float) -> list[Action]:
        """Resubmit what waited at a manager whose successor knows nothing of its queue. The next attempts replace the
        former ones: one of them may have been placed unknown to this gateway."""
        actions: list[Action] = []
        for entry in list(self._entries.values()):
            if entry.state is State.WAITING:
                entry.unplaced += 1
                actions += self._lost(entry, now_s, "manager", "the manager was replaced while the request waited")
        return actions

    def tick(self, now_s: float) -> list[Action]:
        """Check deadlines: stalled attempts are resubmitted, requests past their time fail."""
        actions: list[Action] = []
        for entry in list(self._entries.values()):
            if now_s >= entry.expires_s:
                late = f"The request did not finish within {self._request_timeout_s:g} s"
                why = f"{late} ({len(entry.output)} tokens were produced)."
                actions += self._fail(entry, RequestError(why, status=504, type_="timeout_error"))
            elif (
                entry.state in (State.PLACED, State.RUNNING) and now_s - entry.last_progress_s >= self._stall_timeout_s
            ):
                actions += self._lost(entry, now_s, "stall", f"no token for {self._stall_timeout_s:g} s")
        return actions

    def unsubmitted(self) -> list[Entry]:
        """Return the entries whose current attempt has not reached the manager's connection."""
        return [entry for entry in self._entries.values() if entry.state is State.OPEN]

    def outstanding(self) -> list[Attempt]:
        return [entry.attempt for entry in self._entries.values() if entry.state is not State.OPEN]

    def check(self) -> None:
        waiting = [entry for entry in self._entries.values() if entry.queued_tokens]
        counted = (self.waiting_requests, self.waiting_online)
        found = (len(waiting), sum(entry.request.online for entry in waiting))
        if counted != found:
            raise InvariantViolated(f"{counted} requests (of them online) count as waiting, but {found} wait")
        tokens = sum(entry.queued_tokens for entry in waiting)
        if abs(self.waiting_tokens - tokens) > 1e-6 * max(1.0, tokens):
            raise InvariantViolated(f"{self.waiting_tokens} tokens count as waiting, but {tokens} wait")
        by_owner: dict[str, int] = {}
        for entry in waiting:
            if entry.owner:
                by_owner[entry.owner] = by_owner.get(entry.owner, 0) + 1
        if {owner: own.requests for owner, own in self._waiting_of.items()} != by_owner:
            raise InvariantViolated(f"{self._waiting_of} count as waiting by owner, but {by_owner} wait")
        for request_id, entry in self._entries.items():
            if entry.request_id != request_id:
                raise InvariantViolated(f"{entry.attempt} is kept under the name {request_id}")
            if entry.queued_tokens and entry.state is State.RUNNING:
                raise InvariantViolated(f"{entry.attempt} has tokens and counts as waiting")
            if len(entry.output) >= max(1, entry.request.sampling.max_tokens):
                raise InvariantViolated(f"{entry.attempt} has all its tokens and is not over")

    def _note(self, entry: Entry, sender: InstanceId, update: TokenUpdate) -> None:
        """Record the worker, its stage times, and how much the prefix cache saved."""
        entry.holders.add(sender)
        if sender not in entry.instances:
            entry.instances.append(sender)
        if update.times is not None:
            entry.times[update.times.instance or sender] = update.times
        if not entry.output:
            entry.cached_tokens = max(entry.cached_tokens, min(update.cached_tokens, entry.request.prompt_tokens))

    def _lost(self, entry: Entry, now_s: float, kind: str, reason: str) -> list[Action]:
        """Replace the current attempt by the next one: no worker serves it any more, or not in a way that helps."""
        cancel = self._release(entry, reason)
        finish = _finish_by_tokens(entry)
        if finish is not None:  # only the word of its end was lost
            self._end(entry)
            return [*cancel, Deliver(entry, [], [], finish)]
        placed = entry.attempt.number + 1 - entry.unplaced
        if placed >= self._max_attempts:
            why = f"The request was placed {placed} times and lost each time (last: {reason})."
            return self._fail(entry, unavailable(why, retry_after_s=1.0))
        entry.add_moment(now_s, "lost", ", ".join(sorted(entry.holders)), reason)
        assert self._entries.get(entry.request_id) is entry, f"{entry} is over, and lost"
        before, entry.attempt = entry.attempt, entry.attempt.next()
        assert entry.attempt > before, f"{entry.attempt} comes after {before}"
        entry.lost_because = reason
        entry.lost_kind = kind
        entry.state = State.OPEN
        entry.holders.clear()
        entry.last_progress_s = now_s
        self.resubmitted_total += 1
        return [*cancel, SubmitAttempt(entry)]

    def _fail(self, entry: Entry, error: RequestError) -> list[Action]:
        self._end(entry)
        return [*self._release(entry, error.message), Fail(entry, error)]

    def _broken(self, entry: Entry, why: str) -> list[Action]:
        return self._fail(entry, RequestError(why, status=500, type_="server_error"))

    def _end(self, entry: Entry) -> None:
        assert self._entries.get(entry.request_id) is entry, f"{entry} ends a second time"
        del self._entries[entry.request_id]
        self._leave_queue(entry)
        assert self.waiting_requests <= len(self._entries), f"{self.waiting_requests} of {len(self._entries)} wait"

    def _leave_queue(self, entry: Entry) -> None:
        if entry.queued_tokens:
            self.waiting_requests -= 1
            self.waiting_online -= entry.request.online
            self.waiting_tokens -= entry.queued_tokens
            assert 0 <= self.waiting_online <= self.waiting_requests, (
                f"{self.waiting_requests} requests wait, {self.waiting_online} of them online"
            )
            if entry.owner:
                own = self._waiting_of[entry.owner]
                own.requests -= 1
                own.tokens -= entry.queued_tokens
                assert own.requests >= 0, f"{own.requests} requests of {entry.owner} wait"
                if not own.requests:
                    del self._waiting_of[entry.owner]
            entry.queued_tokens = 0.0

    def _release(self, entry: Entry, reason: str) -> list[Action]:
        if entry.state is State.OPEN and not entry.holders:
            return []  # this attempt never left the gateway
        return [CancelAttempt(entry.attempt, tuple(sorted(entry.holders)), reason)]


def unavailable(why: str, retry_after_s: float) -> RequestError:
    return RequestError(why, status=503, type_="service_unavailable_error", retry_after_s=retry_after_s)


def _refusal(entry: Entry, message: Refused) -> RequestError:
    status, reason = message.status, message.reason
    if message.forecast_s:
        reason = (
            f"The server is busy: the first token is predicted {message.forecast_s:.2f} s after the request's arrival, "
            f"its TTFT SLO is {entry.request.slo.ttft_s:g} s. Please retry later, or say in cohort.if_late what you "
            "would rather have."
        )
    if status == 429:
        retry_after_s = min(MAX_RETRY_S, max(MIN_RETRY_S, message.retry_after_s))
        return busy(reason, retry_after_s)
    kind = "invalid_request_error" if 400 <= status < 500 else "service_unavailable_error"
    return RequestError(reason, status=status, type_=kind)


def _finish_by_tokens(entry: Entry) -> FinishReason | None:
    """Return the finish that the tokens show. Workers ban stop tokens until `min_tokens`: one that is there counts."""
    sampling = entry.request.sampling
    if entry.output and entry.output[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(entry.output) >= sampling.max_tokens else None


def _sum_times(parts: Iterable[StageTimes]) -> StageTimes:
    total = StageTimes()
    for part in parts:
        total = StageTimes(
            queue_s=total.queue_s + part.queue_s,
            prefill_s=total.prefill_s + part.prefill_s,
            transfer_s=total.transfer_s + part.transfer_s,
            decode_s=total.decode_s + part.decode_s,
            preemptions=total.preemptions + part.preemptions,
        )
    return total
