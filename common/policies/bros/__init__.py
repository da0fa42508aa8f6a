"""BROS: real-time and best-effort requests on the same device, their KV in the same blocks (mechanisms R1-R15).

slack_packing              the worker's scheduler: what runs next, and who is dropped (Alg. 1; R2, R4, R11)
request_queues             two classes, waiting and pending, pulled by urgency (R1, R5, Fig. 8)
token_groups               deadlines of token groups and what they leave (R2, R15)
iteration_cost             what the next iteration takes, learned (R3)
batch_size                 rows of an iteration, as TCP finds its window (R6)
bidirectional_allocation   blocks filled from both ends; slots away and back (R7-R11; the blocks: common/kv/shared_blocks)
copy_list                  the copies of one iteration, consolidated (R12)

R13 and R14 are the engine's: docs/papers.md.
"""
