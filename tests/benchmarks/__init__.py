"""Cohort beside other servers on one machine: what `scripts/opponents` runs."""
