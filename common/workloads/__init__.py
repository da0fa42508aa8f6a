"""Workloads: which request arrives when, how long it is, what it shares with others. Pure data and seeded draws.

The simulator replays them, `cohort bench` sends them. NumPy and the standard library only; reading a trace file is the
one kind of I/O here. Nothing below knows policies, engines or services.
"""
