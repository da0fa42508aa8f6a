"""Starts, watches and ends all processes of one pipeline on one host.

    options ──▶ preflight ──▶ plan ──▶ supervisor ──▶ child (one per process)
                                          │  asks restart_policy
                                          └──▶ console

`control` is the other side: --detach, --stop, --status. Nothing here knows what the processes do.
"""
