"""Uploaded files and batch jobs: the store, the runner, the endpoints.

The room knows `generation/` and everything below; the APIs answer its lines through a protocol.
"""
