// A mixture's routing and its weighted sum, one row at a time: no bit of a row depends on what stands beside it.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops.h"
#include "simd.h"

namespace cohort {
namespace {

constexpr int64_t kRowsPerThread = 16;

// The k = width largest of `scores`, the lower expert first among equals, in ascending order of experts; a NaN loses.
template <typename T>
void choose_row(const T* scores, int64_t count, bool over_chosen, bool rounded, int64_t* experts, float* weights,
                int64_t width) {
  for (int64_t place = 0; place < width; ++place) {
    experts[place] = place;
    weights[place] = -std::numeric_limits<float>::infinity();
  }
  int64_t chosen = 0;
  float poison = 0;  // a NaN among the scores makes every weight one
  for (int64_t e = 0; e < count; ++e) {
    const float score = to_float(scores[e]);
    if (score != score) poison = score;
    if (chosen == width && !(score > weights[width - 1])) continue;
    int64_t place = chosen < width ? chosen++ : width - 1;
    for (; place > 0 && !(weights[place - 1] >= score); --place) {
      weights[place] = weights[place - 1];
      experts[place] = experts[place - 1];
    }
    weights[place] = score;
    experts[place] = e;
  }
  const float largest = weights[0];
  float total = 0;
  if (!over_chosen)
    for (int64_t e = 0; e < count; ++e) total += std::exp(to_float(scores[e]) - largest);
  for (int64_t place = 0; place < width; ++place) weights[place] = std::exp(weights[place] - largest);
  if (over_chosen)
    for (int64_t place = 0; place < width; ++place) total += weights[place];
  for (int64_t place = 0; place < width; ++place) {
    const float weight = weights[place] / total + poison;
    weights[place] = rounded ? to_float(from_float<T>(weight)) : weight;
  }
  for (int64_t end = 1; end < width; ++end) {
    const int64_t expert = experts[end];
    const float weight = weights[end];
    int64_t place = end;
    for (; place > 0 && experts[place - 1] > expert; --place) {
      experts[place] = experts[place - 1];
      weights[place] = weights[place - 1];
    }
    experts[place] = expert;
    weights[place] = weight;
  }
}

template <typename T>
void choose(const at::Tensor& scores, bool over_chosen, bool rounded, at::Tensor& experts, at::Tensor& weights) {
  const T* from = static_cast<const T*>(scores.const_data_ptr());
  int64_t* chosen = experts.mutable_data_ptr<int64_t>();
  float* parts = weights.mutable_data_ptr<float>();
  const int64_t count = scores.size(1), width = experts.size(1);
  at::parallel_for(0, scores.size(0), kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      choose_row(from + row * count, count, over_chosen, rounded, chosen + row * width, parts + row * width, width);
  });
}

// Rounds after every operation, as tensors of T would; `parts` holds a row's k outputs one after the other.
template <typename T>
void add_row(const T* parts, const float* weights, int64_t k, const T* shared, T* residual, int64_t width) {
  using S = Simd<kWide>;
  int64_t i = 0;
  for (; i + kWide <= width; i += kWide) {
    auto total = S::template rounded<T>(S::load(parts + i) * weights[0]);
    for (int64_t place = 1; place < k; ++place)
      total = S::template rounded<T>(
          total + S::template rounded<T>(S::load(parts + place * width + i) * weights[place]));
    if (shared != nullptr) total = S::template rounded<T>(total + S::load(shared + i));
    S::store(residual + i, S::load(residual + i) + total);
  }
  const auto rounded = [](float x) { return to_float(from_float<T>(x)); };
  for (; i < width; ++i) {
    float total = rounded(to_float(parts[i]) * weights[0]);
    for (int64_t place = 1; place < k; ++place)
      total = rounded(total + rounded(to_float(parts[place * width + i]) * weights[place]));
    if (shared != nullptr) total = rounded(total + to_float(shared[i]));
    residual[i] = from_float<T>(to_float(residual[i]) + total);
  }
}

template <typename T>
void add(const at::Tensor& parts, const at::Tensor& weights, const at::Tensor* shared, at::Tensor& residual) {
  const T* outputs = static_cast<const T*>(parts.const_data_ptr());
  const float* factors = weights.const_data_ptr<float>();
  const T* own = shared == nullptr ? nullptr : static_cast<const T*>(shared->const_data_ptr());
  T* to = static_cast<T*>(residual.mutable_data_ptr());
  const int64_t k = weights.size(1), width = residual.size(1);
  at::parallel_for(0, residual.size(0), kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      add_row(outputs + row * k * width, factors + row * k, k, own == nullptr ? nullptr : own + row * width,
              to + row * width, width);
  });
}

}  // namespace

void choose_experts(const at::Tensor& scores, bool over_chosen, bool rounded, at::Tensor& experts,
                    at::Tensor& weights) {
  TORCH_CHECK_VALUE(scores.dim() == 2 && scores.is_contiguous(), "scores must be dense [tokens, experts]");
  TORCH_CHECK_VALUE(experts.dim() == 2 && experts.size(0) == scores.size(0) && experts.size(1) >= 1 &&
                        experts.size(1) <= scores.size(1) && experts.is_contiguous(),
                    "experts must be dense [tokens, k], k from 1 to the number of experts");
  TORCH_CHECK_VALUE(weights.sizes() == experts.sizes() && weights.is_contiguous(), "weights must be like experts");
  TORCH_CHECK_TYPE(experts.scalar_type() == at::kLong && weights.scalar_type() == at::kFloat,
                   "experts must be int64, weights float32");
  TORCH_CHECK_TYPE(scores.scalar_type() == at::kFloat || scores.scalar_type() == at::kBFloat16,
                   "scores must be float32 or bfloat16");
  scores.scalar_type() == at::kFloat ? choose<float>(scores, over_chosen, rounded, experts, weights)
                                     : choose<bf16>(scores, over_chosen, rounded, experts, weights);
}

void add_weighted(const at::Tensor& parts, const at::Tensor& weights, const std::optional<at::Tensor>& shared,
                  at::Tensor& residual) {
  TORCH_CHECK_VALUE(weights.dim() == 2 && weights.size(1) >= 1 && weights.is_contiguous(),
                    "weights must be dense [tokens, k]");
  TORCH_CHECK_VALUE(residual.dim() == 2 && residual.size(0) == weights.size(0) && residual.is_contiguous(),
                    "residual must be dense [tokens, hidden]");
  TORCH_CHECK_VALUE(parts.dim() == 2 && parts.size(0) == weights.numel() && parts.size(1) == residual.size(1) &&
                        parts.is_contiguous(),
                    "parts must be dense [tokens * k, hidden]");
  TORCH_CHECK_VALUE(!shared || (shared->sizes() == residual.sizes() && shared->is_contiguous()),
                    "shared must be dense and like residual");
  const auto dtype = residual.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16, "float32 or bfloat16 only");
  TORCH_CHECK_TYPE(weights.scalar_type() == at::kFloat && parts.scalar_type() == dtype &&
                       (!shared || shared->scalar_type() == dtype),
                   "weights must be float32, the others of residual's dtype");
  const at::Tensor* own = shared ? &*shared : nullptr;
  dtype == at::kFloat ? add<float>(parts, weights, own, residual) : add<bf16>(parts, weights, own, residual);
}

}  // namespace cohort
