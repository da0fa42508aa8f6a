"""Starts, watches and ends all processes of one pipeline.

    options ──▶ preflight ──▶ plan ──▶ supervisor ──▶ hosts: here (children) │ on_ray (on a cluster's nodes)
                                          │  asks restart_policy
                                          └──▶ console

`control` is the other side: --detach, --stop, --status. Nothing here knows what the processes do.
"""
