// Registers the operators with torch's dispatcher as torch.ops.cohort.*, for CPU tensors.
#include "ops.h"

#include <torch/library.h>

#include "matrix_unit.h"

namespace cohort {
namespace {

// What the compiler was allowed to assume about the processor; the loader refuses to run on a lesser one.
bool processor_suffices() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
#if defined(__AVX2__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
#endif
#if defined(__AVX512F__)
  if (!__builtin_cpu_supports("avx512f")) return false;
#endif
#if defined(__AVX512BF16__)
  if (!__builtin_cpu_supports("avx512bf16")) return false;
#endif
#if defined(COHORT_MATRIX_UNIT)
  if (!request_matrix_unit()) return false;
#endif
#endif
  return true;
}

// All layers of a Llama-shaped decoder in one call.
//
// The same steps in the same order as the model's own loop in Python, from the same kernels. In one call the step holds
// no interpreter lock from its first layer to its last, so the process's event loop runs on beside it; as three hundred
// calls it asked for that lock after each.
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

}  // namespace
}  // namespace cohort

TORCH_LIBRARY(cohort, m) {
  m.def("processor_suffices() -> bool", &cohort::processor_suffices);
  m.def(
      "paged_attention(Tensor query, Tensor kv, int layer, Tensor query_start, Tensor context_lens, "
      "Tensor block_tables, Tensor? directions, float scale, Tensor(a!) out, int sliding_window, "
      "float softcap=0, Tensor? sinks=None) -> ()");
  m.def("write_kv(Tensor key, Tensor value, Tensor(a!) kv, int layer, Tensor slot_mapping) -> ()");
  m.def("gather_slots(Tensor kv, Tensor slots, Tensor(a!) out) -> ()");
  m.def("scatter_slots(Tensor src, Tensor(a!) kv, Tensor slots) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()");
  m.def("rope_inplace(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, Tensor positions) -> ()");
  m.def("silu_mul(Tensor gate_up, Tensor(a!) out) -> ()");
  m.def("clamped_swiglu(Tensor gate_up, float alpha, float limit, Tensor(a!) out) -> ()");
  m.def(
      "choose_experts(Tensor scores, bool over_chosen, bool rounded, Tensor(a!) experts, Tensor(b!) weights) -> ()");
  m.def("add_weighted(Tensor parts, Tensor weights, Tensor? shared, Tensor(a!) residual) -> ()");
  m.def("sample_tokens(Tensor[] logits, Tensor rules, Tensor keys, Tensor(a!) tokens) -> ()");
  m.def("panel_outputs() -> int", &cohort::panel_outputs);
  m.def("panels_multiply_bf16() -> bool", &cohort::panels_multiply_bf16);
  m.def("huge_zeros(int bytes) -> Tensor", &cohort::huge_zeros);
  m.def("pack_panels(Tensor weight, Tensor(a!) panels, bool gated) -> ()");
  m.def(
      "quantized_bytes(int bits, int unit, bool offsets, bool gated, int outputs, int inputs, bool e4m3=False) -> int",
      &cohort::quantized_bytes);
  m.def("pack_e4m3(Tensor codes, Tensor scales, int group, bool gated, Tensor(a!) panels) -> ()");
  m.def(
      "pack_quantized(Tensor codes, Tensor factors, Tensor scales, Tensor? offsets, int group, int zero, int unit, "
      "bool gated, Tensor(a!) panels) -> ()");
  m.def("panel_product(Tensor x, Tensor panels, Tensor? bias, Tensor(a!) out) -> ()");
  m.def("panel_product_added(Tensor x, Tensor panels, Tensor(a!) residual) -> ()");
  m.def("panel_product_gated(Tensor x, Tensor panels, Tensor(a!) out) -> ()");
  m.def(
      "llama_layers(Tensor[] input_norms, Tensor[] qkv_panels, Tensor?[] qkv_biases, Tensor?[] q_norms, "
      "Tensor?[] k_norms, Tensor[] out_panels, Tensor[] mlp_norms, Tensor[] gated_panels, Tensor[] down_panels, "
      "int[] windows, float eps, float scale, Tensor cos, Tensor sin, Tensor positions, Tensor slots, "
      "Tensor query_start, Tensor context_lens, Tensor block_tables, Tensor? directions, Tensor(a!) kv, "
      "Tensor(b!) residual, Tensor(c!) normed, Tensor(d!) qkv, Tensor(e!) attended, Tensor(f!) activated) -> ()");
  m.def("panel_rows(Tensor panels, Tensor ids, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(cohort, CPU, m) {
  m.impl("paged_attention", &cohort::paged_attention);
  m.impl("write_kv", &cohort::write_kv);
  m.impl("gather_slots", &cohort::gather_slots);
  m.impl("scatter_slots", &cohort::scatter_slots);
  m.impl("rms_norm", &cohort::rms_norm);
  m.impl("rope_inplace", &cohort::rope_inplace);
  m.impl("silu_mul", &cohort::silu_mul);
  m.impl("clamped_swiglu", &cohort::clamped_swiglu);
  m.impl("choose_experts", &cohort::choose_experts);
  m.impl("add_weighted", &cohort::add_weighted);
  m.impl("sample_tokens", &cohort::sample_tokens);
  m.impl("pack_panels", &cohort::pack_panels);
  m.impl("pack_quantized", &cohort::pack_quantized);
  m.impl("pack_e4m3", &cohort::pack_e4m3);
  m.impl("panel_product", &cohort::panel_product);
  m.impl("panel_product_added", &cohort::panel_product_added);
  m.impl("panel_product_gated", &cohort::panel_product_gated);
  m.impl("llama_layers", &cohort::llama_layers);
  m.impl("panel_rows", &cohort::panel_rows);
}
