"""What a model's files say of it: configuration, shape, the dtype of its KV, its quantization.

No tensors and no torch: services ask these modules too. They know each other and `kernels/code_units.py`.
"""
