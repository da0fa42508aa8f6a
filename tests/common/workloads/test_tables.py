"""Quantile tables and rate profiles: drawn values follow the table; what is wrong is named by file, line and field."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cohort.common.errors import ConfigError
from cohort.common.workloads.lengths import Quantiles, draw
from cohort.common.workloads.tables import read_length_quantiles, read_rate_profile, read_rate_windows

QUANTILES = (
    "model,field,q,value\n"
    + "".join(
        f"m,{field},{q},{value}\n"
        for field, values in (("prompt_tokens", (10, 20, 100)), ("output_tokens", (1, 1, 5)))
        for q, value in zip((0.0, 0.5, 1.0), values, strict=True)
    )
    + "m,reason_ratio,0.0,0.5\nother,prompt_tokens,0.0,3\n"
)
WINDOWS = "model,window_start_s,rate_rps,client_cv_p50\nm,0,2.5,1.2\nm,600,0,\nm,1200,5,1.4\nn,0,9,1\n"
PROFILE = "kind,index,requests,tokens\nday,0,86400,5\nday,1,172800,5\nhour_of_day_mean,0,3600,\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


def test_quantiles_become_lengths(tmp_path: Path) -> None:
    lengths = read_length_quantiles(write(tmp_path, QUANTILES), "m")
    assert lengths.prompt == Quantiles("m prompt_tokens", (10, 20, 100))
    assert lengths.output == Quantiles("m output_tokens", (1, 1, 5))
    drawn = draw(lengths.prompt, np.random.default_rng(0), 40_000)
    assert np.quantile(drawn, [0.25, 0.5, 0.75]) == pytest.approx([15, 20, 60], abs=1.5)
    assert drawn.mean() == pytest.approx(37.5, rel=0.02)  # by hand: (10+20)/2 · ½ + (20+100)/2 · ½
    assert isinstance(lengths.prompt, Quantiles) and lengths.prompt.mean == pytest.approx(37.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (QUANTILES.replace("0.5,20", "0.5,5"), r"table\.csv:3: column 'value': 5 is below"),
        (QUANTILES.replace("0.5,20", "0.0,20"), r"table\.csv:3: column 'q'"),
        (QUANTILES.replace("0.0,10", "0.1,10"), r"table\.csv:2: column 'q': the first quantile"),
        (QUANTILES.replace("0.5,20", "half,20"), r"table\.csv:3: column 'q': 'half' is not a number"),
        (QUANTILES.replace("0.5,20", "0.5,inf"), r"table\.csv:3: column 'value': 'inf' is not a finite"),
        (QUANTILES.replace("m,prompt_tokens,1.0,100\n", ""), "must run evenly from 0 to 1"),
        (QUANTILES.replace("q,value", "q"), r"table\.csv:1: missing column 'value'"),
        (QUANTILES + "m,prompt_tokens\n", r"table\.csv:10: 2 of 4 columns; column 'q' is missing"),
    ],
)
def test_wrong_quantiles_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_length_quantiles(write(tmp_path, text), "m")


def test_an_unknown_model_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompt_tokens of model 'x'; there are: m, other"):
        read_length_quantiles(write(tmp_path, QUANTILES), "x")
    with pytest.raises(ConfigError, match="no traffic of model 'x'; there are: m, n"):
        read_rate_windows(write(tmp_path, WINDOWS), "x")


def test_windows_without_traffic_are_left_out(tmp_path: Path) -> None:
    rate = read_rate_windows(write(tmp_path, WINDOWS), "m", scale=0.1)
    assert (rate.window_s, rate.rates, rate.cv) == (600.0, (2.5, 5.0), 1.4)
    assert rate.mean_rate == pytest.approx(0.375)
    with pytest.raises(ConfigError, match=r"table\.csv:2: column 'rate_rps': -1"):
        read_rate_windows(write(tmp_path, WINDOWS.replace("2.5", "-1")), "m")


def test_profiles_are_rates(tmp_path: Path) -> None:
    path = write(tmp_path, PROFILE)
    assert read_rate_profile(path).rates == (1.0,)
    assert (read_rate_profile(path, "day").rates, read_rate_profile(path, "day").window_s) == ((1.0, 2.0), 86400.0)
    with pytest.raises(ConfigError, match="no rate profile 'week'"):
        read_rate_profile(path, "week")
    with pytest.raises(ConfigError, match=r"table\.csv:3: column 'index': 7 is not 1"):
        read_rate_profile(write(tmp_path, PROFILE.replace("day,1", "day,7")), "day")


TRACES = os.environ.get("COHORT_TRACES", "")


@pytest.mark.skipif(not TRACES, reason="COHORT_TRACES names no folder of trace files")
def test_real_tables() -> None:
    folder = Path(TRACES)
    lengths = read_length_quantiles(folder / "servegen_length_quantiles.csv.gz", "deepseek-r1")
    assert isinstance(lengths.prompt, Quantiles) and isinstance(lengths.output, Quantiles)
    assert lengths.prompt.mean == pytest.approx(1268.2, rel=0.02)
    assert lengths.output.mean == pytest.approx(1527.4, rel=0.02)
    windows = read_rate_windows(folder / "servegen_windows.csv.gz", "deepseek-r1")
    assert len(windows.rates) == 144
    assert windows.mean_rate == pytest.approx(16.015, rel=1e-3)
    days = read_rate_profile(folder / "burstgpt1_rate_profile.csv.gz", "day")
    assert len(days.rates) == 61
    assert days.mean_rate == pytest.approx(0.27, rel=0.02)
