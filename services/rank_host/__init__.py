"""Ranks of a worker on another host: a process that dials rank 0 and follows it."""
