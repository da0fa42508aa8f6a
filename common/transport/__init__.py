"""Sockets and KV links: messages over ZeroMQ, blocks over UCX or ZeroMQ. No policies, no engine."""
