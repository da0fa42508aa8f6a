"""The progress bar of a run: requests done, in flight, live token rate, failures. Only on a terminal, only on stderr.

Called by `harness`. Refreshes seldom, because drawing takes time from the loop that is measuring.
"""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cohort.services.bench.http.load import driver
from cohort.services.bench.http.load.client import now_s

REFRESH_PERIOD_S = 0.5


async def show_progress(state: driver.Progress, total: int, label: str, console: Console) -> None:
    """Runs until cancelled."""
    if not console.is_terminal:
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[live]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(label, total=total, live="")
        while True:
            await asyncio.sleep(REFRESH_PERIOD_S)
            bar.update(task, completed=state.ended, live=live_line(state, now_s() - state.start_s))
            bar.refresh()


def live_line(state: driver.Progress, elapsed_s: float) -> str:
    parts = [f"{state.sent - state.ended} in flight"]
    if elapsed_s > 0:
        # Tokens of requests still running count too: long answers would else show nothing for minutes.
        running = sum(len(record.token_s) for record in state.records if record.status == "pending")
        parts.append(f"{(state.output_tokens + running) / elapsed_s:.0f} tokens/s")
    if state.failed:
        parts.append(f"[red]{state.failed} failed[/red]")
    return " · ".join(parts)
