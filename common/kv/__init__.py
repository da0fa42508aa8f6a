"""Bookkeeping of KV blocks: pools, leases, blocks with several users. No tensors, no policies."""
