"""Commands that need no running pipeline: simulations, comparisons, figures, replays, benchmarks.

Each fronts a program of `services/simulator/` or `services/bench/`, and loads it when it is called.
"""
