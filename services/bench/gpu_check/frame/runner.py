"""Prove and measure Cohort on a machine with an NVIDIA GPU: three plans of three or four minutes, no network.

    scripts/gpu_check --plan A --wheels wheels --cache gpu-cache --keep-cache --out results-a   # does it work at all
    scripts/gpu_check --plan B --wheels wheels --cache gpu-cache --out results-b                # how fast is it
    scripts/gpu_check --plan C --wheels wheels --cache gpu-cache --out results-c                # the rest
    scripts/gpu_check --only kernels golden            # sections of any plan
    scripts/gpu_check --plan A --dry-run               # no GPU: every section with tiny shapes

Runs under any Python 3.11 or 3.12 that holds torch, triton and transformers; all other packages come from the folder of
wheels that `scripts/gpu_pack` made. Every section runs in a process of its own with a deadline, every item of a section
guarded: one that breaks or hangs is a line of the table and hides nothing else. Plan A's sections run side by side, so
none of its figures is a speed. The output folder holds report.json, report.md and logs.tar.gz, rewritten as results
come: a run that is killed leaves all it had. A row tells metric, target and a verdict: pass, miss (right, but slower
than wanted), fail (wrong, or broken), info (no target), not run.

Kernels compiled in one call serve the next from `--cache`. Where the next has another machine, `--keep-cache` packs
them in pieces beside the results; a cache folder in which such pieces lie is unpacked first.

`cohort bench gpu-check` is the same. Called by both; needs the standard library alone.

Exit status: 0 all passed, 1 something missed, failed or was not run, 2 no GPU or a wrong option, 143 ended by a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import cohort
from cohort.common.paths import cache_dir
from cohort.services.bench.gpu_check.frame import kernel_cache, report
from cohort.services.bench.gpu_check.frame.plan import PLANS, SECTIONS, Plan, deadlines, plan_of
from cohort.services.bench.gpu_check.frame.report import Results, Row, SectionRun, Verdict, read_rows

PACKAGE = Path(cohort.__file__).resolve().parent
MODULE = "cohort.services.bench.gpu_check"
_LAST_LINES = 3
_LEAST_S = 5.0  # a section that has less is not begun
_CLOSING_S = 3.0  # before a section's deadline, for it to end by itself
_POLL_S = 0.5
_END_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--plan", choices=PLANS, default="A", help="(default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"some sections: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use beside what is installed")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for results (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels, or of pieces that --keep-cache made")
    parser.add_argument("--keep-cache", action="store_true", help="pack the compiled kernels into --out, too")
    totals = ", ".join(f"{name} {plan.total_s:.0f}" for name, plan in PLANS.items())
    parser.add_argument("--total-s", type=float, help=f"seconds for everything (default: {totals}; a dry run: 3600)")
    parser.add_argument("--dry-run", action="store_true", help="on the processor, with tiny shapes; needs no GPU")


@dataclass(frozen=True, slots=True)
class Run:
    """The folders and the environment of all sections' processes. `kernels`: folder of what they compile; `width`
    sections run side by side."""

    work: Path
    logs: Path
    kernels: Path
    environment: dict[str, str]
    dry_run: bool
    started_s: float
    total_s: float
    width: int = 1

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s


def run(options: argparse.Namespace) -> int:
    started_s = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="cohort-gpu-check-"))
    plan = plan_of(options.plan, options.only)
    try:
        return _run(options, plan, _prepare(options, plan, work, started_s))
    except _Refused as refused:
        print(f"gpu_check: {refused}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _prepare(options: argparse.Namespace, plan: Plan, work: Path, started_s: float) -> Run:
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
    kernels = work / "kernels" if options.cache is None else options.cache.resolve()
    try:
        print(kernel_cache.unpack(kernels), end="")
    except OSError as error:
        raise _Refused(f"--cache: {error}") from error
    width = (os.cpu_count() or 1) if plan.together else 1
    environment = _environment(options.dry_run, work, kernels, paths)
    if options.cache is not None:
        environment["TRITON_CACHE_DIR"] = str(kernels / "triton")
    if plan.together:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, width // len(plan.seconds))))
    if (reason := refusal(environment, dry_run=options.dry_run)) != "":
        raise _Refused(reason)
    logs = work / "logs"
    logs.mkdir()
    total_s = options.total_s or (3600.0 if options.dry_run else plan.total_s)
    return Run(work, logs, kernels, environment, options.dry_run, started_s, total_s, width)


class _Refused(Exception):
    """Reason why nothing can be run here."""


def _environment(dry_run: bool, work: Path, kernels: Path, paths: list[str]) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    environment["PYTHONUNBUFFERED"] = "1"
    environment["HF_HUB_OFFLINE"] = environment["TRANSFORMERS_OFFLINE"] = "1"
    environment.setdefault("TRITON_CACHE_DIR", str(kernels / "triton"))
    if dry_run:  # there the cache folder's kernels serve as they are
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["TRITON_INTERPRET"] = "1"
    else:
        cache = work / "cache"  # of a short path: it holds the run files' sockets
        cache.mkdir()
        (cache / "kernels").symlink_to(kernels / "kernels")
        environment["COHORT_CACHE_DIR"] = str(cache)
    return environment


def _run(options: argparse.Namespace, plan: Plan, run: Run) -> int:
    """Run the sections; return the exit status."""
    name = "of sections" if options.only else options.plan
    facts = {"plan": name, "dry_run": run.dry_run, "total_s": run.total_s}
    results = Results(options.out, run.logs, facts)
    signal.signal(signal.SIGTERM, _ended)
    host_kernels = _build_host_kernels(run)
    try:
        _run_sections(deadlines(plan, run.total_s), plan.together, run, results)
        results.state = "complete"
    except (KeyboardInterrupt, _Ended):
        results.state = "ended by a signal"
    finally:
        end_groups([host_kernels])
        results.write(logs=True)
    if options.keep_cache:
        print(kernel_cache.pack(run.kernels, options.out), end="")
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


@dataclass(slots=True)
class _Section:
    """One section's process and what it has found. The results are written while it runs, and when it has ended."""

    current: SectionRun
    process: subprocess.Popen[bytes]
    rows: Path
    log: Path
    started_s: float
    size: int = -1

    @property
    def over(self) -> bool:
        """Whether it has ended, or has to."""
        return self.process.poll() is not None or time.monotonic() - self.started_s >= self.current.limit_s

    def look(self) -> bool:
        """Return whether there are new rows, and take them."""
        self.current.seconds = time.monotonic() - self.started_s
        size = self.rows.stat().st_size if self.rows.is_file() else 0
        if size == self.size:
            return False
        self.size, self.current.rows = size, read_rows(self.rows)
        return True

    def end(self, status: int | None) -> None:
        """Take the last rows of a section that ended with `status`; None: it was not done."""
        current, section = self.current, self.current.section
        current.rows = read_rows(self.rows)
        if status is None:
            current.state = "killed"
            words = f"not done after {current.limit_s:.0f} s: {_last_lines(self.log)}"
            current.rows.append(_note(section, "fail", words))
            return
        current.state = "ended"
        if status != 0 and not any(row.verdict == "fail" for row in current.rows):
            current.rows.append(_note(section, "fail", f"ended with status {status}: {_last_lines(self.log)}"))


def _run_sections(sections: Sequence[tuple[str, float]], together: bool, run: Run, results: Results) -> None:
    """Run the sections, each until the moment beside it at most, `run.width` of them at a time; in this order."""
    waiting, running = list(sections), list[_Section]()
    try:
        while waiting or running:
            while waiting and len(running) < run.width:
                begun = _begin(*waiting.pop(0), together, run, results)
                running += [] if begun is None else [begun]
            over = [section for section in running if section.over]
            if any([section.look() for section in running]) and not over:
                results.write()
            if over:
                _finish(over, results)
                running = [section for section in running if section not in over]
            elif running:
                _wait(running[0].process, _POLL_S)
    finally:
        end_groups([section.process for section in running])
        for section in running:
            section.current.rows, section.current.state = read_rows(section.rows), "killed"


def _begin(section: str, until_s: float, together: bool, run: Run, results: Results) -> _Section | None:
    """Start a section; None, and a row that says so, where no time is left for it."""
    # A dry run measures nothing, so a busy machine may take as long over a section as there is time.
    seconds = (run.total_s if run.dry_run else until_s) - run.elapsed_s
    current = SectionRun(section, seconds)
    results.sections.append(current)
    if seconds < _LEAST_S:
        current.state = "not run"
        current.rows = [_note(section, "not run", "no time was left")]
        results.write(logs=True)
        return None
    rows, log = run.work / f"{section}.rows", run.logs / f"{section}.log"
    started_s = time.monotonic()
    process = _start(section, together, run, rows, log, seconds - _CLOSING_S)
    return _Section(current, process, rows, log, started_s)


def _finish(over: list[_Section], results: Results) -> None:
    statuses = [section.process.poll() for section in over]
    end_groups([section.process for section in over])
    for section, status in zip(over, statuses, strict=True):
        section.end(status)
        print(f"{section.current.section}: {section.current.state}, {section.current.seconds:.0f} s", flush=True)
    results.write(logs=True)


def _start(section: str, together: bool, run: Run, rows: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    folder = run.work / "sections" / section  # its own: others write models of the same names meanwhile
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "--device": "cpu" if run.dry_run else "cuda:0",
        "--folder": folder,
        "--logs": run.logs,
        "--rows": rows,
        "--seconds": f"{seconds:.1f}",
        "--parent": os.getpid(),  # which may be gone before the section can ask for it
    }
    words = [str(word) for pair in options.items() for word in pair] + (["--together"] if together else [])
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


def end_groups(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes and all that they started: first asked, five seconds later not."""
    left = list(processes)
    for how in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, how)
        until_s = time.monotonic() + _END_S
        for process in left:
            _wait(process, max(0.0, until_s - time.monotonic()))
