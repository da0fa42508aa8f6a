"""Load drawn from ServeGen's tables has their rates, shares, bursts and lengths."""

from __future__ import annotations

import numpy as np
import pytest

from cohort.common.workloads.servegen import MODELS, NAMES, servegen_trace
from cohort.common.workloads.trace_files import table

PER_WINDOW = 300


@pytest.mark.parametrize("model", MODELS)
def test_rates_follow_the_windows(model: str) -> None:
    rates = np.array([float(row["rate_rps"]) for row in table("servegen_windows") if row["model"] == model])
    rates = rates[rates > 0]
    parts = np.array_split(rates, 12)
    span_s = PER_WINDOW * len(parts)
    trace = servegen_trace(f"servegen-{model}", duration_s=span_s, peak_per_s=20.0)
    assert trace.arrival_s is not None and trace.arrival_s[0] == 0.0 and trace.arrival_s[-1] < span_s
    found, _ = np.histogram(trace.arrival_s, bins=len(parts), range=(0.0, span_s))
    expected = [PER_WINDOW * 20.0 * float(part.mean()) / rates.max() for part in parts]
    assert found == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("model", MODELS)
def test_lengths_have_the_quantiles(model: str) -> None:
    rows = servegen_trace(f"servegen-{model}", peak_per_s=10.0).rows
    for field in ("prompt_tokens", "output_tokens"):
        known = {
            float(row["q"]): float(row["value"])
            for row in table("servegen_length_quantiles")
            if (row["model"], row["field"]) == (model, field)
        }
        tokens = np.array([getattr(row, field) for row in rows])
        for level in (0.25, 0.5, 0.9):
            share = float(np.mean(tokens <= round(known[level])))
            assert share == pytest.approx(level, abs=0.03), (field, level)
        assert tokens.max() <= known[1.0] and tokens.min() >= 1


def test_arrivals_are_burstier_than_poisson_and_repeat_with_their_seed() -> None:
    first, again, other = (servegen_trace(NAMES[0], peak_per_s=5.0, seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other
    spread = [np.std(gaps) / np.mean(gaps) for gaps in (np.diff(first.arrival_s or []), np.diff(other.arrival_s or []))]
    assert min(spread) > 1.15
