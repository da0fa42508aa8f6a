"""How good predictions are on answers that were not learned from, against guesses that need no model. Pure."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cohort.common.errors import ConfigError
from cohort.common.types import Prediction
from cohort.services.bench.study.answers import Answer
from cohort.services.length_predictor.buffer import Observation, ObservationBuffer
from cohort.services.length_predictor.features import extract
from cohort.services.length_predictor.judgement import Judgement, judge
from cohort.services.length_predictor.model import LengthModel, to_prediction
from cohort.services.length_predictor.refinement import Refiner

Floats = NDArray[np.float64]
States = dict[int, NDArray[np.float16]]

_FOLDS = 5


def split(answers: Sequence[Answer], held_out: float, seed: int = 0) -> tuple[list[Answer], list[Answer]]:
    """Training and held-out part, drawn at random but the same for a seed."""
    order = np.random.default_rng(seed).permutation(len(answers))
    first = round(len(answers) * (1.0 - held_out))
    return [answers[i] for i in order[:first]], [answers[i] for i in order[first:]]


def fit(answers: Sequence[Answer]) -> LengthModel:
    """The model the service would have after these answers."""
    from cohort.services.length_predictor.training import train

    buffer = ObservationBuffer(len(answers))
    for answer in answers:
        length = max(1, answer.output_tokens)
        buffer.add(Observation(extract(answer.facts), length, answer.max_tokens, answer.truncated))
    return train(buffer.dataset(), version=1)


def report(answers: Sequence[Answer], held_out: float, states: States | None = None) -> list[Judgement]:
    """The model against three guesses that need none, on answers it has not seen; with `states` also the refined
    prediction. Raises `ConfigError`."""
    if states is not None:
        answers = [answer for answer in answers if answer.index in states]
    known, unseen = split(answers, held_out)
    if len(known) < 20 or len(unseen) < 5:
        raise ConfigError(f"{len(answers)} answers are too few to learn and judge from")
    model = fit(known)
    predictions = [to_prediction(model.predict_log(extract(answer.facts)), answer.max_tokens) for answer in unseen]
    real = np.array([answer.output_tokens for answer in unseen], dtype=np.float64)
    seen = np.array([answer.output_tokens for answer in known], dtype=np.float64)
    count = len(unseen)

    def guess(value: float, p90: float) -> tuple[Floats, Floats]:
        return np.full(count, value), np.full(count, p90)

    p90 = float(np.quantile(seen, 0.9))
    limit = np.array([float(answer.max_tokens) for answer in unseen])
    ours = np.array([p.mean for p in predictions]), np.array([p.p90 for p in predictions])
    refined: list[Judgement] = []
    if states is not None:
        second = refine(known, unseen, [math.log(p.mean) for p in predictions], states)
        p90s = np.array([p.p90 for p in second])
        refined = [
            judge("refined", np.array([p.mean for p in second]), p90s, real),
            judge("refined median", np.array([p.p50 for p in second]), p90s, real),
        ]
    return [
        judge("model", *ours, real),
        judge("model's median", np.array([p.p50 for p in predictions]), ours[1], real),
        *refined,
        judge("mean", *guess(float(seen.mean()), p90), real),
        judge("median", *guess(float(np.median(seen)), p90), real),
        judge("max_tokens", limit, limit, real),
    ]


def refine(
    known: Sequence[Answer], unseen: Sequence[Answer], base_log_means: Sequence[float], states: States
) -> list[Prediction]:
    """E4 · what the second prediction says of the unseen after all known requests have finished, in any order.

    Live it learns from first predictions made before the answer was known; so here a known answer's first prediction
    comes from a model that was fitted without it.
    """
    refiner = Refiner(len(states[known[0].index]))
    for fold in range(_FOLDS):
        model = fit([answer for i, answer in enumerate(known) if i % _FOLDS != fold])
        for answer in known[fold::_FOLDS]:
            base = to_prediction(model.predict_log(extract(answer.facts)), answer.max_tokens)
            state = states[answer.index].astype(np.float64)
            length = max(1, answer.output_tokens)
            refiner.learn(math.log(base.mean), state, length, answer.max_tokens, answer.truncated)
    return [
        to_prediction(refiner.predict_log(base, states[answer.index].astype(np.float64)), answer.max_tokens)
        for answer, base in zip(unseen, base_log_means, strict=True)
    ]


def read_states(path: Path) -> States:
    """Hidden states by the index of their prompt. Raises `ConfigError`."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            return dict(zip(saved["index"].tolist(), saved["states"], strict=True))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"--states {path}: {error}") from error
