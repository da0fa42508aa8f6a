"""How good the advice is: on random traffic and clusters, what it recommends beside the best of every set-up.

    pair: model, devices, lengths, burstiness, load, SLO ─▶ advise ─▶ the advised one ─┐
                                  └─▶ every candidate, those that it dropped, too ─────┴▶ fresh seeds: share of the best

The truth is simulated with seeds that the advice has not seen: every candidate on one, the best few and the advised one
on two more, which count. A pair keeps `kept` of its SLOs where the best candidate keeps `most`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec

from cohort.common.config import CONFIGS_DIR
from cohort.common.policies.cost_model import StepWork, prefill_pairs
from cohort.services.simulator.advise.advise import DURATION_S, Found, advise
from cohort.services.simulator.advise.candidates import Candidate, candidates
from cohort.services.simulator.advise.judgement import kept, ranked
from cohort.services.simulator.advise.lab import Lab, Look
from cohort.services.simulator.core.cluster import cost_model
from cohort.services.simulator.core.setup import cluster_of, preset_names, simulation_options, traffic_of
from cohort.services.simulator.core.traffic import parse_slo
from cohort.services.simulator.hardware.hardware import load_device, load_model
from cohort.services.simulator.options import add_advise_arguments

ENOUGH = 0.98
_ALL, _BEST = 100_000.0, 300_000.0
"""Work (`lab.py`) with which all candidates, then the best few, are simulated."""
_FEW = 5
_TRUTH = 5_000
"""Offset of the seeds of the truth."""
_MODELS = ("llama-3-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3-70b", "opt-13b", "mixtral-8x7b")
_SHAPES = ("bros-sharegpt", "bros-lmsys", "alignedserve-azure", "bucketserve-alpaca", "dynaserve-code")
_MOST_WORK_PER_S = 3_000.0
"""Work of a pair's traffic: a faster one would take too long to simulate with every candidate."""


class Pair(msgspec.Struct, frozen=True):
    """`kept`, `most`: shares of SLOs that the advised and the best candidate keep on fresh seeds. `took_s`: wall-clock
    time of the advice, and of the truth."""

    number: int
    label: str
    options: list[str]
    setups: int
    advised: str
    best: str
    kept: float
    most: float
    took_s: tuple[float, float]

    @property
    def share(self) -> float:
        return self.kept / self.most if self.most else 1.0


def measure(count: int, seed: int, jobs: int, file: Path | None, say: Callable[[str], None]) -> list[Pair]:
    """Measure so many pairs, but those that the file has; it gets each as soon as it is known."""
    known: dict[tuple[str, ...], Pair] = {}
    if file is not None and file.exists():
        found = [msgspec.json.decode(line, type=Pair) for line in file.read_bytes().splitlines()]
        known = {tuple(pair.options): pair for pair in found}
    pairs = []
    for number in range(count):
        asked = drawn(Random(f"{seed}/{number}"))
        pair = known.get(tuple(asked))
        if pair is None:
            pair = _measured(number, asked, jobs)
            if file is not None:
                with file.open("ab") as lines:
                    lines.write(msgspec.json.encode(pair) + b"\n")
        say(f"{number + 1}/{count} {pair.label}: {pair.share:.3f} of the best")
        pairs.append(pair)
    return pairs


def drawn(random: Random) -> list[str]:
    """Draw options of `cohort advise`: traffic that some set-ups serve well and others do not."""
    gpus = sorted(path.stem for path in (CONFIGS_DIR / "devices").glob("*.yaml"))
    gpus = [name for name in gpus if load_device(name)[1].kind == "gpu"]
    while True:
        fixed = f"{random.choice((128, 512, 1024, 2048, 4096))}x{random.choice((32, 128, 256, 512))}"
        given = {
            "--trace": random.choice((fixed, *_SHAPES)),
            "--cluster": f"{random.choice(gpus)}:{random.choice((1, 2, 4, 8))}",
            "--model": random.choice(_MODELS),
            "--cv": random.choice(("1", "2")),
            "--seed": str(random.randrange(1000)),
        }
        part, slack, pace = random.uniform(0.1, 0.5), random.uniform(3.0, 15.0), random.uniform(1.3, 4.0)
        lab, every = _lab([f"{name}={value}" for name, value in given.items()], 1, ["unified"])
        if not every:
            continue
        sample = sorted(lab.traffic.sample(), key=lambda item: item.prompt_tokens)
        prompt = sample[9 * len(sample) // 10].prompt_tokens
        cost = cost_model(lab.model, every[0].cluster)
        alone_s = cost.step_s(StepWork(prompt, 1, 1, prefill_pairs(0, prompt), prompt))
        token_s = cost.step_s(StepWork(1, 1, 1, decode_rows=1, decode_context=prompt, longest_context=prompt))
        rate = part * lab.load(every[0], 0).bound(sample)
        if rate * lab.request_work > _MOST_WORK_PER_S:
            continue
        given["--rate"] = f"{rate:.3g}"
        given["--slo"] = f"ttft={max(0.2, slack * alone_s):.2g},tpot={pace * token_s:.2g}"
        return [f"{name}={value}" for name, value in given.items()]


def _options(asked: list[str], jobs: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_advise_arguments(parser)
    return parser.parse_args([*asked, f"--jobs={jobs}"])


def _lab(asked: list[str], jobs: int, presets: list[str]) -> tuple[Lab, list[Candidate]]:
    options = _options(asked, jobs)
    model = load_model(options.model)
    lab = Lab(options, model, traffic_of(options), simulation_options(options))
    return lab, candidates(options, presets, cluster_of(options, options.cluster), model, lab.refuse)


def _measured(number: int, asked: list[str], jobs: int) -> Pair:
    options, began_s = _options(asked, jobs), time.perf_counter()
    found: Found = advise(
        options,
        preset_names(),
        cluster_of(options, options.cluster),
        load_model(options.model),
        traffic_of(options),
        simulation_options(options),
        lambda done, total: None,
    )
    advised_s = time.perf_counter() - began_s
    lab, _ = _lab(asked, jobs, [])
    seed = options.seed + _TRUTH
    with lab.processes(jobs):
        first = ranked(lab.look(found.all, Look(seed, DURATION_S, _ALL)), parse_slo(options.slo))
        best = [candidate for candidate, _ in first[:_FEW]]
        counted = best if found.best in best else [*best, found.best]
        shares: dict[str, float] = dict.fromkeys((each.label for each in counted), 0.0)
        for more in (1, 2):
            for candidate, report in lab.look(counted, Look(seed + more, DURATION_S, _BEST)):
                shares[candidate.label] += kept(report) / 2
    winner = max(counted, key=lambda each: shares[each.label])
    traffic = f"{options.trace} at {options.rate:g}/s (cv {options.cv:g}), {options.slo}"
    return Pair(
        number,
        f"{traffic}, {options.model} on {options.cluster}",
        asked,
        len(found.all),
        found.best.label,
        winner.label,
        shares[found.best.label],
        shares[winner.label],
        (round(advised_s, 1), round(time.perf_counter() - began_s - advised_s, 1)),
    )
