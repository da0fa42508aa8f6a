"""The worker's process: the host of its machine, the engine's threads, metrics, learned step times, the profile.

The top of the engine: it knows every other room, machines, messages and transport.
"""
