"""What a check of `cohort doctor` says."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "warning", "problem", "skipped"]


class Finding(msgspec.Struct, frozen=True):
    """`problem`: something does not work, or will not; the exit status is 1. `warning`: it works, worse than it could.
    `cure`: what to do, a command where there is one."""

    check: str
    status: Status
    says: str
    cure: str = ""


def fine(check: str, says: str) -> Finding:
    return Finding(check, "ok", says)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, "skipped", why)


def warning(check: str, says: str, cure: str) -> Finding:
    return Finding(check, "warning", says, cure)


def problem(check: str, says: str, cure: str) -> Finding:
    return Finding(check, "problem", says, cure)


def refused(check: str, error: Exception, cure: str = "") -> Finding:
    """Return what the start would refuse, in its words. `cure`: where the error names none behind a semicolon."""
    says, _, named = str(error).partition("; ")
    return problem(check, says, named or cure)


def size(count: float) -> str:
    """Format a number of bytes for a person."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"
