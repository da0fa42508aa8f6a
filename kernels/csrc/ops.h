// The operators as torch sees them; see kernels/*.py for what each means.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>

namespace cohort {

// kv [blocks, layers, 2, kv_heads, block_size, head_dim], keys at 0 and values at 1; with 1 in place of 2 keys are their
// own values (latents). In bytes, rows are in FP8: head_dim codes and a scale (fp8_cache.h).
inline bool is_fp8(const at::Tensor& kv) { return kv.scalar_type() == at::kByte; }

inline void check_cache(const at::Tensor& kv, int64_t layer) {
  TORCH_CHECK_VALUE(kv.dim() == 6 && (kv.size(2) == 2 || kv.size(2) == 1) && kv.is_contiguous(),
                    "kv must be dense [blocks, layers, 2, kv_heads, block_size, head_dim], or 1 in place of 2");
  TORCH_CHECK_TYPE(kv.scalar_type() == at::kFloat || kv.scalar_type() == at::kBFloat16 || is_fp8(kv),
                   "kv must be float32, bfloat16 or rows of FP8");
  TORCH_CHECK_VALUE(!is_fp8(kv) || (kv.size(2) == 2 && kv.size(5) > 1), "latents are not kept in FP8");
  TORCH_CHECK_INDEX(layer >= 0 && layer < kv.size(1), "layer ", layer, " of ", kv.size(1));
}

inline int64_t cache_head_dim(const at::Tensor& kv) { return kv.size(5) - (is_fp8(kv) ? 1 : 0); }

// Elements from a key to its value.
inline int64_t value_offset(const at::Tensor& kv) { return kv.size(2) == 2 ? kv.stride(2) : 0; }

void paged_attention(const at::Tensor& query, const at::Tensor& kv, int64_t layer, const at::Tensor& query_start,
                     const at::Tensor& context_lens, const at::Tensor& block_tables,
                     const std::optional<at::Tensor>& directions, double scale, at::Tensor& out, int64_t window,
                     double softcap = 0, const std::optional<at::Tensor>& sinks = std::nullopt);
void write_kv(const at::Tensor& key, const at::Tensor& value, at::Tensor& kv, int64_t layer, const at::Tensor& slots);
void gather_slots(const at::Tensor& kv, const at::Tensor& slots, at::Tensor& out);
void scatter_slots(const at::Tensor& src, at::Tensor& kv, const at::Tensor& slots);
void rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, at::Tensor& out);
void rope_inplace(at::Tensor& q, at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
                  const at::Tensor& positions);
void silu_mul(const at::Tensor& gate_up, at::Tensor& out);
void clamped_swiglu(const at::Tensor& gate_up, double alpha, double limit, at::Tensor& out);
void choose_experts(const at::Tensor& scores, bool over_chosen, bool rounded, at::Tensor& experts, at::Tensor& weights);
void add_weighted(const at::Tensor& parts, const at::Tensor& weights, const std::optional<at::Tensor>& shared,
                  at::Tensor& residual);
void sample_tokens(at::TensorList logits, const at::Tensor& rules, const at::Tensor& keys, at::Tensor& tokens);
int64_t panel_outputs();
bool panels_multiply_bf16();
void pack_panels(const at::Tensor& weight, at::Tensor& panels, bool gated);
void panel_product(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& bias,
                   at::Tensor& out);
void panel_product_added(const at::Tensor& x, const at::Tensor& panels, at::Tensor& residual);
void panel_product_gated(const at::Tensor& x, const at::Tensor& panels, at::Tensor& out);
void panel_rows(const at::Tensor& panels, const at::Tensor& ids, at::Tensor& out);
int64_t quantized_bytes(int64_t bits, int64_t unit, bool offsets, bool gated, int64_t outputs, int64_t inputs,
                        bool e4m3);
void pack_e4m3(const at::Tensor& codes, const at::Tensor& scales, int64_t group, bool gated, at::Tensor& panels);
void pack_quantized(const at::Tensor& codes, const at::Tensor& factors, const at::Tensor& scales,
                    const std::optional<at::Tensor>& offsets, int64_t group, int64_t zero, int64_t unit, bool gated,
                    at::Tensor& panels);
at::Tensor huge_zeros(int64_t bytes);

}  // namespace cohort
