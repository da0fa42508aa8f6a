"""The frozen settings of a measurement over HTTP, made of its command line (`arguments`).

Called by `command`. Anything wrong is a `ConfigError` that names the option, before a request is sent.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cohort.common.errors import ConfigError
from cohort.services.bench.http.arguments import SWEEP_KEYS, SweepKey
from cohort.services.bench.output import check_writable

if TYPE_CHECKING:
    from cohort.common.workloads.traces import Trace
    from cohort.services.bench.http.load.workload import Source, WorkloadSpec
    from cohort.services.bench.http.results.report import SloLimits


@dataclass(frozen=True, slots=True)
class Single:
    """One run."""


@dataclass(frozen=True, slots=True)
class Compare:
    rounds: int


@dataclass(frozen=True, slots=True)
class Sweep:
    key: SweepKey
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Capacity:
    """`attainment` is a share (0.9), `tolerance` the relative width of the answer."""

    attainment: float
    start_rate: float
    max_rate: float
    tolerance: float


Mode = Single | Compare | Sweep | Capacity


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Everything a run needs, checked. `servers` are (name, URL)."""

    mode: Mode
    servers: tuple[tuple[str, str], ...]
    workload: WorkloadSpec
    slo: SloLimits
    model: str | None
    api_key: str | None
    endpoint: Literal["completions", "chat"] | None
    prompt_format: Literal["ids", "text"] | None
    tokenizer: Path | None
    token_range: tuple[int, int] | None
    hash_block_tokens: int
    repeat: int
    ignore_eos: bool
    temperature: float
    extra_body: dict[str, Any]
    warmup_requests: int
    request_timeout_s: float
    new_connections: bool
    max_concurrency: int | None
    prompt_salt: int
    json_path: str | None
    csv_path: Path | None
    plot_path: Path | None
    quiet: bool
    settings: dict[str, Any]


def from_args(args: argparse.Namespace) -> BenchOptions:
    """Checks everything that can be checked without the server."""
    mode = _mode(args)
    for name in (
        "num_requests",
        "concurrency",
        "max_concurrency",
        "limit",
        "max_prompt",
        "max_output",
        "hash_block",
        "repeat",
        "rounds",
        "rate",
        "time_scale",
        "duration_s",
        "request_timeout_s",
        "max_rate",
        "tolerance",
    ):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{_flag(name)} must be above 0, not {value:g}")
    for name in ("cv", "warmup", "seed", "temperature", "prompt_salt"):
        value = getattr(args, name)
        if value is not None and not value >= 0:
            raise ConfigError(f"{_flag(name)} must not be negative")
    texts = "--dataset" if args.dataset is not None else "--workload" if args.workload is not None else None
    if texts is not None and args.prompt_format == "ids":
        raise ConfigError(f"{texts} holds texts; --prompt-format ids cannot be had")
    endpoint: Literal["completions", "chat"] | None = args.endpoint or ("chat" if texts is not None else None)
    if endpoint == "chat" and args.prompt_format == "ids":
        raise ConfigError("--endpoint chat takes no token ids; use --prompt-format text")
    _check_load_is_free(args, mode)
    workload = _workload(args, mode)
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name != "api_key" and isinstance(value, str | int | float | bool | list | Path | None)
    }
    return BenchOptions(
        mode=mode,
        servers=_servers(args.compare) if args.compare else (("server", args.url),),
        workload=workload,
        slo=_slo(args, mode, {name for name, _ in workload.class_mix}),
        model=args.model,
        api_key=args.api_key,
        endpoint=endpoint,
        prompt_format=None if args.prompt_format == "auto" else args.prompt_format,
        tokenizer=args.tokenizer,
        token_range=_token_range(args.token_range),
        hash_block_tokens=args.hash_block,
        repeat=args.repeat or 0,
        ignore_eos=texts is None if args.ignore_eos is None else args.ignore_eos,
        temperature=args.temperature,
        extra_body=_extra_body(args.extra_body),
        warmup_requests=args.warmup,
        request_timeout_s=args.request_timeout_s,
        new_connections=args.new_connections,
        max_concurrency=args.max_concurrency,
        prompt_salt=secrets.randbits(31) if args.prompt_salt is None else args.prompt_salt,
        json_path=args.json if args.json in (None, "-") else str(check_writable(Path(args.json), "--json")),
        csv_path=check_writable(args.csv, "--csv"),
        plot_path=check_writable(args.plot, "--plot"),
        quiet=args.quiet or args.json == "-",
        settings=settings,
    )


def _mode(args: argparse.Namespace) -> Mode:
    if args.compare:
        return Compare(args.rounds)
    if args.sweep:
        return _sweep(args.sweep)
    if args.capacity:
        if not 0 < args.attainment <= 100:
            raise ConfigError(f"--attainment {args.attainment:g}: a percentage above 0 and up to 100")
        return Capacity(args.attainment / 100.0, args.rate or 1.0, args.max_rate, args.tolerance)
    return Single()


def _sweep(text: str) -> Sweep:
    name, _, listed = text.partition("=")
    key = next((known for known in SWEEP_KEYS if known == name), None)
    if key is None:
        raise ConfigError(f"--sweep {text!r}: expected {' or '.join(f'{known}=V,V' for known in SWEEP_KEYS)}")
    values = tuple(_number(part, f"--sweep {text!r}") for part in listed.split(","))
    if not all(value > 0 for value in values) or (key == "concurrency" and not all(v.is_integer() for v in values)):
        raise ConfigError(f"--sweep {text!r}: {'whole numbers' if key == 'concurrency' else 'numbers'} above 0")
    return Sweep(key, values)


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


def _check_load_is_free(args: argparse.Namespace, mode: Mode) -> None:
    """A mode that varies the load and an option that fixes it cannot both be meant."""
    if isinstance(mode, Single | Compare):
        return
    given = {
        "--rate": args.rate,
        "--concurrency": args.concurrency,
        "--all-at-once": args.all_at_once or None,
        "--time-scale": args.time_scale,
    }
    name = "--capacity"
    if isinstance(mode, Capacity):
        del given["--rate"]  # where the search starts
    else:
        name = "--sweep"
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} sets the load itself; leave out {flag}")


def _check_hash_block(trace: Trace, hash_block_tokens: int) -> None:
    """A trace made with smaller blocks would share far more than it should: its ids give that away."""
    for row in trace.rows:
        if len(row.hash_ids) > -(-row.prompt_tokens // hash_block_tokens):
            raise ConfigError(
                f"--hash-block {hash_block_tokens}: the trace has a prompt of {row.prompt_tokens} tokens with "
                f"{len(row.hash_ids)} hash ids: its blocks are of about {row.prompt_tokens // len(row.hash_ids)} tokens"
            )


def _workload(args: argparse.Namespace, mode: Mode) -> WorkloadSpec:
    # Here and not above: numpy takes a tenth of a second that `cohort --help` should not.
    from cohort.common.workloads.arrivals import AllAtOnce, Arrivals, ClosedLoop, RandomArrivals, TraceTimes
    from cohort.common.workloads.generate import FromTrace
    from cohort.services.bench.http.load.workload import WorkloadSpec

    source = _source(args)
    arrivals: Arrivals
    if args.rate is not None:
        arrivals = RandomArrivals(args.rate, args.cv)
    elif args.concurrency is not None:
        arrivals = ClosedLoop(args.concurrency)
    elif args.all_at_once:
        arrivals = AllAtOnce()
    elif args.time_scale is not None or (isinstance(source, FromTrace) and source.trace.arrival_s is not None):
        arrivals = TraceTimes(args.time_scale or 1.0)
    elif args.capacity or (isinstance(mode, Sweep) and mode.key == "rate"):
        arrivals = RandomArrivals(1.0, args.cv)
    else:
        arrivals = ClosedLoop(8)
    if isinstance(arrivals, TraceTimes):
        if not isinstance(source, FromTrace) or source.trace.arrival_s is None:
            raise ConfigError("--time-scale needs a --trace that has arrival times")
        if args.shuffle:
            raise ConfigError("--shuffle tears the trace's lengths from its times; give --rate or --concurrency")
    if args.max_concurrency is not None and isinstance(arrivals, ClosedLoop):
        raise ConfigError("--max-concurrency is for an open loop; --concurrency already bounds a closed one")
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
    from cohort.common.workloads.generate import Drawn, FromTrace, Mixed
    from cohort.common.workloads.lengths import parse_distribution, parse_mix
    from cohort.common.workloads.traces import read_trace
    from cohort.services.bench.http.load.datasets import read_dataset
    from cohort.services.bench.http.load.texts import rows_of
    from cohort.services.bench.http.load.workload import FromDataset

    sources = (("--mix", args.mix), ("--trace", args.trace), ("--dataset", args.dataset), ("--workload", args.workload))
    chosen = [flag for flag, value in sources if value]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} each say what requests look like; give one")
    if chosen and args.input_len is not None:
        raise ConfigError(f"--input-len and {chosen[0]} each say how long prompts are; give one")
    if chosen and chosen[0] not in ("--dataset", "--workload") and args.output_len is not None:
        raise ConfigError(f"--output-len and {chosen[0]} each say how long outputs are; give one")
    if args.trace is not None:
        trace = read_trace(args.trace, args.trace_format, args.limit, sort=True)
        _check_hash_block(trace, args.hash_block)
        return FromTrace(trace, args.trace.name, args.shuffle)
    output = parse_distribution(args.output_len or ("256" if args.dataset or args.workload else "64"), "--output-len")
    if args.dataset is not None:
        return FromDataset(read_dataset(args.dataset, args.limit), args.dataset.name, output, args.shuffle)
    if args.workload is not None:
        return FromDataset(rows_of(args.workload, args.seed)[: args.limit], args.workload, output, args.shuffle)
    if args.mix is not None:
        return Mixed(parse_mix(args.mix))
    return Drawn(parse_distribution(args.input_len or "128", "--input-len"), output)


def _slo(args: argparse.Namespace, mode: Mode, classes: set[str]) -> SloLimits:
    from cohort.services.bench.http.results.report import SloLimits

    limits = SloLimits(
        **{
            f"{name}_ms": _limits(getattr(args, f"slo_{name}_ms"), f"--slo-{name}-ms", classes)
            for name in ("ttft", "tpot", "itl", "e2e")
        }
    )
    if isinstance(mode, Capacity) and not limits:
        raise ConfigError("--capacity needs an objective: --slo-ttft-ms, --slo-tpot-ms, --slo-itl-ms or --slo-e2e-ms")
    return limits


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
