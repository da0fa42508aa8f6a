"""Systems side by side over workloads, loads and seeds: the file that says them, the runs that it asks for, the tables.

What runs a cell is given by the caller: `services/simulator/core/run.py` simulates it.
"""
