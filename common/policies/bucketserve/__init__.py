"""BucketServe: adaptive length buckets, memory-safe batches, prefill and decode on workers of their own (B1–B11)."""
