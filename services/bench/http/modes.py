"""The measurements and their order: one run of one server, or several servers in turn. Called by `measuring`.

Servers are compared round by round: A B B A …, the same requests for all within a round. Every other round goes
backwards: which server comes first in a round is worth some percent on a shared machine. Rounds repeat lengths and
arrivals but not words, so that spread is the servers' and no round meets a warm prefix cache.
"""

from __future__ import annotations

from cohort.services.bench.http.harness import Harness, Interrupted, derive_salt
from cohort.services.bench.http.results.export import BenchResult
from cohort.services.bench.http.results.figures import compare
from cohort.services.bench.http.results.report import RunReport


async def measured(harness: Harness) -> BenchResult:
    """Every run, in the order they were made."""
    options = harness.options
    if len(harness.servers) > 1:
        return await _in_turn(harness)
    report = await harness.measure(harness.servers[0], label="run", salt=options.prompt_salt)
    return BenchResult(mode="single", settings=options.settings, runs=[report])


async def _in_turn(harness: Harness) -> BenchResult:
    options = harness.options
    found: list[RunReport] = []
    by_name: dict[str, list[RunReport]] = {server.target.name: [] for server in harness.servers}
    try:
        for number in range(1, options.rounds + 1):
            label = f"round {number}"
            for server in harness.servers[:: 1 if number % 2 else -1]:
                if harness.stop.is_set():
                    raise Interrupted
                report = await harness.measure(server, label=label, salt=derive_salt(options.prompt_salt, label))
                found.append(report)
                if not report.interrupted:
                    by_name[server.target.name].append(report)
    except Interrupted:
        if not found:
            raise
    # After Ctrl-C the last round may lack a server: only whole rounds are compared.
    whole = min(len(reports) for reports in by_name.values())
    compared = compare({name: reports[:whole] for name, reports in by_name.items()}) if whole else []
    return BenchResult(mode="compare", settings=options.settings, runs=found, comparison=compared)
