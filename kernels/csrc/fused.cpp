// The elementwise steps of a Llama-shaped layer, one pass over memory each, rows shared among torch's threads.
//
// Rounding follows the reference: float32 inside, rounded to the tensor's dtype where transformers rounds, so that
// bfloat16 differs from it by no more than one unit in the last place.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>

#include "ops.h"
#include "silu.h"
#include "simd.h"

namespace cohort {
namespace {

constexpr int64_t kElementsPerThread = 1 << 14;

int64_t grain(int64_t row_elements) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, row_elements));
}

// A tensor of vectors: [rows, heads, width] with any strides over rows and heads.
template <typename T>
struct Rows {
  T* data;
  int64_t rows, heads, width, row_stride, head_stride;
  T* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

template <typename T>
Rows<T> rows_of(const at::Tensor& x, const char* name) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.dim() <= 3 && x.stride(-1) == 1, name,
                    " must have 1 to 3 dimensions, the last dense");
  T* data = static_cast<T*>(const_cast<void*>(x.const_data_ptr()));
  switch (x.dim()) {
    case 1:
      return {data, 1, 1, x.size(0), 0, 0};
    case 2:
      return {data, x.size(0), 1, x.size(1), x.stride(0), 0};
    default:
      return {data, x.size(0), x.size(1), x.size(2), x.stride(0), x.stride(1)};
  }
}

void check_like(const at::Tensor& x, const at::Tensor& other, const char* name) {
  TORCH_CHECK_VALUE(other.sizes() == x.sizes(), name, " must have x's shape");
  TORCH_CHECK_TYPE(other.scalar_type() == x.scalar_type(), name, " must have x's dtype");
}

// out may be x.
template <typename T>
inline void norm_row(const T* x, const T* weight, float eps, T* out, int64_t width) {
  using S = Simd<kWide>;
  typename S::F squares{};
  float rest = 0;
  int64_t i = 0;
  for (; i + kWide <= width; i += kWide) {
    const auto v = S::load(x + i);
    squares += v * v;
  }
  for (; i < width; ++i) rest += to_float(x[i]) * to_float(x[i]);
  const float factor = 1.0f / std::sqrt((S::sum(squares) + rest) / float(width) + eps);
  for (i = 0; i + kWide <= width; i += kWide) {
    S::store(out + i, S::load(weight + i) * S::template rounded<T>(S::load(x + i) * factor));
  }
  for (; i < width; ++i) {
    out[i] = from_float<T>(to_float(weight[i]) * to_float(from_float<T>(to_float(x[i]) * factor)));
  }
}

template <typename T>
void norm(const at::Tensor& x, const at::Tensor& weight, float eps, at::Tensor& out) {
  Rows<T> from = rows_of<T>(x, "x"), to = rows_of<T>(out, "out");
  const T* factors = static_cast<const T*>(weight.const_data_ptr());
  at::parallel_for(0, from.rows, grain(from.heads * from.width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t h = 0; h < from.heads; ++h)
        norm_row(from.at(r, h), factors, eps, to.at(r, h), from.width);
  });
}

void check_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& out) {
  check_like(x, out, "out");
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == x.size(-1) && weight.is_contiguous(),
                    "weight must be dense and as long as x's last dimension");
  TORCH_CHECK_TYPE(weight.scalar_type() == x.scalar_type(), "weight must have x's dtype");
}

template <typename T>
inline void rotate(T* head, const float* cos, const float* sin, int64_t half) {
  using S = Simd<8>;
  int64_t i = 0;
  for (; i + 8 <= half; i += 8) {
    auto first = S::load(head + i), second = S::load(head + half + i), c = S::load(cos + i), s = S::load(sin + i);
    S::store(head + i, first * c - second * s);
    S::store(head + half + i, second * c + first * s);
  }
  for (; i < half; ++i) {
    float first = to_float(head[i]), second = to_float(head[half + i]);
    head[i] = from_float<T>(first * cos[i] - second * sin[i]);
    head[half + i] = from_float<T>(second * cos[i] + first * sin[i]);
  }
}

template <typename T>
void rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
          const at::Tensor& positions) {
  Rows<T> queries = rows_of<T>(q, "q"), keys = rows_of<T>(k, "k");
  const float* cosines = cos.const_data_ptr<float>();
  const float* sines = sin.const_data_ptr<float>();
  const int64_t* position = positions.const_data_ptr<int64_t>();
  const int64_t half = cos.size(1), limit = cos.size(0), tokens = queries.rows;
  for (int64_t t = 0; t < tokens; ++t) {
    TORCH_CHECK_INDEX(position[t] >= 0 && position[t] < limit, "position ", position[t], " of ", limit);
  }
  at::parallel_for(0, tokens, grain((queries.heads + keys.heads) * queries.width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* c = cosines + position[t] * half;
      const float* s = sines + position[t] * half;
      for (int64_t h = 0; h < queries.heads; ++h) rotate(queries.at(t, h), c, s, half);
      for (int64_t h = 0; h < keys.heads; ++h) rotate(keys.at(t, h), c, s, half);
    }
  });
}

// out[i] = gated(gate[i], up[i]), W elements at a time to the last one.
template <typename T, typename Gated>
inline void gated_row(const T* gate, const T* up, T* out, int64_t width, Gated&& gated) {
  using S = Simd<kWide>;
  int64_t i = 0;
  for (; i + kWide <= width; i += kWide) S::store(out + i, gated(S::load(gate + i), S::load(up + i)));
  if (i == width) return;
  T tail[3][kWide] = {};
  std::copy(gate + i, gate + width, tail[0]);
  std::copy(up + i, up + width, tail[1]);
  S::store(tail[2], gated(S::load(tail[0]), S::load(tail[1])));
  std::copy(tail[2], tail[2] + (width - i), out + i);
}

template <typename T, typename Gated>
void gated_rows(const at::Tensor& gate_up, at::Tensor& out, Gated&& gated) {
  Rows<T> from = rows_of<T>(gate_up, "gate_up"), to = rows_of<T>(out, "out");
  at::parallel_for(0, from.rows, grain(from.width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      gated_row(from.at(r, 0), from.at(r, 0) + to.width, to.at(r, 0), to.width, gated);
    }
  });
}

template <typename T>
void silu(const at::Tensor& gate_up, at::Tensor& out) {
  gated_rows<T>(gate_up, out, [](auto gate, auto up) { return silu_mul_lanes<T>(gate, up); });
}

template <typename T>
void clamped(const at::Tensor& gate_up, float alpha, float limit, at::Tensor& out) {
  gated_rows<T>(gate_up, out, [=](auto gate, auto up) { return clamped_swiglu_lanes<T>(gate, up, alpha, limit); });
}

void check_gated(const at::Tensor& gate_up, const at::Tensor& out) {
  TORCH_CHECK_VALUE(
      gate_up.dim() == 2 && out.dim() == 2 && gate_up.size(0) == out.size(0) && gate_up.size(1) == 2 * out.size(1),
      "gate_up must be [tokens, 2 · width] and out [tokens, width]");
  TORCH_CHECK_TYPE(out.scalar_type() == gate_up.scalar_type(), "out must have gate_up's dtype");
}

bool is_float(const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "float32 or bfloat16 only");
  return x.scalar_type() == at::kFloat;
}

}  // namespace

void rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, at::Tensor& out) {
  check_norm(x, weight, out);
  is_float(x) ? norm<float>(x, weight, eps, out) : norm<bf16>(x, weight, eps, out);
}

void rope_inplace(at::Tensor& q, at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
                  const at::Tensor& positions) {
  TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3 && q.size(0) == k.size(0) && q.size(2) == k.size(2),
                    "q and k must be [tokens, heads, head_dim]");
  TORCH_CHECK_TYPE(k.scalar_type() == q.scalar_type(), "q and k must have one dtype");
  TORCH_CHECK_TYPE(cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat, "cos and sin must be float32");
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.is_contiguous() && sin.is_contiguous() &&
                        2 * cos.size(1) <= q.size(2),
                    "cos and sin must be dense [positions, rotary_dim / 2]");
  TORCH_CHECK_TYPE(positions.scalar_type() == at::kLong, "positions must be int64");
  TORCH_CHECK_VALUE(positions.dim() == 1 && positions.size(0) == q.size(0) && positions.is_contiguous(),
                    "positions must be dense, one per token");
  is_float(q) ? rope<float>(q, k, cos, sin, positions) : rope<bf16>(q, k, cos, sin, positions);
}

void silu_mul(const at::Tensor& gate_up, at::Tensor& out) {
  check_gated(gate_up, out);
  is_float(gate_up) ? silu<float>(gate_up, out) : silu<bf16>(gate_up, out);
}

void clamped_swiglu(const at::Tensor& gate_up, double alpha, double limit, at::Tensor& out) {
  check_gated(gate_up, out);
  is_float(gate_up) ? clamped<float>(gate_up, alpha, limit, out) : clamped<bf16>(gate_up, alpha, limit, out);
}

}  // namespace cohort
