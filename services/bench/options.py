"""The command line of `cohort bench`: every option with unit and meaning, and the frozen settings made of them.

Called by `services/cli/bench.py` (adds the options; must stay cheap to import) and `__main__` (reads them). Anything
wrong is a `ConfigError` that names the option, before a request is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cohort.common.errors import ConfigError

if TYPE_CHECKING:
    from cohort.common.workloads.traces import Trace
    from cohort.services.bench.report import SloLimits
    from cohort.services.bench.workload import Source, WorkloadSpec

SweepKey = Literal["rate", "concurrency", "time-scale"]
SWEEP_KEYS: tuple[SweepKey, ...] = ("rate", "concurrency", "time-scale")

ENGINE_SECTIONS = ("decode", "prefill", "shares", "attention", "allocations", "growth")
"""Parts of `--engine` that can be had alone."""

_MACHINE_OPTIONS = {"engine": {"model", "dtype", "threads", "only", "quick"}, "kv_link": {"sizes", "quick"}}
"""By mode that measures the machine and no server: its options, beside those of the output."""

_OUTPUT_OPTIONS = {"json", "plot", "quiet"}

DESCRIPTION = """\
Send a stated workload to any OpenAI-style server and report what a client saw: throughput, time to first token (TTFT),
time per output token (TPOT), inter-token latency (ITL), end-to-end latency, SLO attainment and goodput."""

EXAMPLES = """\
examples:
  cohort bench                                                   8 users at once, 100 requests of 128 + 64 tokens
  cohort bench --rate 4 --duration-s 60 --slo-ttft-ms 500 --slo-tpot-ms 100
  cohort bench --mix 0.8:64x64,0.2:768x32 --concurrency 16 --json out.json --plot out.png
  cohort bench --trace conversation.jsonl --limit 500 --time-scale 2 --max-prompt 4096
  cohort bench --compare ours=localhost:8000 other=localhost:9000 --rounds 3 --rate 2
  cohort bench --capacity --attainment 90 --slo-ttft-ms 1000 --duration-s 30
  cohort bench --engine --json engine.json --plot engine.png     this machine's CPU engine, without a server
  cohort bench --kv-link                                         KV links between two processes of this machine
"""


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
    ignore_eos: bool
    temperature: float
    extra_body: dict[str, Any]
    warmup_requests: int
    request_timeout_s: float
    max_concurrency: int | None
    prompt_salt: int
    json_path: str | None
    csv_path: Path | None
    plot_path: Path | None
    quiet: bool
    settings: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="base URL (default %(default)s)")
    server.add_argument("--model", help="model id; needed only where a server has several")
    server.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="bearer key (default $OPENAI_API_KEY)"
    )
    server.add_argument(
        "--endpoint", choices=("completions", "chat"), help="default: completions; chat for a --dataset"
    )
    server.add_argument(
        "--request-timeout-s", type=float, default=600.0, metavar="S", help="per request (default %(default)g)"
    )
    server.add_argument("--extra-body", default="{}", metavar="JSON", help="merged into every request body")

    when = parser.add_argument_group("when requests arrive (default: --concurrency 8; for a trace with times, its own)")
    one = when.add_mutually_exclusive_group()
    one.add_argument("--rate", type=float, metavar="R", help="open loop, R requests/s on average, Poisson unless --cv")
    one.add_argument("--concurrency", type=int, metavar="N", help="closed loop, N users who wait for their answers")
    one.add_argument("--all-at-once", action="store_true", help="everything at second 0")
    one.add_argument("--time-scale", type=float, metavar="F", help="the trace's own times x F (0.5 = twice as fast)")
    when.add_argument(
        "--cv", type=float, default=1.0, help="variation of the gaps of --rate (1 = Poisson, 3 = bursty, 0 = even)"
    )
    when.add_argument("--num-requests", type=int, metavar="N", help="default 100; all rows of a trace")
    when.add_argument(
        "--duration-s", type=float, metavar="S", help="send for S seconds, then wait for what is in flight"
    )
    when.add_argument(
        "--max-concurrency", type=int, metavar="N", help="open loop: at most N in flight, the rest queue here"
    )

    what = parser.add_argument_group("what requests look like")
    what.add_argument(
        "--input-len",
        metavar="LEN",
        help="prompt tokens: 128, uniform:64-512, lognormal:mean=222,std=256 [,min=…,max=…] (default 128)",
    )
    what.add_argument("--output-len", metavar="LEN", help="output tokens, likewise (default 64)")
    what.add_argument("--mix", metavar="MIX", help="weighted shapes, for example 0.8:64x64,0.2:768x32")
    what.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake JSONL, Azure, BurstGPT or Cohort CSV; .gz too"
    )
    what.add_argument(
        "--trace-format", choices=("mooncake", "azure", "burstgpt", "cohort"), help="default: by its first line"
    )
    what.add_argument(
        "--hash-block", type=int, default=512, metavar="N", help="tokens per hash id of a trace (default 512)"
    )
    what.add_argument(
        "--dataset", type=Path, metavar="FILE", help="real prompts, JSON lines: prompt, messages, turns, …"
    )
    what.add_argument("--limit", type=int, metavar="N", help="read only the first N rows of a trace or dataset")
    what.add_argument("--shuffle", action="store_true", help="take the rows in an order drawn by --seed")
    what.add_argument("--max-prompt", type=int, metavar="N", help="clip longer prompts; the result says how many")
    what.add_argument("--max-output", type=int, metavar="N", help="clip longer outputs; the result says how many")
    what.add_argument("--class-mix", metavar="MIX", help="x-cohort-class by share, for example rt=0.7,be=0.3")
    what.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="force the planned output length (default: yes, but not for a --dataset)",
    )
    what.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    what.add_argument(
        "--prompt-format",
        choices=("auto", "ids", "text"),
        default="auto",
        help="token ids where the server takes them, else text (default auto)",
    )
    what.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="folder with tokenizer.json (default: the model's root)"
    )
    what.add_argument(
        "--token-range", metavar="LO:HI", help="draw ids from [LO, HI) instead of the tokenizer's vocabulary"
    )
    what.add_argument("--seed", type=int, default=0, help="decides lengths, arrivals and order (default 0)")
    what.add_argument(
        "--prompt-salt",
        type=int,
        metavar="N",
        help="decides what prompts say; drawn anew each time unless "
        "given, so that no server answers from the prefix cache of an earlier run",
    )

    slo = parser.add_argument_group("service-level objective (a request must keep all given; MS or rt=MS,be=MS)")
    slo.add_argument("--slo-ttft-ms", metavar="MS", help="first token within MS")
    slo.add_argument("--slo-tpot-ms", metavar="MS", help="mean time per later token")
    slo.add_argument("--slo-itl-ms", metavar="MS", help="99th percentile of the request's gaps between tokens")
    slo.add_argument("--slo-e2e-ms", metavar="MS", help="whole answer")

    mode = parser.add_argument_group("modes").add_mutually_exclusive_group()
    mode.add_argument("--compare", nargs="+", metavar="NAME=URL", help="several servers in turn, the same workload")
    mode.add_argument("--sweep", metavar="KEY=V,V", help=f"one run per value; KEY is one of {', '.join(SWEEP_KEYS)}")
    mode.add_argument("--capacity", action="store_true", help="search the highest rate that meets the SLO")
    mode.add_argument(
        "--engine",
        action="store_true",
        help="no server: the CPU engine's steps against their floors, taken apart, and their growth",
    )
    mode.add_argument("--kv-link", action="store_true", help="no server: KV links of this machine against ucx_perftest")
    machine = parser.add_argument_group("--engine and --kv-link (also --json, --plot, --quiet; --model is a folder)")
    machine.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="--engine: default auto")
    machine.add_argument("--threads", type=int, metavar="N", help="--engine: CPU threads (default: as a worker has)")
    machine.add_argument(
        "--only",
        nargs="+",
        choices=ENGINE_SECTIONS,
        metavar="PART",
        help=f"--engine: some of {', '.join(ENGINE_SECTIONS)}",
    )
    machine.add_argument(
        "--sizes", nargs="+", type=int, metavar="MB", help="--kv-link: message sizes (default 1 4 16 64)"
    )
    machine.add_argument("--quick", action="store_true", help="small and few: shows that it runs")
    details = parser.add_argument_group("details of modes")
    details.add_argument("--rounds", type=int, default=3, help="--compare: rounds, A B A B … (default %(default)s)")
    details.add_argument(
        "--attainment",
        type=float,
        default=90.0,
        metavar="PCT",
        help="--capacity: share within SLO (default %(default)g %%)",
    )
    details.add_argument(
        "--max-rate", type=float, default=1024.0, metavar="R", help="--capacity: never above (default %(default)g)"
    )
    details.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        metavar="F",
        help="--capacity: stop when known to within this share (default %(default)g)",
    )

    out = parser.add_argument_group("output")
    out.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="requests sent first and left out (default %(default)s)"
    )
    out.add_argument("--json", metavar="FILE", help="everything as JSON ('-': to stdout, instead of the table)")
    out.add_argument("--csv", type=Path, metavar="FILE", help="one row per request")
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="distributions and throughput over time")
    out.add_argument("--quiet", action="store_true", help="no table, no progress bar")


def machine_mode(args: argparse.Namespace) -> Literal["engine", "kv_link"] | None:
    """The mode that measures this machine, if one is asked for. Raises `ConfigError` for options of another mode: none
    is ignored."""
    mode: Literal["engine", "kv_link"] | None = "engine" if args.engine else "kv_link" if args.kv_link else None
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [name for name, default in vars(parser.parse_args([])).items() if getattr(args, name) != default]
    if mode is None:
        for owner, names in _MACHINE_OPTIONS.items():
            if stray := [name for name in given if name in names - {"model"}]:
                raise ConfigError(f"{_flag(stray[0])} belongs to {_flag(owner)}, which is not given")
        return None
    allowed = _MACHINE_OPTIONS[mode] | _OUTPUT_OPTIONS | {mode}
    if stray := [name for name in given if name not in allowed]:
        raise ConfigError(f"{_flag(mode)} measures this machine, not a server: leave out {_flag(stray[0])}")
    for name in ("threads", "sizes"):
        values = getattr(args, name)
        if values is not None and min(values if isinstance(values, list) else [values]) < 1:
            raise ConfigError(f"{_flag(name)} must be above 0")
    for option in ("json", "plot"):
        path = getattr(args, option)
        if path not in (None, "-"):
            _writable(Path(path), f"--{option}")
    return mode


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
    if args.dataset is not None and args.prompt_format == "ids":
        raise ConfigError("--dataset holds texts; --prompt-format ids cannot be had")
    endpoint: Literal["completions", "chat"] | None = args.endpoint or ("chat" if args.dataset is not None else None)
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
        ignore_eos=args.dataset is None if args.ignore_eos is None else args.ignore_eos,
        temperature=args.temperature,
        extra_body=_extra_body(args.extra_body),
        warmup_requests=args.warmup,
        request_timeout_s=args.request_timeout_s,
        max_concurrency=args.max_concurrency,
        prompt_salt=secrets.randbits(31) if args.prompt_salt is None else args.prompt_salt,
        json_path=args.json if args.json in (None, "-") else str(_writable(Path(args.json), "--json")),
        csv_path=_writable(args.csv, "--csv"),
        plot_path=_writable(args.plot, "--plot"),
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
    from cohort.services.bench.workload import WorkloadSpec

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
    from cohort.services.bench.datasets import read_dataset
    from cohort.services.bench.workload import FromDataset

    sources = (("--mix", args.mix), ("--trace", args.trace), ("--dataset", args.dataset))
    chosen = [flag for flag, value in sources if value]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} each say what requests look like; give one")
    if chosen and args.input_len is not None:
        raise ConfigError(f"--input-len and {chosen[0]} each say how long prompts are; give one")
    if chosen and chosen[0] != "--dataset" and args.output_len is not None:
        raise ConfigError(f"--output-len and {chosen[0]} each say how long outputs are; give one")
    if args.trace is not None:
        trace = read_trace(args.trace, args.trace_format, args.limit, sort=True)
        _check_hash_block(trace, args.hash_block)
        return FromTrace(trace, args.trace.name, args.shuffle)
    output = parse_distribution(args.output_len or ("256" if args.dataset else "64"), "--output-len")
    if args.dataset is not None:
        return FromDataset(read_dataset(args.dataset, args.limit), args.dataset.name, output, args.shuffle)
    if args.mix is not None:
        return Mixed(parse_mix(args.mix))
    return Drawn(parse_distribution(args.input_len or "128", "--input-len"), output)


def _slo(args: argparse.Namespace, mode: Mode, classes: set[str]) -> SloLimits:
    from cohort.services.bench.report import SloLimits

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


def _writable(path: Path | None, option: str) -> Path | None:
    """A result that cannot be written should fail before the run, not after it."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: no folder {path.parent}")
    return path


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{where}: {text!r} is not a number") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
