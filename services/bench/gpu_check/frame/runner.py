"""Prove and measure Cohort on a machine with an NVIDIA GPU: two plans of nine minutes each, no network.

    scripts/gpu_check --plan A --wheels wheels --out results    # does it work, and where does the time go
    scripts/gpu_check --plan B --wheels wheels --out results    # the rest against its targets
    scripts/gpu_check --only kernels golden                     # sections of either plan
    scripts/gpu_check --plan A --dry-run                        # no GPU: every section with tiny shapes

Runs under any Python 3.11 or 3.12 that holds torch, triton and transformers; all other packages come from the folder of
wheels that `scripts/gpu_pack` made. Every section runs in a process of its own with a deadline, every item of a section
guarded: one that breaks or hangs is a line of the table and hides nothing else. The output folder holds report.json,
report.md and logs.tar.gz, rewritten as results come: a run that is killed leaves all it had. A row tells metric, target
and a verdict: pass, miss (right, but slower than wanted), fail (wrong, or broken), info (no target), not run.

`cohort bench gpu-check` is the same. Called by both; needs the standard library alone.

Exit status: 0 all passed, 1 something missed, failed or was not run, 2 no GPU or a wrong option, 143 ended by a signal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import cohort
from cohort.common.paths import cache_dir
from cohort.services.bench.gpu_check.frame import report
from cohort.services.bench.gpu_check.frame.plan import PLANS, SECTIONS, TOTAL_S, deadlines, sections_of
from cohort.services.bench.gpu_check.frame.report import Results, Row, SectionRun, Verdict, read_rows

PACKAGE = Path(cohort.__file__).resolve().parent
MODULE = "cohort.services.bench.gpu_check"
_LAST_LINES = 3
_LEAST_S = 5.0  # a section that has less is not begun
_CLOSING_S = 3.0  # before a section's deadline, for it to end by itself
_POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--plan", choices=PLANS, default="A", help="(default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"some sections: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use beside what is installed")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for results (default: %(default)s)")
    parser.add_argument(
        "--total-s", type=float, help=f"seconds for everything (default: {TOTAL_S:.0f}; a dry run: 3600)"
    )
    parser.add_argument("--dry-run", action="store_true", help="on the processor, with tiny shapes; needs no GPU")


@dataclass(frozen=True, slots=True)
class Run:
    """The folders and the environment of all sections' processes."""

    work: Path
    logs: Path
    environment: dict[str, str]
    dry_run: bool
    started_s: float
    total_s: float

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s


def run(options: argparse.Namespace) -> int:
    started_s = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="cohort-gpu-check-"))
    try:
        return _run(options, _prepare(options, work, started_s))
    except _Refused as refused:
        print(f"gpu_check: {refused}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _prepare(options: argparse.Namespace, work: Path, started_s: float) -> Run:
    """Raise `_Refused`."""
    # Not the folder it lies in: that one's folders would hide other people's packages of the same names.
    source = work / "source"
    source.mkdir()
    (source / "cohort").symlink_to(PACKAGE)
    paths = [str(source)]
    if options.wheels is not None:
        site = work / "site"
        if (problem := unpack(options.wheels, site)) is not None:
            raise _Refused(problem)
        paths.append(str(site))
    environment = _environment(options.dry_run, work, paths)
    if (reason := refusal(environment, dry_run=options.dry_run)) != "":
        raise _Refused(reason)
    logs = work / "logs"
    logs.mkdir()
    total_s = options.total_s or (3600.0 if options.dry_run else TOTAL_S)
    return Run(work, logs, environment, options.dry_run, started_s, total_s)


class _Refused(Exception):
    """Reason why nothing can be run here."""


def _environment(dry_run: bool, work: Path, paths: list[str]) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    environment["PYTHONUNBUFFERED"] = "1"
    environment["HF_HUB_OFFLINE"] = environment["TRANSFORMERS_OFFLINE"] = "1"
    environment.setdefault("TRITON_CACHE_DIR", str(work / "triton"))
    if dry_run:  # there the cache folder's kernels serve as they are
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["TRITON_INTERPRET"] = "1"
    else:
        environment.setdefault("COHORT_CACHE_DIR", str(work / "cache"))
    return environment


def _run(options: argparse.Namespace, run: Run) -> int:
    """Return the sections in their order."""
    plan = "of sections" if options.only else options.plan
    facts = {"plan": plan, "dry_run": run.dry_run, "total_s": run.total_s}
    results = Results(options.out, run.logs, facts)
    signal.signal(signal.SIGTERM, _ended)
    kernels = _build_host_kernels(run)
    try:
        for section, until_s in deadlines(sections_of(options.plan, options.only), run.total_s):
            _section(section, until_s, run, results)
        results.state = "complete"
    except (KeyboardInterrupt, _Ended):
        results.state = "ended by a signal"
    finally:
        end_group(kernels)
        results.write(logs=True)
    rows = results.rows
    if run.dry_run:
        print("Dry run on the processor with tiny shapes: no metric below is a measurement.\n")
    print(report.table(rows))
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("pass", "miss", "fail", "not run")}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"\n{summary} in {results.seconds} s; {results.state}; {options.out}")
    return report.exit_status(rows) if results.state == "complete" else 143


class _Ended(Exception):
    """Request to end this process."""


def _ended(_signal: int, _frame: object) -> NoReturn:
    raise _Ended


def _build_host_kernels(run: Run) -> subprocess.Popen[bytes]:
    """Build in the background from the start: what needs the kernels waits for the build's lock."""
    cache = run.environment.get("COHORT_CACHE_DIR") or str(cache_dir())
    words = ["nice", "-n", "10", sys.executable, "-P", "-m", "cohort.kernels.cpu.build", cache]
    return _started(words, run.logs / "build.log", run)


def _started(words: list[str], log: Path, run: Run) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own."""
    with log.open("wb") as out:
        return subprocess.Popen(
            words,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=run.environment,
            cwd=run.work,
            start_new_session=True,
        )


def refusal(environment: dict[str, str], *, dry_run: bool) -> str:
    """Return why nothing can be measured here; "" = it can. Another process checks: this one stays small."""
    wanted = ("torch", "transformers", "llguidance", "msgspec", "structlog", "yaml", "zmq", "aiohttp")
    code = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n) is None), sep=', ')"
    device_check = "" if dry_run else "\nimport torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    command = [sys.executable, "-c", code + device_check, *wanted]
    try:
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "torch does not answer within two minutes"
    if missing := found.stdout.strip():
        return f"{sys.executable} lacks {missing}. Give --wheels, or run scripts/setup."
    no_device = "torch finds no CUDA device here. With --dry-run the sections run on the processor."
    return {0: "", 3: no_device}.get(found.returncode, found.stderr.strip()[-500:])


def unpack(wheels: Path, site: Path) -> str | None:
    """Install the wheels into a folder of their own; nothing of the machine's Python changes."""
    files = sorted(str(wheel) for wheel in wheels.glob("*.whl"))
    if not files:
        return f"--wheels: no wheels in {wheels}"
    flags = "-q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --root-user-action ignore"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags.split(), "--target", str(site), *files],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return None if done.returncode == 0 else f"the wheels cannot be installed: {done.stderr.strip()[-500:]}"


def _section(section: str, until_s: float, run: Run, results: Results) -> None:
    """Run one section to its end or its deadline; the results are written while it runs, and when it has ended."""
    # A dry run measures nothing, so a busy machine may take as long over a section as there is time.
    seconds = (run.total_s if run.dry_run else until_s) - run.elapsed_s
    current = SectionRun(section, seconds)
    results.sections.append(current)
    if seconds < _LEAST_S:
        current.state = "not run"
        current.rows = [_note(section, "not run", "no time was left")]
        results.write(logs=True)
        return
    print(f"{section} …", end=" ", flush=True)
    rows, log = run.work / f"{section}.rows", run.logs / f"{section}.log"
    started_s = time.monotonic()
    process = _start(section, run, rows, log, seconds - _CLOSING_S)
    size = -1
    try:
        while process.poll() is None and time.monotonic() - started_s < seconds:
            current.seconds = time.monotonic() - started_s
            grown = rows.stat().st_size if rows.is_file() else 0
            if grown != size:
                size, current.rows = grown, read_rows(rows)
                results.write()
            _wait(process, _POLL_S)
        status = process.poll()
    finally:
        end_group(process)
        current.rows = read_rows(rows)
        current.seconds = time.monotonic() - started_s
        current.state = "killed"
    if status is None:
        current.rows.append(_note(section, "fail", f"not done after {seconds:.0f} s: {_last_lines(log)}"))
    else:
        current.state = "ended"
        if status != 0 and not any(row.verdict == "fail" for row in current.rows):
            current.rows.append(_note(section, "fail", f"ended with status {status}: {_last_lines(log)}"))
    print(f"{current.seconds:.0f} s", flush=True)
    results.write(logs=True)


def _start(section: str, run: Run, rows: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    options = {
        "--device": "cpu" if run.dry_run else "cuda:0",
        "--folder": run.work,
        "--logs": run.logs,
        "--rows": rows,
        "--seconds": f"{seconds:.1f}",
        "--parent": os.getpid(),  # which may be gone before the section can ask for it
    }
    words = [str(word) for pair in options.items() for word in pair]
    return _started([sys.executable, "-P", "-m", MODULE, section, *words], log, run)


def _last_lines(log: Path) -> str:
    return " / ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:])


def _note(section: str, verdict: Verdict, text: str) -> Row:
    return Row(section=section, name="runs", verdict=verdict, note=text)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return


def end_group(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except (ProcessLookupError, PermissionError):
            return
        _wait(process, 5)
