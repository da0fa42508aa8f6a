"""Numbers of aligned batches: apart from those of the manager's dispatches, so that a worker can tell them apart."""

FIRST_BATCH = 1 << 32
