"""`cohort bench` against a server: every option with unit and meaning, which `options` reads.

The benchmark itself is imported only when it runs: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

DESCRIPTION = """\
Send a stated workload to any OpenAI-style server and report what a client saw: throughput, time to first token (TTFT),
time per output token (TPOT), inter-token latency (ITL), end-to-end latency, SLOs kept of all sent and goodput."""

EXAMPLES = """\
examples:
  cohort bench                                                   8 users at once, 100 requests of 128 + 64 tokens
  cohort bench --rate 4 --duration-s 60 --slo-ttft-ms 500 --slo-tpot-ms 100
  cohort bench --mix 0.8:64x64,0.2:768x32 --concurrency 16 --json out.json
  cohort bench --trace mooncake_conversation --limit 500 --time-scale 2 --max-prompt 4096
  cohort bench --compare ours=localhost:8000 other=localhost:9000 --rounds 3 --rate 2
"""


def _local(port: str) -> str:
    return f"http://127.0.0.1:{int(port)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES

    server = parser.add_argument_group("server")
    server.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="base URL (default %(default)s); SSL_CERT_FILE names the certificate of an authority of your own",
    )
    server.add_argument(
        "--port", type=_local, dest="url", metavar="PORT", help="of a server on this machine, instead of --url"
    )
    server.add_argument("--model", help="model id; needed only where a server has several")
    server.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="bearer key (default $OPENAI_API_KEY)"
    )
    server.add_argument("--endpoint", choices=("completions", "chat"), help="default: completions")
    server.add_argument(
        "--request-timeout-s", type=float, default=600.0, metavar="S", help="per request (default %(default)g)"
    )
    server.add_argument(
        "--new-connections",
        action="store_true",
        help="one for each request, for servers that close theirs unsaid (llama.cpp's, after a stream)",
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

    what = parser.add_argument_group("what requests look like")
    what.add_argument(
        "--input-len",
        metavar="LEN",
        help="prompt tokens: 128, uniform:64-512, lognormal:mean=222,std=256 [,min=…,max=…] (default 128)",
    )
    what.add_argument("--output-len", metavar="LEN", help="output tokens, likewise (default 64)")
    what.add_argument("--mix", metavar="MIX", help="weighted shapes, for example 0.8:64x64,0.2:768x32")
    what.add_argument(
        "--trace", metavar="TRACE", help="a name of `cohort traces list`, Mooncake JSONL, Azure, BurstGPT or Cohort CSV"
    )
    what.add_argument(
        "--trace-format", choices=("mooncake", "azure", "burstgpt", "cohort"), help="default: by its first line"
    )
    what.add_argument(
        "--hash-block", type=int, default=512, metavar="N", help="tokens per hash id of a trace (default 512)"
    )
    what.add_argument("--limit", type=int, metavar="N", help="read only the first N rows of a trace")
    what.add_argument("--max-prompt", type=int, metavar="N", help="clip longer prompts; the result says how many")
    what.add_argument("--max-output", type=int, metavar="N", help="clip longer outputs; the result says how many")
    what.add_argument("--class-mix", metavar="MIX", help="x-cohort-class by share, for example rt=0.7,be=0.3")
    what.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="force the planned output length (default: yes)",
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

    several = parser.add_argument_group("several servers")
    several.add_argument("--compare", nargs="+", metavar="NAME=URL", help="in turn, A B B A …, the same workload")
    several.add_argument("--rounds", type=int, default=3, help="of --compare (default %(default)s)")

    out = parser.add_argument_group("output")
    out.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="requests sent first and left out (default %(default)s)"
    )
    out.add_argument("--json", metavar="FILE", help="everything as JSON ('-': to stdout, instead of the table)")
    out.add_argument("--quiet", action="store_true", help="no table")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Raises `CohortError`."""
    from cohort.services.bench.http.measuring import measure

    return measure(args)
