"""Measurements of the engine for `cohort bench --engine`. Never imported by a service that serves."""
