// All layers of a Llama-shaped decoder in one call.
//
// The same steps in the same order as the model's own loop in Python, from the same kernels. In one call the step holds
// no interpreter lock from its first layer to its last, so the process's event loop runs on beside it; as three hundred
// calls it asked for that lock after each.
#include "ops.h"

namespace cohort {

void llama_layers(at::TensorList input_norms, at::TensorList qkv_panels,
                  const c10::List<std::optional<at::Tensor>>& qkv_biases,
                  const c10::List<std::optional<at::Tensor>>& q_norms,
                  const c10::List<std::optional<at::Tensor>>& k_norms, at::TensorList out_panels,
                  at::TensorList mlp_norms, at::TensorList gated_panels, at::TensorList down_panels,
                  at::IntArrayRef windows, double eps, double scale, const at::Tensor& cos, const at::Tensor& sin,
                  const at::Tensor& positions, const at::Tensor& slots, const at::Tensor& query_start,
                  const at::Tensor& context_lens, const at::Tensor& block_tables,
                  const std::optional<at::Tensor>& directions, at::Tensor& kv, at::Tensor& residual,
                  at::Tensor& normed, at::Tensor& qkv, at::Tensor& attended, at::Tensor& activated) {
  const size_t layers = input_norms.size();
  for (size_t count : {qkv_panels.size(), qkv_biases.size(), q_norms.size(), k_norms.size(), out_panels.size(),
                       mlp_norms.size(), gated_panels.size(), down_panels.size(), windows.size()}) {
    TORCH_CHECK_VALUE(count == layers, "every list must have one entry per layer");
  }
  check_cache(kv, int64_t(layers) - 1);
  const int64_t tokens = residual.size(0), kv_heads = kv.size(3), head_dim = cache_head_dim(kv);
  const int64_t query_size = attended.size(1), kv_size = kv_heads * head_dim;
  TORCH_CHECK_VALUE(qkv.size(1) == query_size + 2 * kv_size, "qkv must hold queries, keys and values");
  auto heads = [&](int64_t begin, int64_t width) {
    return qkv.narrow(1, begin, width).unflatten(1, {width / head_dim, head_dim});
  };
  at::Tensor query = heads(0, query_size), key = heads(query_size, kv_size), value = heads(query_size + kv_size, kv_size);
  at::Tensor per_head = attended.view({tokens, query_size / head_dim, head_dim});
  for (size_t l = 0; l < layers; ++l) {
    rms_norm(residual, input_norms[l], eps, normed);
    panel_product(normed, qkv_panels[l], qkv_biases[l], qkv);
    if (std::optional<at::Tensor> norm = q_norms[l]) rms_norm(query, *norm, eps, query);
    if (std::optional<at::Tensor> norm = k_norms[l]) rms_norm(key, *norm, eps, key);
    rope_inplace(query, key, cos, sin, positions);
    write_kv(key, value, kv, int64_t(l), slots);
    paged_attention(query, kv, int64_t(l), query_start, context_lens, block_tables, directions, scale, per_head,
                    windows[l]);
    panel_product_added(attended, out_panels[l], residual);
    rms_norm(residual, mlp_norms[l], eps, normed);
    panel_product_gated(normed, gated_panels[l], activated);
    panel_product_added(activated, down_panels[l], residual);
  }
}

}  // namespace cohort
