"""The KV links of this machine, measured between two processes."""
