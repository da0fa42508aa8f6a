"""What every process has: its life as a service, logs, metrics, recordings, the garbage collector's pauses.

The room knows transport and configuration; nothing of what a process does.
"""
