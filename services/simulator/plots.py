"""A sweep as a picture: throughput, latency and attained SLOs over what was varied. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cohort.services.simulator.core.report import SimReport


def write_plot(path: Path, label: str, names: Sequence[str], reports: Sequence[SimReport]) -> None:
    """Four panels; the format is what the file's suffix says."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7))
    positions = list(range(len(names)))

    def line(kind: str, quantile: str) -> list[float]:
        found = [getattr(report.overall, kind) for report in reports]
        return [float(getattr(stats, quantile)) if stats else float("nan") for stats in found]

    panels: tuple[tuple[str, dict[str, list[float]]], ...] = (
        ("requests/s", {"finished": [r.overall.requests_per_s for r in reports]}),
        ("time to first token, ms", {"p50": line("ttft_ms", "p50"), "p99": line("ttft_ms", "p99")}),
        ("time between tokens, ms", {"p50": line("tbt_ms", "p50"), "p99": line("tbt_ms", "p99")}),
        (
            "share",
            {
                "SLOs kept, of sent": line("slo", "kept_of_sent"),
                "KV in use": [sum(i.kv_mean for i in r.instances) / len(r.instances) for r in reports],
            },
        ),
    )
    for axis, (title, lines) in zip(axes.flat, panels, strict=True):
        for name, values in lines.items():
            axis.plot(positions, values, marker="o", label=name)
        axis.set_title(title)
        axis.set_xticks(positions, names, rotation=30, ha="right")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"{reports[0].model} on {reports[0].device}, by {label}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
