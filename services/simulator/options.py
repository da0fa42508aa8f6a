"""The options of `cohort simulate`, `advise`, `compare`, `reproduce` and `replay`. Loads nothing heavy."""

from __future__ import annotations

import argparse

TRAFFIC_HELP = (
    "a trace file, a name of `cohort traces list`, PROMPTxOUTPUT (all requests alike), `day` (--rate: its peak; "
    "servegen-…, too), or a paper's shape by name"
)

_CLUSTER_HELP = "a name of configs/clusters or of `cohort profile --save`, a YAML file, or DEVICE:COUNT; A+B: unlike"

SIMULATE_EPILOG = """\
examples:
  cohort simulate --trace azure2023_conv --cluster a100-80:8 --model llama-2-13b --preset unified
  cohort simulate --trace 2048x512 --rate 2.5 --duration 600 --cluster a100-80:2 --model qwen2.5-14b --slo tpot=0.1
  cohort simulate … --sweep rate=1,2,4,8
  cohort simulate … --sweep preset=unified,disaggregated --json -
  cohort simulate … --slo ttft=2,tpot=0.1 --capacity 0.9
  cohort simulate --planner --trace day --cluster a100-80:4 --model qwen2.5-32b --slo ttft=2,tpot=0.1

Without --rate or --concurrency a trace keeps its own times; workloads without any arrive all at once."""


def _cluster(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument("--cluster", required=required, help=_CLUSTER_HELP)
    group.add_argument("--model", required=required, help="a file of configs/models, or a YAML file")
    group.add_argument("--tensor-parallel", type=int, metavar="N", help="devices of one instance")
    group.add_argument("--stack", help="serving stack of the device file (default: its first)")
    group.add_argument(
        "--scatter",
        type=float,
        metavar="X",
        help="coefficient of variation of an iteration's time (default: as profiled; 0 in the shipped files)",
    )
    group.add_argument(
        "--pace",
        type=float,
        metavar="X",
        help="all that the machine computes takes X times what its device's file says (default: the cluster's file, 1)",
    )
    group.add_argument(
        "--acceptance",
        default="0",
        metavar="P|FILE",
        help="with a speculation.mode: chance of a drafted token to be right, mean of the requests (default: 0), or a "
        "live worker's recording, whose requests' rates are taken",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="with speculation.mode=model: the one that drafts, as --model; its steps, weights and KV count (default: "
        "drafts take what they took in the recording of --acceptance, else nothing)",
    )
    group.add_argument(
        "--adapter-load",
        type=float,
        default=0.1,
        metavar="S",
        help="seconds to load a LoRA adapter of the trace (default: %(default)s)",
    )


def _traffic(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument("--trace", required=required, help=TRAFFIC_HELP)
    group.add_argument("--rate", type=float, metavar="R", help="requests a second instead of the trace's times")
    group.add_argument("--cv", type=float, default=1.0, help="burstiness of --rate: 1 = Poisson (default)")
    group.add_argument("--count", type=int, metavar="N", help="requests")
    group.add_argument("--duration", type=float, metavar="S", help="seconds of arrivals")
    group.add_argument("--time-scale", type=float, default=1.0, help="factor on the trace's times")
    group.add_argument("--sort", action="store_true", help="accept a trace whose times go backwards, and sort it")
    group.add_argument("--best-effort", type=float, default=0.0, metavar="SHARE", help="share of best-effort requests")
    group.add_argument("--slo", default="", metavar="ttft=S,tpot=S,deadline=S", help="SLO of every request")
    outcomes = ("refuse", "best_effort", "serve")
    group.add_argument("--if-late", choices=outcomes, default="refuse", help="what clients prefer to a missed TTFT SLO")
    group.add_argument("--max-tokens", type=int, default=0, help="what clients ask for at most; 0 = the context's rest")
    group.add_argument("--predictor", choices=("oracle", "noisy", "lognormal", "none"), default="oracle")
    group.add_argument("--predictor-sigma", type=float, default=0.0, help="tokens (`noisy`) or a factor (`lognormal`)")
    group.add_argument("--seed", type=int, default=0)


def _configuration(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("configuration")
    group.add_argument("--config", action="append", default=[], metavar="FILE", help="over the preset; may repeat")
    group.add_argument("--set", action="append", default=[], metavar="SECTION.OPTION=VALUE", help="may repeat")


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    _traffic(parser)
    _cluster(parser)
    _configuration(parser)
    parser.add_argument("--preset", default="cohort", help="of configs/presets (default: %(default)s)")
    parser.add_argument("--roles", metavar="ROLE=N,…", help="e.g. prefill=3,decode=5 (default: the preset's shares)")
    parser.add_argument("--concurrency", type=int, metavar="N", help="closed loop: N users, one request each")
    parser.add_argument("--horizon", type=float, metavar="S", help="end after S of virtual time")
    parser.add_argument("--warmup", type=float, default=0.0, metavar="S", help="virtual time before figures count")
    parser.add_argument("--sweep", metavar="rate|preset|cluster=A,B,…", help="one run per value")
    parser.add_argument("--capacity", type=float, metavar="SHARE", help="search the rate that keeps this share")
    parser.add_argument(
        "--planner", action="store_true", help="workers as the planner has them (section `planner`), and fixed shapes"
    )
    parser.add_argument(
        "--worker-start", type=float, default=20.0, metavar="S", help="with --planner: until one serves (default: 20)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything; - = standard output")


def add_advise_arguments(parser: argparse.ArgumentParser) -> None:
    _traffic(parser, required=False)  # not with --regret
    _cluster(parser, required=False)
    _configuration(parser)
    parser.add_argument("--preset", default="", metavar="A,B,…", help="candidates (default: all of configs/presets)")
    parser.add_argument("--capacity", type=float, default=0.9, metavar="SHARE", help="SLOs kept at the capacity (0.9)")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: one of each core)")
    parser.add_argument("--all", action="store_true", help="every set-up that was tried, not eight")
    parser.add_argument("--plot", metavar="FILE.svg", help="write what is printed as a picture")
    parser.add_argument("--json", metavar="FILE", help="write everything; - = standard output")
    parser.add_argument(
        "--regret",
        type=int,
        metavar="N",
        help="measure the advice itself: on N random pairs of traffic and cluster, against every set-up",
    )
    parser.add_argument("--results", metavar="FILE", help="with --regret: keep each pair there, and go on from it")


ADVISE_EPILOG = """\
examples:
  cohort advise --trace 1024x256 --rate 20 --cluster h100-80:4 --model llama-3.1-8b --slo ttft=1,tpot=0.05
  cohort advise --trace azure_conv.csv.gz --cluster a100-80:8 --model llama-3.3-70b --json advice.json
  cohort advise … --preset cohort,unified,disaggregated --tensor-parallel 2
  cohort advise --regret 10 --results regret.jsonl                        how good is the advice?

Candidates are ranked on some seeds and judged on three others, for ten minutes of traffic, or --duration; on a fast
cluster, without --duration, for as many tokens as fit into about three minutes of two cores."""


COMPARE_EPILOG = """\
examples:
  cohort compare papers --jobs 2 --results papers.jsonl
  COHORT_TRACES=~/traces cohort compare combination --results combination.jsonl        traces that do not ship
  cohort compare combination --systems cohort,bros --workloads conv,code --loads 1.2 --seeds 0,1,2
  cohort compare my-comparison.yaml --markdown table.md
  cohort compare buckets --live --workloads burst --results buckets.jsonl
  cohort compare fidelity --against live.jsonl                     the simulation beside results of --live

A comparison that was interrupted goes on where it stopped when it is given the same --results file."""


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", help="a file of configs/comparisons by name, or a YAML file like them")
    for name in ("workloads", "systems", "loads", "seeds"):
        parser.add_argument(f"--{name}", default="", metavar="A,B,…", help=f"only these {name}")
    parser.add_argument("--cluster", default="", metavar="DEVICE:N", help="in place of the file's, to simulate")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.OPTION=VALUE", help="over every system")
    parser.add_argument(
        "--live", action="store_true", help="start each system here, one after the other; seeds are rounds"
    )
    parser.add_argument("--port", type=int, default=8300, help="of live pipelines (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="simulations at once (default: %(default)s)")
    parser.add_argument("--results", metavar="FILE", help="keep every result there, as JSON lines")
    parser.add_argument(
        "--against", metavar="FILE", help="results of another run: every column beside its own, and the error"
    )
    parser.add_argument("--groups", action="store_true", help="also tables by class, SLO and length, and longest waits")
    parser.add_argument("--json", metavar="FILE", help="write the table's data; - = standard output")
    parser.add_argument("--markdown", metavar="FILE", help="write the table there; - = standard output")


REPRODUCE_EPILOG = """\
examples:
  cohort reproduce --list
  cohort reproduce --figure dynaserve-table1-code --seeds 3
  cohort reproduce --results figures.jsonl --jobs 2 --docs docs/reproduction.md --lacking

A row's verdict holds for all its seeds or is none: a gain that one seed does not have is unclear. A run that was
interrupted goes on where it stopped when it is given the same --results file; all figures take hours."""


def add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paper", metavar="NAME", help="figures of this system only")
    parser.add_argument("--figure", metavar="ID", help="figures whose id begins so")
    parser.add_argument("--list", action="store_true", help="name the figures, run nothing; with --docs, their numbers")
    parser.add_argument(
        "--seeds", type=int, default=5, metavar="N", help="of rows that chance has a part in (default: 5)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--results", metavar="FILE", help="keep every number there, and go on where it stopped")
    parser.add_argument("--lacking", action="store_true", help="only rows that --docs has not, or of fewer seeds")
    parser.add_argument(
        "--scatter", type=float, metavar="X", help="iterations' times scatter by this share (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.add_argument("--docs", metavar="FILE", help="write docs/reproduction.md there, its numbers beside it")


REPLAY_EPILOG = """\
Every file is fed to a fresh machine with the same policies, which must answer as the live process did: prints what was
compared and the first difference with its line. Exit status 1 if anything differs.

examples:
  cohort serve --set recording.folder=/tmp/run
  cohort replay /tmp/run/*.jsonl
  cohort replay /tmp/run/manager-*.jsonl --show 120"""


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recordings", nargs="+", metavar="FILE", help="what live processes wrote to recording.folder")
    parser.add_argument("--show", type=int, metavar="LINE", help="print the calls around this line instead")
    parser.add_argument("--around", type=int, default=3, metavar="N", help="calls before and after it (default: 3)")
