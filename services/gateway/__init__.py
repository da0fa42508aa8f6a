"""The gateway: HTTP in front, the ledger of requests behind it, text out of tokens."""
