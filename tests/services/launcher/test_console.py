from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from cohort.services.launcher.console import Console, Line, LogFollower, State, readable, readable_warning


def event(level: str, **more: str) -> str:
    return json.dumps({"level": level, "event": "queue full", "instance": "gateway", "timestamp": "t", **more})


def test_only_warnings_and_worse_are_shown():
    assert readable_warning(event("info")) == ""
    assert readable_warning("plain text, no JSON") == ""
    assert readable_warning("[1, 2]") == ""
    assert readable_warning(event("warning", peer="manager")) == "warning: queue full peer=manager"
    failure = event("error", exception="Traceback\n  …\nOSError: gone")
    assert readable_warning(failure) == "error: queue full OSError: gone"


def test_without_a_terminal_every_change_is_a_line(capsys):
    console = Console([Line("gateway", 8000, Path("/logs/gateway.log"))], terminal=False)
    console.start()
    console.update("gateway", State.STARTING, pid=7)
    console.update("gateway", State.STARTING, pid=7)
    console.update("gateway", State.READY)
    console.print_line("[not markup] {neither}")
    assert capsys.readouterr().out.splitlines() == [
        "gateway      starting   pid 7       port 8000  /logs/gateway.log",
        "gateway      ready      pid 7       port 8000  /logs/gateway.log",
        "[not markup] {neither}",
    ]


def test_the_node_of_a_process_is_named_where_there_are_several(capsys):
    console = Console([Line("manager", 8011, Path("/logs/manager.log"))], terminal=False)
    console.update("manager", State.STARTING, pid=7, node="10.0.0.2", port=21_000)
    [line] = capsys.readouterr().out.splitlines()
    assert line.split() == ["manager", "starting", "on", "10.0.0.2", "pid", "7", "port", "21000", "/logs/manager.log"]


def test_a_log_is_followed_over_cuts_and_partial_lines(tmp_path: Path):
    log = tmp_path / "x.log"
    follower = LogFollower(log)
    assert follower.new_lines() == []
    log.write_text("one\ntw")
    assert follower.new_lines() == ["one"]
    with log.open("a") as file:
        file.write("o\nthree\n")
    assert follower.new_lines() == ["two", "three"]
    log.write_text("cut\n")
    assert follower.new_lines() == ["cut"]


def loading(percent: int) -> str:
    return json.dumps({"level": "info", "event": "loading weights", "percent": percent, "gigabytes_per_s": 1.5})


READ = json.dumps(
    {"level": "info", "event": "weights read", "gigabytes": 16.1, "seconds": 10.7, "gigabytes_per_s": 1.5}
)


def test_the_start_tells_how_far_weights_are_read(capsys):
    console = Console([Line("prefill-0", 1, Path("/p.log"))], terminal=False)
    console.update("prefill-0", State.STARTING, pid=7)
    for percent in (4, 8, 12, 13, 40, 41):
        console.echo_log("prefill-0", loading(percent))
    console.echo_log("prefill-0", READ)
    console.update("prefill-0", State.READY)
    console.echo_log("prefill-0", READ)  # of a worker that is ready: no news
    lines = [line.partition("/p.log")[2].strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "",
        "reading weights: 4 %, 1.50 GB/s",
        "reading weights: 12 %, 1.50 GB/s",
        "reading weights: 40 %, 1.50 GB/s",
        "weights read: 16.1 GB in 10.7 s, 1.50 GB/s",
        "",
    ]


def test_a_terminal_has_the_progress_in_its_table(capsys):
    console = Console([Line("prefill-0", 1, Path("/p.log"))], terminal=True)
    console.start()
    console.update("prefill-0", State.STARTING, pid=7)
    console.echo_log("prefill-0", loading(41))
    console.freeze()
    assert "reading weights: 41 %, 1.50 GB/s" in capsys.readouterr().out


def test_weights_that_are_read_at_once_are_not_mentioned(capsys):
    console = Console([Line("prefill-0", 1, Path("/p.log"))], terminal=False)
    console.update("prefill-0", State.STARTING, pid=7)
    for other in (READ, '{"event": "loading weights"}', 'not JSON: "loading weights"'):
        console.echo_log("prefill-0", other)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_log_is_shown_in_words_on_a_terminal() -> None:
    line = '{"level": "info", "event": "worker ready", "threads": 2, "service": "decode_worker", "timestamp": "2026"}'
    assert readable(line) == "info: worker ready threads=2"
    assert readable("Traceback (most recent call last):") == "Traceback (most recent call last):"
    assert readable_warning(line) == readable_warning("no JSON") == readable_warning('{"a": 1}') == ""


def test_output_that_nothing_takes_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for place in ("/dev/full", writing):
        with io.TextIOWrapper(io.FileIO(place, "w"), write_through=True) as nobodys:  # type: ignore[arg-type]
            monkeypatch.setattr(sys, "stdout", nobodys)
            with pytest.raises(OSError):
                nobodys.write("x")
            Console(terminal=False).print_line("gateway: warning: nothing more can be written")


def test_a_reader_that_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"x" * 4096):
            pass
    os.set_blocking(writing, True)
    found = list[bytes]()
    late = threading.Timer(3.0, lambda: found.append(os.read(reading, 1 << 20)))  # a blocked writer goes on then
    late.start()
    with io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        Console(terminal=False).print_line("nobody reads this")
        assert not found, "it was waited for"
        late.join()
        Console(terminal=False).print_line("but this")
        assert os.read(reading, 100) == b"but this\n"
    os.close(reading)


def test_what_a_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    Console(terminal=False).print_line("größer \u0416 \ud800")
    assert written.getvalue().decode("latin-1") == "größer \\u0416 \\ud800\n"
