"""How many tokens prompts and outputs have: fixed, uniform, lognormal, or a weighted mix.

Pure. Called by `generate` (drawing) and by command lines (parsing); lengths from traces and datasets do not pass here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from cohort.common.errors import ConfigError

UNBOUNDED_TOKENS = 1 << 20
"""Upper clip of a lognormal that names none: no model's context is longer."""


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int


@dataclass(frozen=True, slots=True)
class Uniform:
    """Integers in [low, high], both included."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(Normal(mu, sigma)), rounded, clipped to [low, high]."""

    mu: float
    sigma: float
    low: int = 1
    high: int = UNBOUNDED_TOKENS


@dataclass(frozen=True, slots=True)
class Blend:
    """Mixture of distributions; `parts` are (weight, distribution), with weights of any sum."""

    parts: tuple[tuple[float, Fixed | Uniform | LogNormal], ...]


LengthDistribution = Fixed | Uniform | LogNormal | Blend


@dataclass(frozen=True, slots=True)
class Shape:
    """One component of a mix: `weight` of the requests have this prompt and output length."""

    weight: float
    prompt_tokens: int
    output_tokens: int

    @property
    def label(self) -> str:
        return f"{self.prompt_tokens}x{self.output_tokens}"


def draw(distribution: LengthDistribution, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Draw `count` lengths. The first n of a longer draw equal a draw of n, so `--num-requests` only truncates."""
    match distribution:
        case Fixed(tokens):
            return np.full(count, tokens, dtype=np.int64)
        case Uniform(low, high):
            return low + np.floor(rng.random(count) * (high - low + 1)).astype(np.int64)
        case LogNormal(mu, sigma, low, high):
            values = np.exp(mu + sigma * rng.standard_normal(count))
            return np.clip(np.rint(values), low, high).astype(np.int64)
        case Blend(parts):
            # Every part draws in full from a generator of its own, or a longer draw would not begin like a shorter one.
            seeds = rng.integers(0, 2**63, size=len(parts) + 1)
            edges = np.cumsum([weight for weight, _ in parts])
            at = np.random.default_rng(seeds[-1]).random(count) * edges[-1]
            picks = np.minimum(np.searchsorted(edges, at, side="right"), len(parts) - 1)
            drawn = np.stack(
                [draw(part, np.random.default_rng(seed), count) for (_, part), seed in zip(parts, seeds, strict=False)]
            )
            chosen: NDArray[np.int64] = np.take_along_axis(drawn, picks[np.newaxis, :], axis=0)[0]
            return chosen
        case _:
            assert_never(distribution)


def lognormal(mean: float, std: float, low: int = 1, high: int = UNBOUNDED_TOKENS) -> LogNormal:
    """Return the lognormal with these moments *before* it is clipped to [low, high].

    mean = exp(mu + sigma²/2), var/mean² = exp(sigma²) - 1.
    """
    sigma = math.sqrt(math.log1p((std / mean) ** 2))
    return LogNormal(math.log(mean) - sigma * sigma / 2, sigma, low, high)


def fitted_lognormal(mean: float, std: float, low: int, high: int) -> LogNormal:
    """Return the lognormal whose mean is right *after* clipping to [low, high], with the spread of `lognormal(mean,
    std)`.

    Papers name mean, minimum and maximum of what they replayed; a lognormal of that mean falls short once it is
    clipped. Found by bisection on mu: the clipped mean grows with mu and lies between low and high. Raises
    `ConfigError` for a mean that is not strictly between them.
    """
    if not low < mean < high:
        raise ConfigError(f"a mean of {mean:g} cannot come from lengths between {low} and {high}")
    sigma = lognormal(mean, std).sigma
    below, above = math.log(low) - 8 * sigma - 1, math.log(high) + 8 * sigma + 1
    for _ in range(80):
        mu = (below + above) / 2
        if _clipped_mean(mu, sigma, low, high) < mean:
            below = mu
        else:
            above = mu
    return LogNormal((below + above) / 2, sigma, low, high)


def _clipped_mean(mu: float, sigma: float, low: int, high: int) -> float:
    """Return the mean of exp(Normal(mu, sigma)) clipped to [low, high]: both atoms and what lies between."""
    at_low, at_high = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
    between = _normal_cdf(at_high - sigma) - _normal_cdf(at_low - sigma)
    return low * _normal_cdf(at_low) + high * (1 - _normal_cdf(at_high)) + math.exp(mu + sigma * sigma / 2) * between


def _normal_cdf(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def describe_length(distribution: LengthDistribution) -> str:
    match distribution:
        case Fixed(tokens):
            return f"{tokens} tokens"
        case Uniform(low, high):
            return f"uniform(low={low}, high={high})"
        case LogNormal(mu, sigma, low, high):
            return f"lognormal(mu={mu:g}, sigma={sigma:g}, low={low:g}, high={high:g})"
        case Blend(parts):
            total = sum(weight for weight, _ in parts)
            return " + ".join(f"{100 * weight / total:.3g} % {describe_length(part)}" for weight, part in parts)
        case _:
            assert_never(distribution)


def draw_shapes(mix: Sequence[Shape], rng: np.random.Generator, count: int) -> list[Shape]:
    edges = np.cumsum([shape.weight for shape in mix])
    picks = np.searchsorted(edges, rng.random(count) * edges[-1], side="right")
    return [mix[min(int(pick), len(mix) - 1)] for pick in picks]


def parse_distribution(text: str, option: str) -> LengthDistribution:
    """Parse `128`, `uniform:64-512`, `lognormal:mean=222,std=256[,min=4,max=1024]` or
    `lognormal:mu=4.98,sigma=0.92`."""
    usage = (
        f"{option} {text!r}: expected 128, uniform:64-512, lognormal:mean=222,std=256[,min=4,max=1024] "
        "or lognormal:mu=…,sigma=…"
    )
    if re.fullmatch(r"\d+", text):
        return Fixed(_at_least_one(int(text), usage))
    if found := re.fullmatch(r"uniform:(\d+)-(\d+)", text):
        low, high = int(found[1]), int(found[2])
        if low > high:
            raise ConfigError(f"{usage}; {low} is more than {high}")
        return Uniform(_at_least_one(low, usage), high)
    if text.startswith("lognormal:"):
        return _parse_lognormal(text.removeprefix("lognormal:"), usage)
    raise ConfigError(usage)


def _parse_lognormal(text: str, usage: str) -> LogNormal:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"{usage}; {part!r} is not name=number") from None
    low, high = int(values.pop("min", 1)), int(values.pop("max", UNBOUNDED_TOKENS))
    if not 1 <= low <= high:
        raise ConfigError(f"{usage}; needs 1 ≤ min ≤ max")
    if values.keys() == {"mu", "sigma"}:
        mu, sigma = values["mu"], values["sigma"]
    elif values.keys() == {"mean", "std"}:
        if values["mean"] <= 0:
            raise ConfigError(f"{usage}; mean must be above 0")
        found = lognormal(values["mean"], values["std"])
        mu, sigma = found.mu, found.sigma
    else:
        raise ConfigError(f"{usage}; got {', '.join(sorted(values)) or 'nothing'}")
    if sigma < 0 or not math.isfinite(mu + sigma):
        raise ConfigError(f"{usage}; sigma must not be negative")
    return LogNormal(mu, sigma, low, high)


def parse_mix(text: str) -> tuple[Shape, ...]:
    """Parse `0.8:64x64,0.2:768x32`: weights (any positive numbers) and prompt x output lengths."""
    shapes = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([\d.]+):(\d+)x(\d+)\s*", part)
        if not found:
            raise ConfigError(f"--mix {text!r}: {part!r} is not WEIGHT:PROMPTxOUTPUT, for example 0.8:64x64,0.2:768x32")
        try:
            shape = Shape(float(found[1]), int(found[2]), int(found[3]))
        except ValueError:
            raise ConfigError(f"--mix {text!r}: {found[1]!r} is not a number") from None
        if shape.weight <= 0 or shape.prompt_tokens < 1 or shape.output_tokens < 1:
            raise ConfigError(f"--mix {text!r}: {part!r} needs a weight above 0 and lengths of at least 1")
        shapes.append(shape)
    return tuple(shapes)


def _at_least_one(tokens: int, usage: str) -> int:
    if tokens < 1:
        raise ConfigError(f"{usage}; at least 1 token")
    return tokens
