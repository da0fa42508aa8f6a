"""The kernels in Triton, for NVIDIA GPUs.

`ops/`, one folder up, sends tensors on a GPU here (`available`) and is what the engine calls; `plan` and `workspace`
are what it prepares, once per model.

A CUDA graph may capture every call that serves decode rows: nothing is allocated when a workspace is given, nothing is
copied to the host, and the grid follows from shapes and `AttentionMeta.max_context_len` alone. Prefill runs outside
graphs. Without a GPU the same kernels run under Triton's interpreter (TRITON_INTERPRET=1): so the tests prove them.
"""
