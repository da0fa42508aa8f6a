"""A step's sampled tokens as messages: one update per sequence, one message per gateway.

Called by `WorkerMachine` when a step has ended. Says whether a sequence is finished; ending it is the machine's.
"""

from __future__ import annotations

from cohort.common.machines.effects import Send
from cohort.common.machines.events import Sampled
from cohort.common.machines.worker.worker_state import Held, WorkerState
from cohort.common.messages import StageTimes, TokenBatch, TokenUpdate
from cohort.common.sequence import Sequence
from cohort.common.types import FinishReason, InstanceId


class TokenUpdates:
    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._updates: dict[InstanceId, list[TokenUpdate]] = {}

    def add(self, now_s: float, held: Held, sampled: Sampled) -> FinishReason | None:
        """Append the token to its sequence. Returns why the request is finished with it, or None."""
        sequence = held.sequence
        if sampled.failure:
            return self.fail(sequence, sampled.failure)
        tokens, token = sequence.tokens, sampled.token
        position = len(tokens)
        assert sequence.computed >= position, (
            f"{sequence.key}: token {position} is told, {sequence.computed} are computed"
        )
        tokens.append(token)
        finish: FinishReason | None = None
        if token in held.stop_ids:
            finish = FinishReason.STOP
        elif position + 1 >= held.most_known:
            finish = FinishReason.LENGTH
        logprobs = held.logprobs
        if sampled.logprob is not None:
            logprobs.append(sampled.logprob)
        first_here = sequence.last_token_s is None
        sequence.last_token_s = now_s
        sequence.delivered += 1
        updates = self._updates.get(held.gateway)
        if updates is None:
            updates = self._updates[held.gateway] = []
        if finish is None and not logprobs and not first_here and sequence.repeat_from is None:  # nearly all of them
            if updates and updates[-1].attempt is sequence.key:  # of the same row: they are told together
                updates[-1].tokens.append(token)
            else:
                updates.append(TokenUpdate(sequence.key, position, [token], cached_tokens=sequence.cached_tokens))
            return None
        request = sequence.request
        start = position if sequence.repeat_from is None else sequence.repeat_from
        sequence.repeat_from = None
        before = updates.pop() if updates and updates[-1].attempt is sequence.key else None
        if before is not None:  # of the same row: they are told together
            start = before.position
        times = self._times(now_s, sequence) if first_here or finish else None
        updates.append(
            TokenUpdate(
                request.attempt,
                start,
                tokens[start:],
                logprobs[start - len(request.tokens) :] if logprobs else [],
                finish,
                cached_tokens=sequence.cached_tokens,
                times=times if before is None or times is not None else before.times,
                prompt_logprobs=held.prompt_logprobs if start == request.prompt_tokens else [],
            )
        )
        return finish

    def fail(self, sequence: Sequence, why: str) -> FinishReason:
        """No other worker could do better: the request ends with this error instead of being placed again."""
        request = sequence.request
        self._updates.setdefault(request.gateway, []).append(
            TokenUpdate(request.attempt, len(sequence.tokens), finish=FinishReason.FAILED, error=why)
        )
        return FinishReason.FAILED

    def flush(self) -> None:
        for gateway, updates in self._updates.items():
            self._state.effects.append(Send(gateway, TokenBatch(self._state.setup.instance, updates)))
        self._updates.clear()

    def _times(self, now_s: float, sequence: Sequence) -> StageTimes:
        first = sequence.first_scheduled_s if sequence.first_scheduled_s is not None else now_s
        prefilled = sequence.prefill_done_s if sequence.prefill_done_s is not None else first
        return StageTimes(
            instance=self._state.setup.instance,
            queue_s=max(0.0, first - sequence.arrived_s - sequence.request.waited_s),
            prefill_s=max(0.0, prefilled - first),
            transfer_s=sequence.transfer_s,
            decode_s=max(0.0, now_s - prefilled),
            preemptions=sequence.preemptions,
        )
