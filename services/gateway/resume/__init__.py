"""Streams that go on after a gateway died: what is written before a client sees it, and read again.

The room knows `generation/` and everything below; no API.
"""
