"""The gateway as a pure state machine: admission, prediction, the ledger of requests and their tokens.

It knows policies, messages and the ground that all machines share; neither the worker's room nor the manager's.
"""
