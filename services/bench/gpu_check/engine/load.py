"""What the users of a pipeline send. Read by `pipeline` and `timelines`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Users who wait for their responses, and what they send."""

    users: int
    requests: int
    prompt: int
    output: int

    def words(self, body: str) -> tuple[str, ...]:
        """Return the options of `cohort bench`."""
        lengths = (f"--input-len={self.prompt}", f"--output-len={self.output}")
        users = (f"--concurrency={self.users}", f"--num-requests={self.requests}", f"--warmup={self.users}")
        return (*users, *lengths, f"--extra-body={body}")
