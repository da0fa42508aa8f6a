"""HTTP as every endpoint needs it: bodies, error shapes, server-sent events, slow readers, listings.

The room knows aiohttp and `common/`; no endpoint and no request for tokens.
"""
