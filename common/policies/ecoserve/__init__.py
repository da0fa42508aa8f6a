"""EcoServe: prompts fill the device, answers fill the KV cache, groups run in step, KV blocks are lent (E1–E10)."""
