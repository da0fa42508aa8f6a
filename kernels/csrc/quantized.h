// Products over weights of 8 and 4 bits, for the operators that take any panels (linear.cpp).
#pragma once

#include <ATen/core/Tensor.h>

namespace cohort {

// Packed by pack_quantized; panels of floats have another dtype.
inline bool is_quantized(const at::Tensor& panels) { return panels.scalar_type() == at::kByte; }

void quantized_product(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& bias,
                       at::Tensor& out);
void quantized_product_added(const at::Tensor& x, const at::Tensor& panels, at::Tensor& residual);
void quantized_product_gated(const at::Tensor& x, const at::Tensor& panels, at::Tensor& out);
void quantized_rows(const at::Tensor& panels, const at::Tensor& ids, at::Tensor& out);

}  // namespace cohort
