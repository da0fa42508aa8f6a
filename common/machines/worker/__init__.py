"""The worker as a pure state machine: sequences, KV transfers, parked KV, drafts, the iteration in flight.

It knows policies, KV bookkeeping, messages and the ground that all machines share; neither the manager's room nor the
gateway's.
"""
