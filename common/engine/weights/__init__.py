"""From files to matrices: readers of tensors, quantized formats, linear layers, the memory they take.

The room knows `device/`, `config/` and `cache/`; no model.
"""
