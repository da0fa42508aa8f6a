"""The worker as a pure state machine: sequences, KV transfers, parked KV, drafts, the iteration in flight."""
