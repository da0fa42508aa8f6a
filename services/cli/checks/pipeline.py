"""Checks of a pipeline that runs, from one reading of it.

Called by `doctor.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cohort import __version__
from cohort.services.cli.checks.finding import Finding, fine, problem, warning
from cohort.services.cli.checks.reading import Reading

FULL_KV = 0.95
LATE_LOOP_S = 0.25
"""An event loop that is later than this at its heartbeats makes streams wait."""
GUESSED = 0.5
FEW_DESCRIPTORS = 0.8
SLOW_LINK = 0.05
"""Share of the fastest link's rate below which a link is slow."""
_LEAST_WAITING = 4


def answering(reading: Reading) -> Finding:
    name = "processes"
    down = [process["instance"] for process in reading.processes if process["status"] == "down"]
    if down:
        says = f"{', '.join(down)}: no heartbeat"
        return problem(
            name,
            says,
            "its log says why: cohort serve --status names the files; on a host that is gone, start it elsewhere",
        )
    silent = {instance: reply.error for instance, reply in reading.replies.items() if reply.error}
    if silent:
        says = "; ".join(f"{instance} does not answer: {why}" for instance, why in silent.items())
        return problem(name, says, "it hangs, or a network lies between: its log, and cohort log-level debug")
    unready = [p["instance"] for p in reading.processes if p["status"] == "up" and not p["ready"]]
    if unready:
        return warning(
            name,
            f"{', '.join(unready)}: not ready",
            "a worker that loads its model gets ready; else its log says why not",
        )
    return fine(name, f"{len(reading.processes)} answer")


def workers(reading: Reading) -> Finding:
    up = [p for p in reading.processes if p["role"].endswith("_worker") and p["status"] == "up" and p["ready"]]
    if not up:
        return problem("workers", "no worker is ready: every request waits", "start one; its log says why it is not")
    return fine("workers", f"{len(up)} ready")


def versions(reading: Reading, own: str = __version__) -> Finding:
    """Check that all processes have one version, as their messages do."""
    name = "versions"
    found: dict[str, list[str]] = {}
    for instance, reply in reading.replies.items():
        if reply.version:
            found.setdefault(reply.version, []).append(instance)
    if len(found) > 1:
        says = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(found.items()))
        return problem(name, says, "start the older ones again with the same installation")
    if found and own not in found:
        return warning(
            name, f"the pipeline is {next(iter(found))}, this command {own}", "use the pipeline's own installation"
        )
    return fine(name, f"all {own}")


def restarts(reading: Reading) -> Finding:
    often = {p["instance"]: p["restarts"] for p in reading.processes if p["restarts"]}
    if not often:
        return fine("restarts", "none")
    says = ", ".join(f"{name} {count} times" for name, count in often.items())
    return warning(
        "restarts", says, "the log of the run before ends with the reason: logs/NAME.log, docker compose logs NAME"
    )


def queue(reading: Reading) -> Finding:
    """Check whether the queue grew over the last two minutes: by half from their first half to the second."""
    waiting: Sequence[float] = reading.state["samples"].get("requests_waiting", [])
    now = waiting[-1] if waiting else 0.0
    half = len(waiting) // 2
    if half >= 5:
        before, after = sum(waiting[:half]) / half, sum(waiting[half:]) / (len(waiting) - half)
        if now >= _LEAST_WAITING and after > 1.5 * before and now > before:
            says = f"growing: {before:.0f} requests waited in the first half of {len(waiting)} s, {now:.0f} wait now"
            return problem(
                "queue", says, "more workers, fewer or shorter requests; cohort advise says which arrangement suits"
            )
    return fine("queue", f"{now:.0f} requests wait")


def kv(reading: Reading) -> Finding:
    full = []
    for process in reading.processes:
        stats = process["stats"]
        total = stats.get("kv_total_blocks", 0.0)
        if total and stats.get("requests_waiting", 0) and stats.get("kv_used_blocks", 0.0) / total > FULL_KV:
            full.append(process["instance"])
    if full:
        return warning(
            "KV cache",
            f"{', '.join(full)}: full while requests wait",
            "more for it: kv.memory_bytes, kv.memory_fraction; or fewer rows: engine.max_rows",
        )
    return fine("KV cache", "not full where requests wait")


def event_loops(reading: Reading) -> Finding:
    late = {
        labels.get("instance", "?"): value
        for labels, value in reading.metrics.each("cohort_event_loop_lag_seconds")
        if value > LATE_LOOP_S
    }
    if late:
        says = ", ".join(f"{name} {1000 * value:.0f} ms late" for name, value in late.items())
        return warning(
            "event loops", says, "the cores are taken: fewer threads (engine.threads), or end what runs beside"
        )
    return fine("event loops", "on time")


def descriptors(reading: Reading) -> Finding:
    limits = {labels.get("instance", ""): value for labels, value in reading.metrics.each("process_max_fds")}
    short = [
        f"{labels['instance']} has {value:.0f} of {limits[labels['instance']]:.0f} open"
        for labels, value in reading.metrics.each("process_open_fds")
        if value > FEW_DESCRIPTORS * limits.get(labels.get("instance", ""), float("inf"))
    ]
    if short:
        return problem("descriptors", "; ".join(short), "raise the hard limit (ulimit -Hn 65536), start it again")
    return fine("descriptors", "enough")


def step_times(reading: Reading) -> Finding:
    """Check the error of workers' predicted step times, on which placements and promises rest."""
    off = [
        f"{labels.get('instance')} {labels.get('kind')} {100 * value:.0f} %"
        for labels, value in reading.metrics.each("cohort_step_time_error")
        if value > GUESSED
    ]
    if off:
        return warning(
            "step times",
            f"foreseen wrongly: {', '.join(off)}",
            "the machine is shared or has changed; after a change remove learned/ in the cache folder",
        )
    return fine("step times", "as foreseen")


_LOSSES: Sequence[tuple[str, str, str]] = (
    (
        "cohort_kv_transfer_failures_total",
        "KV transfers failed",
        "the network between the workers; transfer.run_timeout_s",
    ),
    ("cohort_kv_quarantined_blocks", "KV blocks are kept out of use", "restart that worker when it is idle"),
    (
        "cohort_kernel_compilations_total",
        "GPU kernels were compiled while serving",
        "report the shapes; rows wait meanwhile",
    ),
    ("cohort_out_of_memory_retries_total", "batches were halved for want of memory", "less for KV: kv.memory_fraction"),
    ("cohort_accepts_failed_total", "connections could not be accepted", "more descriptors: ulimit -Hn 65536"),
    (
        "cohort_bus_forged_total",
        "messages under a wrong name were dropped",
        "two processes with one --instance, or a stranger in the cluster",
    ),
    (
        "cohort_trace_spans_dropped_total",
        "spans of traces were dropped",
        "the collector at tracing.endpoint; a smaller tracing.sample",
    ),
)


def losses(reading: Reading) -> Finding:
    """Check counters that should stay 0."""
    found = [(says, cure, reading.metrics.total(name)) for name, says, cure in _LOSSES]
    counted = [(f"{says} ({count:.0f})", cure) for says, cure, count in found if count]
    if counted:
        return warning("losses", "; ".join(says for says, _ in counted), "; ".join(cure for _, cure in counted))
    return fine("losses", "none counted")


def kv_links(reading: Reading) -> Finding:
    """Check the links by which KV reaches each worker. One far slower than the fastest is worth a look."""
    name = "KV links"
    rates = {
        (labels.get("instance", "?"), labels.get("peer", "?"), labels.get("link", "?")): value
        for labels, value in reading.metrics.each("cohort_kv_link_bytes_per_second")
        if value
    }
    paths = {
        (labels.get("instance", "?"), labels.get("peer", "?"), labels.get("link", "?")): labels.get("path", "?")
        for labels, value in reading.metrics.each("cohort_kv_link_path")
        if value
    }
    if not rates and not paths:
        return fine(name, "no KV was moved")

    def described(key: tuple[str, str, str]) -> str:
        sender, peer, link = key
        rate = f", {rates[key] / 1e6:.0f} MB/s" if key in rates else ""
        return f"{sender} to {peer}: {link} over {paths.get(key, 'an unknown path')}{rate}"

    slow = [key for key, rate in rates.items() if rate < SLOW_LINK * max(rates.values())]
    if slow:
        cure = "name the fast network: transfer.ucx.net_devices (docs/guide/links.md); requests go around it meanwhile"
        return warning(name, "; ".join(map(described, sorted(slow))), cure)
    return fine(name, "; ".join(map(described, sorted(rates.keys() | paths.keys()))))


def clocks(reading: Reading) -> Finding:
    off = {name: reply.ahead_s for name, reply in reading.replies.items() if reply.ahead_s}
    if off:
        says = ", ".join(
            f"{name} {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}" for name, ahead in off.items()
        )
        return warning("clocks", says, "a time daemon on every host: timedatectl set-ntp true")
    return fine("clocks", "within a second or two of this one")


def own_warnings(reading: Reading) -> Finding:
    """Collect the processes' own warnings, as on the live page."""
    found = [f"{process['instance']}: {text}" for process in reading.processes for text in process.get("warnings", ())]
    if found:
        return warning("warnings", "; ".join(found), "each names its own cure")
    return fine("warnings", "none")


CHECKS: Sequence[Callable[[Reading], Finding]] = (
    answering,
    workers,
    versions,
    restarts,
    queue,
    kv,
    event_loops,
    descriptors,
    step_times,
    losses,
    kv_links,
    clocks,
    own_warnings,
)
