"""What `cohort profile` reads out of its own file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cohort.common.engine.profile_process import Profile
from cohort.common.engine.profiler import StepPoint, StepShape
from cohort.services.cli.profile import forward_size


def test_the_target_forward_size_of_a_profile(tmp_path: Path) -> None:
    def point(rows: int, tokens: int, context: int, seconds: float) -> StepPoint:
        return StepPoint(StepShape(rows, tokens, context), seconds, seconds, 5)

    points = [
        point(1, 64, 64, 0.064),
        point(1, 256, 256, 0.128),
        point(1, 512, 512, 0.240),
        point(1, 1024, 1024, 0.520),
        point(1, 256, 2048, 9.0),  # behind a long context: another question
        point(64, 1, 128, 0.001),  # answers are not prompts
    ]
    file = tmp_path / "points.json"
    file.write_bytes(msgspec.json.encode(Profile("m", "x86", "cpu", "float32", 2, points)))
    assert forward_size(file) == 256  # 2,000 of at most 2,133 tokens a second
