"""What one API key may use, as one class: requests and tokens a minute, tokens a day, requests open at once.

    uses a store    `read`     one of the minute's requests, nothing else
    arrives         `enter`    before its body is read: every limit has something left, or 429
    is tokenised    `reserve`  its prompt, and what its answer may have, are taken from the tokens
    has ended       `settle`   what it did not use is given back, what it used beyond is taken after all

Minutes are token buckets, refilled all the time, so that no clock edge doubles a limit. A bucket in debt for what was
not known before refuses until it is out of it. Days are those of UTC. Times are arguments: monotonic for minutes,
wall-clock for days. Owned by `tenants.py`; with several gateways `key_shared.py` keeps the state.
"""

from __future__ import annotations

from cohort.common.config import KeyLimits
from cohort.common.errors import RequestError
from cohort.common.types import TrafficClass

MINUTE_S, DAY_S = 60.0, 86_400
_NOTHING = 1e-6
"""Tokens below which a shortfall is rounding: seconds are fractions."""
_RETRY_OPEN_S = 1.0
"""Time after which a key with all its requests open should retry: nothing shows when one ends."""


class KeyLimited(RequestError):
    """Refusal (429) by a limit of the key that asks. `again_s`: when to retry in this process, where that costs
    nothing; clients are told a second or more."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, status=429, type_="rate_limit_error", retry_after_s=retry_after_s)
        self.again_s = retry_after_s


class Bucket:
    """`limit` a minute; 0 = no limit."""

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return what is left now; negative = in debt."""
        elapsed_s = max(0.0, now_s - self._at_s)
        self._level = min(float(self.limit), self._level + elapsed_s * self.limit / MINUTE_S)
        self._at_s = max(self._at_s, now_s)
        return self._level

    def take(self, now_s: float, count: float) -> None:
        """Take `count` from the bucket; a negative one gives back."""
        self._level = min(float(self.limit), self.level(now_s) - count)

    def wait_s(self, now_s: float, count: float) -> float:
        """Return the seconds until `count` are left; 0 if they are."""
        missing = count - self.level(now_s)
        return missing * MINUTE_S / self.limit if self.limit and missing > _NOTHING else 0.0

    def relimit(self, now_s: float, limit: int) -> None:
        """Set the limit. What was used stays used."""
        used, _ = self.used(now_s)
        self.limit = limit
        self._level = limit - used

    def used(self, now_s: float) -> tuple[float, float]:
        """Return what a full bucket lacks, and when: `now_s`, or the last look if that is later."""
        used = self.limit - self.level(now_s) if self.limit else 0.0
        return used, max(self._at_s, now_s)

    def restore(self, used: float, at_s: float) -> None:
        """Restore what `used` returned."""
        self._level, self._at_s = self.limit - used, at_s


class Day:
    """`limit` a day of UTC; 0 = no limit."""

    def __init__(self, limit: int, used: int = 0, wall_s: float = 0.0) -> None:
        self.limit = limit
        self.used = used
        self.number = int(wall_s // DAY_S)

    def restore(self, number: int, used: int) -> None:
        self.number, self.used = number, used

    def level(self, wall_s: float) -> int:
        day = int(wall_s // DAY_S)
        if day > self.number:  # a clock that is set back does not begin the day again
            self.restore(day, 0)
        return self.limit - self.used

    def take(self, wall_s: float, count: int) -> None:
        self.level(wall_s)
        self.used = max(0, self.used + count)

    def wait_s(self, wall_s: float) -> float:
        return max(1.0, (self.number + 1) * DAY_S - wall_s)


class KeyBudget:
    """Budget of one key as one class. `name` and `traffic_class` are for messages."""

    def __init__(
        self,
        name: str,
        traffic_class: TrafficClass,
        limits: KeyLimits,
        now_s: float,
        wall_s: float,
        used_today: int = 0,
    ) -> None:
        self._whose = f"of key {name}, class {traffic_class}"
        self.limits = limits
        self.requests = Bucket(limits.requests_per_minute, now_s)
        self.tokens = Bucket(limits.tokens_per_minute, now_s)
        self.day = Day(limits.tokens_per_day, used_today, wall_s)
        self.open = 0
        self.reserved = 0
        """Tokens of requests that are open."""

    def relimit(self, limits: KeyLimits, now_s: float) -> None:
        self.limits = limits
        self.requests.relimit(now_s, limits.requests_per_minute)
        self.tokens.relimit(now_s, limits.tokens_per_minute)
        self.day.limit = limits.tokens_per_day

    def check(self, now_s: float, wall_s: float) -> None:
        """Raise `KeyLimited` where a limit has nothing left."""
        limits = self.limits
        if limits.concurrent_requests and self.open >= limits.concurrent_requests:
            error = self._spent(
                "concurrent_requests", limits.concurrent_requests, f"{self.open} are open", _RETRY_OPEN_S
            )
            error.again_s = 0.0  # any of them may end now
            raise error
        self._check_requests(now_s)
        if limits.tokens_per_day and self.day.level(wall_s) < 1:
            raise self._spent("tokens_per_day", limits.tokens_per_day, "none is left", self.day.wait_s(wall_s))
        if limits.tokens_per_minute and (wait_s := self.tokens.wait_s(now_s, 1)):
            raise self._spent("tokens_per_minute", limits.tokens_per_minute, "none is left", wait_s)

    def _check_requests(self, now_s: float) -> None:
        most = self.limits.requests_per_minute
        if most and (wait_s := self.requests.wait_s(now_s, 1)):
            raise self._spent("requests_per_minute", most, "none is left", wait_s)

    def admit(self, now_s: float, wall_s: float) -> None:
        self.check(now_s, wall_s)
        self.enter(now_s)

    def read(self, now_s: float, count: int = 1) -> None:
        """Count a request that only reads, ends or deletes what is stored; -1 gives it back. Raises `KeyLimited`."""
        if count > 0:
            self._check_requests(now_s)
        self.requests.take(now_s, count)

    def enter(self, now_s: float) -> None:
        """Count one more open request; called after `check`."""
        self.open += 1
        self.requests.take(now_s, 1)

    def leave(self, now_s: float, *, counts: bool) -> None:
        """Close a request. With `counts` False it was not served, and does not count in the minute."""
        self.open -= 1
        if not counts:
            self.requests.take(now_s, -1)

    def reserve(self, now_s: float, wall_s: float, tokens: int) -> None:
        """Reserve tokens. Raises `KeyLimited` while too few are left, a 400 `RequestError` beyond the limit."""
        limits = self.limits
        for name, limit in (("tokens_per_minute", limits.tokens_per_minute), ("tokens_per_day", limits.tokens_per_day)):
            if limit and tokens > limit:
                raise RequestError(
                    f"This request may use {tokens} tokens, prompt and max_tokens together, but {name} {self._whose} "
                    f"is {limit}. Ask for less.",
                    param="max_tokens",
                )
        if limits.tokens_per_day and tokens > (remaining := self.day.level(wall_s)):
            what = f"{remaining} are left, this request may use {tokens}"
            raise self._spent("tokens_per_day", limits.tokens_per_day, what, self.day.wait_s(wall_s))
        if limits.tokens_per_minute and (wait_s := self.tokens.wait_s(now_s, tokens)):
            what = f"{int(self.tokens.level(now_s))} are left, this request may use {tokens}"
            raise self._spent("tokens_per_minute", limits.tokens_per_minute, what, wait_s)
        self._charge(now_s, wall_s, tokens)
        self.reserved += tokens

    def settle(self, now_s: float, wall_s: float, reserved: int, used: int) -> None:
        """Charge `used` in place of `reserved`, whatever is left."""
        self._charge(now_s, wall_s, used - reserved)
        self.reserved -= reserved

    def _charge(self, now_s: float, wall_s: float, tokens: int) -> None:
        self.tokens.take(now_s, tokens)
        self.day.take(wall_s, tokens)

    def headers(self, now_s: float, wall_s: float) -> dict[str, str]:
        """Return headers as OpenAI names them; of the two token limits the tighter one. Empty without limits."""
        found: dict[str, str] = {}
        limits = self.limits
        if limits.requests_per_minute:
            level = self.requests.level(now_s)
            full_s = self.requests.wait_s(now_s, limits.requests_per_minute)
            found |= _three("requests", limits.requests_per_minute, level, full_s)
        tokens = []
        if limits.tokens_per_minute:
            full_s = self.tokens.wait_s(now_s, limits.tokens_per_minute)
            tokens.append((self.tokens.level(now_s), limits.tokens_per_minute, full_s))
        if limits.tokens_per_day:
            tokens.append((float(self.day.level(wall_s)), limits.tokens_per_day, self.day.wait_s(wall_s)))
        if tokens:
            level, limit, full_s = min(tokens)
            found |= _three("tokens", limit, level, full_s)
        return found

    def _spent(self, limit: str, most: int, what: str, wait_s: float) -> KeyLimited:
        return KeyLimited(
            f"Rate limit reached: {limit} {self._whose} is {most}; {what}. Please retry in {duration(wait_s)}.", wait_s
        )


def _three(what: str, limit: int, level: float, full_s: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, int(level))),
        f"x-ratelimit-reset-{what}": duration(full_s),
    }


def duration(seconds: float) -> str:
    """Format a time as OpenAI does, rounded up: 250ms, 7s, 1m30s, 5h2m0s."""
    milliseconds = -int(-seconds * 1000 // 1)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    whole = -(-milliseconds // 1000)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{f'{hours}h' if hours else ''}{f'{minutes}m' if whole >= 60 else ''}{whole % 60}s"
