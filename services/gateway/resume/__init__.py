"""Streams that outlive their gateway: what is written before a client sees it, and read again. Knows no API."""
