"""What a device is asked and given: its name, streams, uploads, kernels compiled ahead.

The ground of the engine: it knows torch and `kernels/`, and no other room of the engine.
"""
