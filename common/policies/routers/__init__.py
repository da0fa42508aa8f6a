"""Routers that people run in front of whole engines, as placements: where a prompt's beginning may be cached, and load.

by_match       SGLang's router: the longest match while loads are alike, else the fewest requests
by_cost        Dynamo's: blocks to compute and blocks in use
by_scores      llm-d's: a weighted sum of scores
"""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.policies.interface import Placement
from cohort.common.policies.routers.routers import ByCost, ByMatch, ByScores
from cohort.common.policies.settings import BaselinesSettings, settings_of


def build_by_match(config: Config) -> Placement:
    return ByMatch(settings_of(config, BaselinesSettings).balance_abs)


def build_by_cost(config: Config) -> Placement:
    return ByCost(settings_of(config, BaselinesSettings).overlap_weight)


def build_by_scores(config: Config) -> Placement:
    options = settings_of(config, BaselinesSettings)
    return ByScores(options.queue_weight, options.kv_weight)
