"""HTTP for every endpoint: bodies, error shapes, server-sent events, slow readers, listings. Knows no endpoint."""
