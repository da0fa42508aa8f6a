"""Matrix products in Triton: coded weights, experts, products with a fixed order of sums.

The room knows the GPU's plan and element-wise kernels; of attention only the product of its tiles.
"""
