"""Sockets and KV links: messages over ZeroMQ, blocks over UCX, NIXL or ZeroMQ. No policies, no engine."""
