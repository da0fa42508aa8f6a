"""Prove and measure Cohort on a machine with an NVIDIA GPU: one command, at most ten minutes, no network.

    scripts/gpu_check --wheels wheels                     # everything; a table at the end
    scripts/gpu_check --only kernels golden --json out.json
    scripts/gpu_check --dry-run                           # no GPU: every section with tiny shapes, nothing measured

Runs under any Python 3.11 or 3.12 that holds torch, triton and transformers; all other packages come from the folder of
wheels that `scripts/gpu_pack` made. Every section runs in a process of its own with a deadline: one that breaks or
hangs is a line of the table and hides nothing else. The table, and the JSON beside it, tell figure, target and verdict:
pass, miss (right, but slower than wanted), fail (wrong, or broken), info (no target), not run.

`cohort bench gpu-check` is the same. Called by both; until the wheels are unpacked it needs the standard library alone.

Exit status: 0 all passed, 1 something missed, failed or was not run, 2 no GPU or a wrong option.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cohort

PACKAGE = Path(cohort.__file__).resolve().parent
# Seconds a section may take at most, the most telling first: if the time runs out, the end of the list is cut off.
SECTIONS = {
    "environment": 150,
    "kernels": 120,
    "golden": 100,
    "attention": 60,
    "decode-8b": 90,
    "kv-transfer": 60,
    "prefill": 90,
    "decode-14b": 100,
    "fill": 110,
    "pipeline": 240,
}
MODULE = "cohort.services.bench.gpu_check"
_LAST_WORDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use beside what is installed")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"some sections: {', '.join(SECTIONS)}"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("gpu-check.json"), help="where the result goes (default: %(default)s)"
    )
    parser.add_argument("--markdown", type=Path, help="the table as Markdown, for docs/benchmarks-gpu.md")
    parser.add_argument("--logs", type=Path, help="folder for what the sections print (default: a temporary one)")
    parser.add_argument("--total-s", type=float, default=590.0, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="on the processor, with tiny shapes; needs no GPU")


def run(options: argparse.Namespace) -> int:
    """Everything from parsed options."""
    until = time.monotonic() + options.total_s
    work = Path(tempfile.mkdtemp(prefix="cohort-gpu-check-"))
    logs = options.logs or work / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    if not options.dry_run and (reason := no_gpu()) is not None:
        print(f"gpu_check: {reason}. With --dry-run the sections run on the processor.", file=sys.stderr)
        return 2
    if options.wheels is not None and not options.wheels.is_dir():
        print(f"gpu_check: --wheels: no folder {options.wheels}", file=sys.stderr)
        return 2
    environment = dict(os.environ)
    # Not the folder it lies in: that one's folders would hide other people's packages of the same names.
    source = work / "source"
    source.mkdir()
    (source / "cohort").symlink_to(PACKAGE)
    paths = [str(source)]
    if options.wheels is not None:
        site = work / "site"
        if (problem := unpack(options.wheels, site)) is not None:
            print(f"gpu_check: {problem}", file=sys.stderr)
            return 2
        paths.append(str(site))
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    if not options.dry_run:  # there the cache folder's kernels serve as they are
        environment.setdefault("COHORT_CACHE_DIR", str(work / "cache"))
    environment["HF_HUB_OFFLINE"] = environment["TRANSFORMERS_OFFLINE"] = "1"
    if options.dry_run:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if (missing := lacking(environment)) != "":
        print(f"gpu_check: {sys.executable} lacks {missing}. Give --wheels, or run scripts/setup.", file=sys.stderr)
        return 2

    rows: list[dict[str, object]] = []
    for section in options.only or SECTIONS:
        rows += run_section(section, options.dry_run, work, logs, environment, until)
    result = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "dry_run": options.dry_run,
        "seconds": round(options.total_s - (until - time.monotonic()), 1),
        "rows": rows,
    }
    options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    # Only now: the table's own module needs what the wheels may have brought.
    sys.path[:0] = paths
    import msgspec

    from cohort.services.bench.gpu_check import report

    typed = msgspec.convert(rows, list[report.Row])
    if options.dry_run:
        print("Dry run on the processor with tiny shapes: no figure below is a measurement.\n")
    print(report.table(typed))
    counts = {verdict: sum(row.verdict == verdict for row in typed) for verdict in ("pass", "miss", "fail", "not run")}
    print(
        f"\n{', '.join(f'{count} {verdict}' for verdict, count in counts.items())} in {result['seconds']} s; "
        f"{options.json}; logs in {logs}"
    )
    if options.markdown is not None:
        options.markdown.write_text(report.markdown(typed) + "\n", encoding="utf-8")
    return report.exit_status(typed)


def no_gpu() -> str | None:
    """Why nothing can be measured here. Asks in another process: this one stays small."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    try:
        status = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False).returncode
    except subprocess.TimeoutExpired:
        return "torch does not answer within two minutes"
    if status == 0:
        return None
    return "torch finds no CUDA device here" if status == 3 else f"{sys.executable} holds no torch"


def lacking(environment: dict[str, str]) -> str:
    """Which packages that every section needs cannot be found."""
    code = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n) is None), sep=', ')"
    wanted = ("torch", "transformers", "msgspec", "structlog", "yaml", "zmq", "aiohttp")
    found = subprocess.run(
        [sys.executable, "-c", code, *wanted], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return found.stdout.strip()


def unpack(wheels: Path, site: Path) -> str | None:
    """Install the wheels into a folder of their own; nothing of the machine's Python changes."""
    files = sorted(str(wheel) for wheel in wheels.glob("*.whl"))
    if not files:
        return f"--wheels: no wheels in {wheels}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--no-cache-dir",
            "--disable-pip-version-check",
            "--root-user-action",
            "ignore",
            "--target",
            str(site),
            *files,
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return None if done.returncode == 0 else f"the wheels cannot be installed: {done.stderr.strip()[-500:]}"


def run_section(
    section: str, dry_run: bool, work: Path, logs: Path, environment: dict[str, str], until: float
) -> list[dict[str, object]]:
    """The section's rows, and one more if it did not end by itself."""
    # A dry run measures nothing, so a busy machine may take as long over a section as there is time.
    seconds = until - time.monotonic()
    if not dry_run:
        seconds = min(SECTIONS[section], seconds)
    if seconds < 10:
        return [note(section, "not run", "no time was left")]
    found, log = work / f"{section}.rows", logs / f"{section}.log"
    print(f"{section} …", end=" ", flush=True)
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                MODULE,
                section,
                "--device",
                "cpu" if dry_run else "cuda:0",
                "--folder",
                str(work),
                "--rows",
                str(found),
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=work,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    rows: list[dict[str, object]] = []
    if found.is_file():
        for line in found.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # the line it was ended in
                continue
    if status is None:
        rows.append(note(section, "fail", f"not done after {seconds:.0f} s; see {log}"))
    elif status != 0 and not any(row["verdict"] == "fail" for row in rows):
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_WORDS:]
        rows.append(note(section, "fail", f"ended with status {status}: {' / '.join(words)}"))
    return rows


def note(section: str, verdict: str, text: str) -> dict[str, object]:
    return {"section": section, "name": "runs", "verdict": verdict, "note": text}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """The section and all that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except (ProcessLookupError, PermissionError):
            return
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
