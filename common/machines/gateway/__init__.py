"""The gateway as a pure state machine: admission, prediction, the ledger of requests and their tokens."""
