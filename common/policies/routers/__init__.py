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
    options = settings_of(config, BaselinesSettings)
    return ByMatch(options.cache_threshold, options.balance_abs, options.balance_rel)


def build_by_cost(config: Config) -> Placement:
    options = settings_of(config, BaselinesSettings)
    return ByCost(options.overlap_weight, options.router_temperature)


def build_by_scores(config: Config) -> Placement:
    options = settings_of(config, BaselinesSettings)
    return ByScores(options.prefix_weight, options.queue_weight, options.kv_weight)
