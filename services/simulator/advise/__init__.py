"""Simulations that choose: `cohort advise`, the planner's candidates, a planned day.

The room knows `core/` and `hardware/`.
"""
