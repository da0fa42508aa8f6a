"""The command line end to end against a real socket: what is sent, what is printed and written, how it exits."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import TraceTimes
from cohort.common.workloads.generate import FromTrace
from cohort.services.bench.__main__ import main
from cohort.services.bench.http import command, options
from cohort.services.cli import __main__ as cli

from .conftest import FakeServer

pytestmark = pytest.mark.slow

SHORT = ("--input-len", "8", "--output-len", "2")
"""For tests of anything but lengths: every token is an event that two threads hand over."""


def bench(server: FakeServer, *args: str, expect: int = 0) -> None:
    assert main(["--url", server.url, *args]) == expect


def result(server: FakeServer, tmp_path: Path, *args: str, expect: int = 0) -> dict[str, Any]:
    """The JSON document of a quiet run."""
    path = tmp_path / "out.json"
    bench(server, "--quiet", "--json", str(path), *args, expect=expect)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_single_run_with_every_output(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.behaviour.first_token_s, server.behaviour.token_s = 0.02, 0.002
    path = tmp_path / "out.json"
    bench(
        server,
        "--rate",
        "100",
        "--num-requests",
        "30",
        "--mix",
        "0.5:16x4,0.5:64x8",
        "--class-mix",
        "rt=0.5,be=0.5",
        "--slo-ttft-ms",
        "rt=20000,be=0.001",
        "--seed",
        "3",
        "--json",
        str(path),
    )
    printed = capsys.readouterr().out
    for part in ("tiny", "30 / 0 / 0", "TTFT", "TPOT", "client queue", "SLO", "64x8", "be", "client loop lag"):
        assert part in printed

    document = json.loads(path.read_text())
    run = document["runs"][0]
    assert (document["schema_version"], document["mode"]) == (1, "single")
    assert "api_key" not in document["settings"]
    assert run["overall"]["completed"] == 30
    assert run["dialect"] == {
        "endpoint": "completions",
        "prompt_format": "ids",
        "ignore_eos": True,
        "stream_usage": True,
    }
    assert run["lengths"]["prompt_exact"] == run["lengths"]["output_exact"] == 30
    assert set(run["by_class"]) == {"rt", "be"} and set(run["by_kind"]) == {"16x4", "64x8"}
    assert run["by_class"]["be"]["slo"]["attainment"] == 0.0
    assert run["by_class"]["rt"]["slo"]["attainment"] == 1.0
    assert 20 <= run["overall"]["ttft_ms"]["p50"] < 5000

    # What was sent is what was planned: shapes, classes, options; the warm-up is not among it.
    sent = server.measured()
    assert sum(len(body["prompt"]) for body in sent) == run["workload"]["prompt_tokens"]
    assert {(len(b["prompt"]), b["max_tokens"]) for b in sent} == {(16, 4), (64, 8)}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in sent)
    assert all(body["stream_options"] == {"include_usage": True} for body in sent)
    assert {h.get("x-cohort-class") for h in server.headers} >= {"rt", "be"}
    assert len(server.bodies) == 30 + 2 + 1


def test_runs_differ_in_words_unless_salted(server: FakeServer, tmp_path: Path) -> None:
    args = ("--num-requests", "3", "--warmup", "0", "--concurrency", "1", "--output-len", "1")
    first = result(server, tmp_path, *args)
    again = ("--prompt-salt", str(first["runs"][0]["prompt_salt"]))
    result(server, tmp_path, *args, *again)
    result(server, tmp_path, *args)
    prompts = [body["prompt"] for body in server.measured()]
    assert prompts[0:3] == prompts[3:6] and prompts[0:3] != prompts[6:9]


def test_trace_prefixes_reach_the_server(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 100 * i, "input_length": 12, "output_length": 900, "hash_ids": [7, i]}) + "\n"
            for i in range(3)
        )
    )
    found = result(
        server, tmp_path, "--trace", str(trace), "--hash-block", "8", "--time-scale", "0.5", "--max-output", "2"
    )
    facts = found["runs"][0]["workload"]
    assert (facts["clipped_outputs"], facts["clipped_prompts"], facts["shares_prefixes"]) == (3, 0, True)
    assert "trace's times x 0.5" in facts["arrivals"]
    prompts = [body["prompt"] for body in server.measured()]
    assert len({tuple(p[:8]) for p in prompts}) == 1 and len({tuple(p[8:]) for p in prompts}) == 3
    # Arrivals are 0.05 s apart; the clock starts when the first has been sent.
    assert 0.08 <= found["runs"][0]["duration_s"] < 2


def test_failures_are_reported_not_hidden(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behaviour.fault = lambda index: {4: "http_500", 5: "mid_stream_error", 6: "cut", 7: "hang"}.get(index)
    path = tmp_path / "out.json"
    bench(
        server,
        "--num-requests",
        "10",
        "--json",
        str(path),
        "--request-timeout-s",
        "0.5",
        "--warmup",
        "0",
        *SHORT,
        "--slo-e2e-ms",
        "5000",
    )
    run = json.loads(path.read_text())["runs"][0]
    assert run["overall"]["completed"] == 6 and run["overall"]["failed"] == 4
    assert run["errors"] == {"http_500": 1, "stream_error": 1, "disconnected": 1, "timeout": 1}
    assert run["error_examples"]["stream_error"] == "lost a worker"
    assert run["overall"]["slo"]["attainment"] == 0.6
    assert "4 of 10 requests failed" in capsys.readouterr().out


def test_nothing_completed_is_an_error_status(server: FakeServer, tmp_path: Path) -> None:
    server.behaviour.fault = lambda index: None if index == 0 else "http_500"
    bench(server, "--quiet", "--num-requests", "3", *SHORT, expect=1)


def test_server_without_preferences_is_still_measured(server: FakeServer, tmp_path: Path) -> None:
    server.behaviour.takes_ignore_eos = server.behaviour.takes_usage = False
    server.behaviour.stops_after = 3
    run = result(server, tmp_path, "--num-requests", "2", "--output-len", "9")["runs"][0]
    assert run["lengths"] is None and run["overall"]["output_tokens"] == 6
    text = " ".join(run["warnings"])
    assert "refuses ignore_eos" in text and "counted by chunks" in text


def test_length_deviation_is_reported(server: FakeServer, tmp_path: Path) -> None:
    server.behaviour.extra_prompt_tokens, server.behaviour.cached_tokens = 1, 5
    run = result(server, tmp_path, "--num-requests", "2", *SHORT)["runs"][0]
    assert (run["lengths"]["prompt_exact"], run["lengths"]["prompt_max_difference"]) == (0, 1)
    assert any("+1 to +1" in text for text in run["warnings"])
    assert any("prefix cache" in text for text in run["warnings"])


def test_compare_interleaves_the_same_requests(
    serve: Callable[[], FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow = serve(), serve()
    slow.behaviour.first_token_s = 0.4  # by its own loop's time, which a stall may put ahead of the client's
    path = tmp_path / "out.json"
    assert (
        main(
            [
                "--compare",
                f"fast={fast.url}",
                f"slow={slow.url}",
                *SHORT,
                "--rounds",
                "2",
                "--warmup",
                "0",
                "--num-requests",
                "4",
                "--concurrency",
                "4",
                "--json",
                str(path),
            ]
        )
        == 0
    )
    document = json.loads(path.read_text())
    assert [run["name"] for run in document["runs"]] == ["fast", "slow", "slow", "fast"]
    ttft = next(figure for figure in document["comparison"] if figure["key"] == "ttft_p50_ms")
    assert ttft["by_name"]["slow"]["median"] > 300 > ttft["by_name"]["fast"]["median"]
    assert ttft["ratio_to_first"]["slow"]["min"] > 1
    assert sorted(body["prompt"] for body in fast.measured()) == sorted(body["prompt"] for body in slow.measured())
    # Rounds repeat no prompt: the second would else meet a warm prefix cache.
    assert len({tuple(body["prompt"]) for body in fast.measured()}) == 8
    assert "slow / fast" in capsys.readouterr().out


def test_compares_many_servers_downwards_each_request_on_a_connection_of_its_own(
    serve: Callable[[], FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    servers = {name: serve() for name in ("first", "second", "third", "fourth")}
    named = [f"{name}={server.url}" for name, server in servers.items()]
    load = [*SHORT, "--num-requests", "3", "--concurrency", "1", "--warmup", "0", "--rounds", "1"]
    assert main(["--compare", *named, *load, "--new-connections"]) == 0
    assert all(len(server.ports) == len(set(server.ports)) >= 3 for server in servers.values())
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in servers) and "…" not in printed and "over first" in printed
    assert main(["--compare", *named[:2], *load]) == 0
    assert len(set(servers["first"].ports[-3:])) == 1


def test_compare_uses_one_prompt_form_for_all(
    serve: Callable[[], FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them refuses ids and no tokenizer is at hand: comparing ids with text is refused, not done silently."""
    takes, refuses = serve(), serve()
    refuses.behaviour.takes_ids = False
    assert main(["--compare", f"a={takes.url}", f"b={refuses.url}", "--num-requests", "2"]) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_ctrl_c_gives_the_partial_report(server: FakeServer, tmp_path: Path) -> None:
    server.behaviour.fault = lambda index: "hang" if index >= 4 else None
    path = tmp_path / "out.json"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "cohort.services.bench",
            "--url",
            server.url,
            "--concurrency",
            "2",
            "--num-requests",
            "50",
            "--warmup",
            "0",
            *SHORT,
            "--json",
            str(path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = 20.0
        while len(server.bodies) < 6 and process.poll() is None and deadline > 0:
            deadline -= 0.05
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Interrupted" in printed
    run = json.loads(path.read_text())["runs"][0]
    assert run["interrupted"]
    assert (run["overall"]["completed"], run["overall"]["failed"], run["overall"]["cancelled"]) == (3, 0, 2)


def test_json_to_stdout_is_only_json(server: FakeServer, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    bench(server, "--num-requests", "2", "--json", "-", *SHORT)
    assert json.loads(capfdbinary.readouterr().out)["runs"][0]["overall"]["completed"] == 2


def test_unreachable_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_a_key_opens_a_server_whose_model_is_not_named(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behaviour.api_key = "k"
    bench(server, "--num-requests", "2", "--api-key", "wrong", *SHORT, expect=2)
    assert "answers 401: wrong key" in capsys.readouterr().err
    run = result(server, tmp_path, "--num-requests", "2", "--api-key", "k", *SHORT)["runs"][0]
    assert (run["model"], run["overall"]["completed"]) == ("tiny", 2)


def test_too_long_for_the_context(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    bench(server, "--input-len", "5000", expect=2)
    assert "--max-prompt" in capsys.readouterr().err
    assert not server.measured()


def parse(*args: str) -> options.BenchOptions:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return options.from_args(parser.parse_args(args))


def test_shipped_traces_go_by_name() -> None:
    spec = parse("--trace", "azure2023_conv", "--limit", "5").workload
    assert isinstance(spec.source, FromTrace) and isinstance(spec.arrivals, TraceTimes)
    assert [row.prompt_tokens for row in spec.source.trace.rows][:2] == [374, 396]
    drawn = parse("--trace", "servegen-m-large", "--duration-s", "60", "--rate", "9").workload
    assert isinstance(drawn.source, FromTrace) and isinstance(drawn.arrivals, TraceTimes)
    assert 50 < (drawn.source.trace.arrival_s or [0.0])[-1] < 60


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--rate", "0"), "--rate"),
        (("--num-requests", "-1"), "--num-requests"),
        (("--cv", "-1"), "--cv"),
        (("--time-scale", "2"), "--trace"),
        (("--slo-ttft-ms", "fast"), "--slo-ttft-ms"),
        (("--slo-ttft-ms", "rt=5"), "--class-mix"),
        (("--class-mix", "rt"), "--class-mix"),
        (("--compare", "a=x"), "two"),
        (("--compare", "a=x", "a=y"), "different names"),
        (("--compare", "http://x", "b=y"), "NAME=URL"),
        (("--mix", "1:2x3", "--input-len", "5"), "--input-len and --mix"),
        (("--mix", "1:2x3", "--trace", "t"), "--mix and --trace"),
        (("--endpoint", "chat", "--prompt-format", "ids"), "--prompt-format"),
        (("--extra-body", "[]"), "--extra-body"),
        (("--extra-body", "{"), "--extra-body"),
        (("--token-range", "9:3"), "--token-range"),
        (("--trace", "absent.csv"), "absent.csv: neither a file nor one of azure2023_code, "),
        (("--json", "no/such/folder/x.json"), "--json"),
    ],
)
def test_wrong_options_are_named(args: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*args)
    assert named in str(caught.value)


def test_hash_blocks_of_another_size_are_noticed(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,hash_ids\n0,64,5,1 2 3 4\n")
    with pytest.raises(ConfigError, match="blocks are of about 16 tokens"):
        parse("--trace", str(trace))
    parse("--trace", str(trace), "--hash-block", "16")


def test_the_key_stays_out_of_the_settings() -> None:
    found = parse("--api-key", "secret-key")
    assert found.api_key == "secret-key"
    assert "secret-key" not in str(found.settings)


def test_cohort_bench_is_the_same_command(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    given = ["--url", server.url, "--quiet", "--num-requests", "2", *SHORT, "--json", str(path)]
    for words in (["bench", *given], ["bench", "http", *given]):
        assert cli.main(words) == 0
        assert json.loads(path.read_text())["runs"][0]["overall"]["completed"] == 2
        path.unlink()


def test_adding_the_options_imports_nothing_heavy() -> None:
    code = (
        "import sys, cohort.services.bench.__main__; "
        "import cohort.services.bench.http.command; "
        "print([m for m in ('numpy', 'aiohttp', 'rich', 'matplotlib', 'torch', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"
