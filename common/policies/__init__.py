"""Policies: pure decisions. They never act.

Nothing below here does I/O, reads a clock, draws unseeded randomness or knows torch. One folder per system; no
system imports another; `compose.py` joins them; live services and the simulator host the same objects.
"""
