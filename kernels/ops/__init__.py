"""What the engine calls: attention, slots, fused element-wise work, coded products, experts, sampling.

Each operation picks the C++, the Triton or the reference form by the tensors' device.
"""
