"""Devices as data and what steps cost on them: cost models, links, scatter, drafts' acceptance, profiles.

The ground of the simulator: the room knows no cluster and no report.
"""
