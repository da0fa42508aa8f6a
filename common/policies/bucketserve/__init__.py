"""BucketServe: adaptive length buckets, memory-safe batches, prefill and decode on workers of their own (B1–B11).

prefill_order      the manager's order: buckets in, batches out (B6, §III)
bucket_set         adaptive buckets: split and merge (Alg. 1; B5)
optimal_split      the bounds of least expected waste instead (B5, Eq. 3)
waste              padding of one batch and of all buckets (Eq. 2, Eq. 3; B2)
safe_batch         KV of a batch (Eq. 1; B1), safe memory (Eq. 5; B3), the largest safe batch (Eq. 6; B4)
controller         Eq. 6 from live memory, request by request (B4, B7)
live_memory        what every worker really has left (B3, B7)
demand             what a forecast means for the next batch (B9)
ageing, due_list   class, priority and age in one number; who of a cell is due (B6, B10)
length_index, length_histogram   waiting requests by length; f(S) of Eq. 3 (B11)
padded_prefill     rectangular prefill batches on the worker (B2, B8)
"""
