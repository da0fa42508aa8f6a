"""The frozen settings of a measurement over HTTP, made of its command line (`command`).

Called by `measuring`. Anything wrong is a `ConfigError` that names the option, before a request is sent.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import AllAtOnce, Arrivals, ClosedLoop, RandomArrivals, TraceTimes
from cohort.common.workloads.generate import Drawn, FromTrace, Mixed, Source
from cohort.common.workloads.lengths import parse_distribution, parse_mix
from cohort.common.workloads.servegen import NAMES as SERVEGEN
from cohort.common.workloads.servegen import PEAK_PER_S, SPAN_S, servegen_trace
from cohort.common.workloads.trace_files import names, trace_file
from cohort.common.workloads.traces import Trace, read_trace
from cohort.services.bench.http.load.workload import WorkloadSpec
from cohort.services.bench.http.results.report import SloLimits
from cohort.services.bench.output import check_output


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Checked options of a run. `servers` are (name, URL); several are compared, in `rounds` rounds."""

    servers: tuple[tuple[str, str], ...]
    workload: WorkloadSpec
    slo: SloLimits
    prompt_format: Literal["ids", "text"] | None
    token_range: tuple[int, int] | None
    extra_body: dict[str, Any]
    prompt_salt: int
    quiet: bool
    settings: dict[str, Any]
    rounds: int
    model: str | None
    api_key: str | None
    endpoint: Literal["completions", "chat"] | None
    tokenizer: Path | None
    hash_block: int
    ignore_eos: bool
    temperature: float
    warmup: int
    request_timeout_s: float
    new_connections: bool
    json: str | None


def from_args(args: argparse.Namespace) -> BenchOptions:
    """Check everything that can be checked without the server."""
    for name in (
        "num_requests",
        "concurrency",
        "limit",
        "max_prompt",
        "max_output",
        "hash_block",
        "rounds",
        "rate",
        "time_scale",
        "duration_s",
        "request_timeout_s",
    ):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{_flag(name)} must be above 0, not {value:g}")
    for name in ("cv", "warmup", "seed", "temperature", "prompt_salt"):
        value = getattr(args, name)
        if value is not None and not value >= 0:
            raise ConfigError(f"{_flag(name)} must not be negative")
    if args.endpoint == "chat" and args.prompt_format == "ids":
        raise ConfigError("--endpoint chat takes no token ids; use --prompt-format text")
    workload = _workload(args)
    check_output(args)
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name != "api_key" and isinstance(value, str | int | float | bool | list | Path | None)
    }
    made: dict[str, Any] = {
        "servers": _servers(args.compare) if args.compare else (("server", args.url),),
        "workload": workload,
        "slo": _slo(args, {name for name, _ in workload.class_mix}),
        "prompt_format": None if args.prompt_format == "auto" else args.prompt_format,
        "token_range": _token_range(args.token_range),
        "extra_body": _extra_body(args.extra_body),
        "prompt_salt": secrets.randbits(31) if args.prompt_salt is None else args.prompt_salt,
        "quiet": args.quiet or args.json == "-",
        "settings": settings,
    }
    given = {field.name: getattr(args, field.name) for field in fields(BenchOptions) if field.name not in made}
    return BenchOptions(**made, **given)


def _servers(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    servers: dict[str, str] = {}
    for pair in pairs:
        name, equals, url = pair.partition("=")
        if not (name and equals and url) or name in servers:
            raise ConfigError(f"--compare {pair!r}: expected NAME=URL with different names")
        servers[name] = url
    if len(servers) < 2:
        raise ConfigError("--compare needs at least two NAME=URL")
    return tuple(servers.items())


def _check_hash_block(trace: Trace, hash_block_tokens: int) -> None:
    """Raise `ConfigError` for a trace made with smaller blocks, whose requests would share far more."""
    for row in trace.rows:
        if len(row.hash_ids) > -(-row.prompt_tokens // hash_block_tokens):
            raise ConfigError(
                f"--hash-block {hash_block_tokens}: the trace has a prompt of {row.prompt_tokens} tokens with "
                f"{len(row.hash_ids)} hash ids: its blocks are of about {row.prompt_tokens // len(row.hash_ids)} tokens"
            )


def _workload(args: argparse.Namespace) -> WorkloadSpec:
    source = _source(args)
    timed = isinstance(source, FromTrace) and source.trace.arrival_s is not None
    arrivals: Arrivals
    if args.rate is not None and args.trace not in SERVEGEN:
        arrivals = RandomArrivals(args.rate, args.cv)
    elif args.concurrency is not None:
        arrivals = ClosedLoop(args.concurrency)
    elif args.all_at_once:
        arrivals = AllAtOnce()
    elif args.time_scale is not None or timed:
        arrivals = TraceTimes(args.time_scale or 1.0)
    else:
        arrivals = ClosedLoop(8)
    if isinstance(arrivals, TraceTimes) and not timed:
        raise ConfigError("--time-scale needs a --trace that has arrival times")
    return WorkloadSpec(
        source=source,
        arrivals=arrivals,
        num_requests=args.num_requests,
        duration_s=args.duration_s,
        max_prompt_tokens=args.max_prompt,
        max_output_tokens=args.max_output,
        class_mix=_class_mix(args.class_mix),
        seed=args.seed,
    )


def _source(args: argparse.Namespace) -> Source:
    if args.mix and args.trace:
        raise ConfigError("--mix and --trace each say what requests look like; give one")
    if chosen := "--mix" if args.mix else "--trace" if args.trace else "":
        for option, value in (("--input-len", args.input_len), ("--output-len", args.output_len)):
            if value is not None:
                raise ConfigError(f"{option} and {chosen} each say how long requests are; give one")
    if args.trace is not None:
        trace = _trace(args)
        _check_hash_block(trace, args.hash_block)
        return FromTrace(trace, Path(args.trace).name)
    if args.mix is not None:
        return Mixed(parse_mix(args.mix))
    lengths = (("--input-len", args.input_len or "128"), ("--output-len", args.output_len or "64"))
    return Drawn(*(parse_distribution(text, option) for option, text in lengths))


def _trace(args: argparse.Namespace) -> Trace:
    if args.trace in SERVEGEN:
        span_s, peak_per_s = args.duration_s or SPAN_S, args.rate or PEAK_PER_S
        return servegen_trace(args.trace, duration_s=span_s, peak_per_s=peak_per_s, seed=args.seed)
    if (path := trace_file(args.trace)) is None:
        raise ConfigError(f"--trace {args.trace}: neither a file nor one of {', '.join((*names(), *SERVEGEN))}")
    return read_trace(path, args.trace_format, args.limit, sort=True)


def _slo(args: argparse.Namespace, classes: set[str]) -> SloLimits:
    return SloLimits(
        **{
            f"{name}_ms": _limits(getattr(args, f"slo_{name}_ms"), f"--slo-{name}-ms", classes)
            for name in ("ttft", "tpot", "itl", "e2e")
        }
    )


def _limits(text: str | None, option: str, classes: set[str]) -> dict[str, float]:
    if text is None:
        return {}
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.rpartition("=")
        limit = _number(value, f"{option} {text!r}")
        if not limit > 0:
            raise ConfigError(f"{option} {text!r}: milliseconds above 0")
        if equals and name not in classes:
            raise ConfigError(f"{option} {text!r}: no class {name!r} in --class-mix")
        limits[name] = limit
    return limits


def _class_mix(text: str | None) -> tuple[tuple[str, float], ...]:
    if text is None:
        return ()
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        share = _number(value, f"--class-mix {text!r}") if equals else 0.0
        if not name or not share > 0:
            raise ConfigError(f"--class-mix {text!r}: expected NAME=SHARE,…, for example rt=0.7,be=0.3")
        shares[name] = share
    return tuple(shares.items())


def _token_range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise ConfigError(f"--token-range {text!r}: expected LO:HI with LO < HI, for example 1000:8000")
    return int(low), int(high)


def _extra_body(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body: not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError("--extra-body: expected a JSON object")
    return parsed


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{where}: {text!r} is not a number") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
