// Matrix products with weights that never change: packed once into panels, read once per step in the order they lie.
//
// A panel holds 2W outputs (W lanes of a vector). Inside it, for every input (float32) or pair of inputs (bfloat16), the
// weights of its outputs stand side by side:
//
//     float32   [panels, inputs, 2W]            bfloat16   [panels, inputs / 2, 2W, 2]
//
// So a step of a few rows streams the weights at the speed of the memory, and one of many rows keeps a panel in the
// cache and all its sums in registers. Every output is summed over the inputs in order, in one accumulator, by the matrix
// unit (matrix_unit.h) 32 at a time: a row's result has the same bits whatever other rows stand beside it.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "matrix_unit.h"
#include "ops.h"
#include "panels.h"
#include "quantized.h"

namespace cohort {
namespace {

constexpr int kMaxRows = kWide == 16 ? 12 : 6;  // rows of a tile: as many sums as registers hold
constexpr size_t kHugePage = size_t(2) << 20;

using S = Simd<kWide>;
using F = S::F;

// One step along the inputs: what a weight vector holds and how it meets an input.
template <typename T>
struct Product;

template <>
struct Product<float> {
  using Element = float;
  static constexpr int kInputs = 1;
  static inline F weights(const float* from) { return S::load(from); }
  static inline F input(const float* x, int64_t step) { return S::splat(x[step]); }
  static inline F madd(F sum, F x, F w) { return sum + x * w; }
};

#if defined(__AVX512BF16__)
template <>
struct Product<bf16> {
  using Element = bf16;
  static constexpr int kInputs = 2;
  static inline __m512bh weights(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static inline __m512bh input(const bf16* x, int64_t step) {
    int32_t pair;
    std::memcpy(&pair, x + 2 * step, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static inline F madd(F sum, __m512bh x, __m512bh w) { return (F)_mm512_dpbf16_ps((__m512)sum, x, w); }
};
constexpr bool kHasBf16 = true;
#else
constexpr bool kHasBf16 = false;
#endif

// sums[m][o] = Σ x[m][i] · panel[i][o] for R rows
template <typename T, int R>
void tile(const T* x, int64_t x_stride, const T* panel, int64_t steps, float* sums) {
  using P = Product<T>;
  F held[R][2];
  for (int m = 0; m < R; ++m) held[m][0] = held[m][1] = F{};
  for (int64_t k = 0; k < steps; ++k, panel += kPanel * P::kInputs) {
    auto first = P::weights(panel), second = P::weights(panel + kWide * P::kInputs);
    const char* ahead = reinterpret_cast<const char*>(panel) + kAheadBytes;
    __builtin_prefetch(ahead, 0, 3);
    if constexpr (kPanel * P::kInputs * sizeof(T) > 64) __builtin_prefetch(ahead + 64, 0, 3);
    for (int m = 0; m < R; ++m) {
      auto input = P::input(x + m * x_stride, k);
      held[m][0] = P::madd(held[m][0], input, first);
      held[m][1] = P::madd(held[m][1], input, second);
    }
  }
  for (int m = 0; m < R; ++m) {
    S::store(sums + m * kPanel, held[m][0]);
    S::store(sums + m * kPanel + kWide, held[m][1]);
  }
}

template <typename T, int R = kMaxRows>
void tile_of(int rows, const T* x, int64_t x_stride, const T* panel, int64_t steps, float* sums) {
  if constexpr (R > 0) {
    if (rows == R) return tile<T, R>(x, x_stride, panel, steps, sums);
    tile_of<T, R - 1>(rows, x, x_stride, panel, steps, sums);
  }
}

#if defined(COHORT_MATRIX_UNIT)
// The same in bfloat16 by the matrix unit, of a panel and 16 or, with kTall, 32 rows.
template <bool kTall>
void unit_tile(const bf16* x, int64_t x_stride, const bf16* panel, int64_t pairs, float* sums) {
  static_assert(kPanel == 32);
  constexpr int64_t kPairBytes = 4 * kPanel;
  const int64_t whole = pairs / kUnitPairs * kUnitPairs;
  MatrixUnit::zero<kTall, true>();
  MatrixUnit::add<kTall, true, kAheadBytes>(whole, x, 2 * x_stride, panel, kPairBytes);
  if (whole < pairs) {  // the rest beside zeros
    alignas(64) bf16 inputs[kUnitRows][2 * kUnitPairs] = {}, weights[kUnitPairs][2 * kPanel] = {};
    for (int m = 0; m < (kTall ? kUnitRows : kUnitRows / 2); ++m) {
      std::copy(x + m * x_stride + 2 * whole, x + m * x_stride + 2 * pairs, inputs[m]);
    }
    std::copy(panel + whole * 2 * kPanel, panel + pairs * 2 * kPanel, weights[0]);
    MatrixUnit::add<kTall, true>(kUnitPairs, inputs, sizeof(inputs[0]), weights, kPairBytes);
  }
  MatrixUnit::store<kTall, true>(sums, sizeof(float) * kPanel);
}

// The last rows of x, fewer than a block, with room behind them: the unit takes them by sixteen.
const bf16* last_rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs) {
  static thread_local std::vector<bf16> kept;
  const int64_t first = rows / kUnitRows * kUnitRows;
  if (rows % (kUnitRows / 2) == 0) return nullptr;
  if (int64_t(kept.size()) < kUnitRows * inputs) kept.resize(kUnitRows * inputs);
  for (int64_t m = first; m < rows; ++m) std::copy_n(x + m * x_stride, inputs, kept.data() + (m - first) * inputs);
  return kept.data();
}
#endif

// Calls `finish(row, panel, sums)` with the float32 sums [kPanel] of every row and panel.
template <typename T, typename Finish>
void multiply(const at::Tensor& x, const at::Tensor& panels, Finish&& finish) {
  using P = Product<T>;
  const T* input = static_cast<const T*>(x.const_data_ptr());
  const T* packed = static_cast<const T*>(panels.const_data_ptr());
  const int64_t rows = x.size(0), x_stride = x.stride(0), count = panels.size(0), steps = panels.size(1);
  const int64_t panel_size = steps * P::kInputs * kPanel;
  if constexpr (P::kInputs == 2 && kHasMatrixUnit) {
#if defined(COHORT_MATRIX_UNIT)
    const bf16* last = last_rows(input, x_stride, rows, 2 * steps);
    auto sums_of = [=](int64_t first, int count, int64_t panel, float* sums) {
      const bool copied = last && count < kUnitRows;
      const bf16* from = copied ? last : input + first * x_stride;
      const int64_t stride = copied ? 2 * steps : x_stride;
      const bf16* weights = packed + panel * panel_size;
      count > kUnitRows / 2 ? unit_tile<true>(from, stride, weights, steps, sums)
                            : unit_tile<false>(from, stride, weights, steps, sums);
    };
    for_each_panel<kUnitRows, MatrixUnit>(rows, 4 * steps, count, rows * count * panel_size, sums_of, finish);
#endif
  } else {
    auto sums_of = [=](int64_t first, int count, int64_t panel, float* sums) {
      tile_of<T>(count, input + first * x_stride, x_stride, packed + panel * panel_size, steps, sums);
    };
    const int64_t row_bytes = steps * P::kInputs * int64_t(sizeof(T));
    for_each_panel<kMaxRows>(rows, row_bytes, count, rows * count * panel_size, sums_of, finish);
  }
}

bool is_float(const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat || (kHasBf16 && x.scalar_type() == at::kBFloat16),
                   "float32, and bfloat16 where the processor multiplies it");
  return x.scalar_type() == at::kFloat;
}

int64_t inputs_per_step(const at::Tensor& panels) { return panels.dim() == 4 ? 2 : 1; }

void check_product(const at::Tensor& x, const at::Tensor& panels, const at::Tensor& out, int64_t outputs_per_panel) {
  TORCH_CHECK_VALUE(panels.is_contiguous() && panels.dim() == (is_float(x) ? 3 : 4) && panels.size(2) == kPanel,
                    "weights must be packed by pack_panels");
  TORCH_CHECK_TYPE(panels.scalar_type() == x.scalar_type(), "weights must have x's dtype");
  TORCH_CHECK_VALUE(x.dim() == 2 && x.stride(1) == 1 && x.size(1) == panels.size(1) * inputs_per_step(panels),
                    "x must be [rows, inputs] with dense rows");
  const int64_t panels_needed = (out.size(-1) + outputs_per_panel - 1) / outputs_per_panel;
  TORCH_CHECK_VALUE(out.dim() == 2 && out.stride(1) == 1 && out.size(0) == x.size(0) && panels_needed == panels.size(0),
                    "out must be [rows, outputs] with dense rows");
}

template <typename T>
void pack(const at::Tensor& weight, at::Tensor& panels, bool gated) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1), per_step = inputs_per_step(panels);
  const int64_t half = outputs / 2, per_panel = gated ? kWide : kPanel, span = gated ? half : outputs;
  const T* from = static_cast<const T*>(weight.const_data_ptr());
  T* to = static_cast<T*>(panels.mutable_data_ptr());
  at::parallel_for(0, panels.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      for (int o = 0; o < kPanel; ++o) {
        const int64_t place = p * per_panel + (gated ? o % kWide : o);
        const int64_t row = gated && o >= kWide ? half + place : place;
        T* cell = to + p * inputs * kPanel + o * per_step;
        for (int64_t i = 0; i < inputs; ++i) {
          cell[i / per_step * kPanel * per_step + i % per_step] = place < span ? from[row * inputs + i] : T{};
        }
      }
    }
  });
}

template <typename T>
void rows_of_panels(const at::Tensor& panels, const at::Tensor& ids, at::Tensor& out) {
  const int64_t inputs = out.size(1), per_step = inputs_per_step(panels), tokens = ids.size(0);
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const T* from = static_cast<const T*>(panels.const_data_ptr());
  T* to = static_cast<T*>(out.mutable_data_ptr());
  const int64_t limit = panels.size(0) * kPanel, stride = out.stride(0);
  for (int64_t t = 0; t < tokens; ++t) {
    TORCH_CHECK_INDEX(id[t] >= 0 && id[t] < limit, "token ", id[t], " of ", limit);
  }
  at::parallel_for(0, tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* cell = from + id[t] / kPanel * inputs * kPanel + id[t] % kPanel * per_step;
      for (int64_t i = 0; i < inputs; ++i) {
        to[t * stride + i] = cell[i / per_step * kPanel * per_step + i % per_step];
      }
    }
  });
}

}  // namespace

int64_t panel_outputs() { return kPanel; }

bool panels_multiply_bf16() { return kHasBf16; }

void pack_panels(const at::Tensor& weight, at::Tensor& panels, bool gated) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.is_contiguous() && panels.is_contiguous(), "weight must be dense");
  TORCH_CHECK_TYPE(panels.scalar_type() == weight.scalar_type(), "panels must have weight's dtype");
  const int64_t per_step = is_float(weight) ? 1 : 2;
  const int64_t per_panel = gated ? kWide : kPanel, span = gated ? weight.size(0) / 2 : weight.size(0);
  TORCH_CHECK_VALUE(panels.dim() == 2 + per_step && panels.size(2) == kPanel &&
                        panels.size(0) == (span + per_panel - 1) / per_panel &&
                        panels.size(1) * per_step == weight.size(1),
                    "panels must be [panels, inputs, ", kPanel, "], or [panels, inputs / 2, ", kPanel, ", 2]");
  per_step == 1 ? pack<float>(weight, panels, gated) : pack<bf16>(weight, panels, gated);
}

void panel_product(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& bias,
                   at::Tensor& out) {
  if (is_quantized(panels)) return quantized_product(x, panels, bias, out);
  check_product(x, panels, out, kPanel);
  TORCH_CHECK_VALUE(!bias || (bias->is_contiguous() && bias->numel() == out.size(1) &&
                              bias->scalar_type() == x.scalar_type()),
                    "bias must be dense, one per output, of x's dtype");
  const bool wide = out.scalar_type() == at::kFloat;
  TORCH_CHECK_TYPE(wide || out.scalar_type() == x.scalar_type(), "out must have x's dtype or be float32");
  if (is_float(x)) return multiply<float>(x, panels, into_outputs<float, float>(bias, out));
#if defined(__AVX512BF16__)
  wide ? multiply<bf16>(x, panels, into_outputs<bf16, float>(bias, out))
       : multiply<bf16>(x, panels, into_outputs<bf16, bf16>(bias, out));
#endif
}

void panel_product_added(const at::Tensor& x, const at::Tensor& panels, at::Tensor& residual) {
  if (is_quantized(panels)) return quantized_product_added(x, panels, residual);
  check_product(x, panels, residual, kPanel);
  TORCH_CHECK_TYPE(residual.scalar_type() == x.scalar_type(), "residual must have x's dtype");
  if (is_float(x)) return multiply<float>(x, panels, added_to<float>(residual));
#if defined(__AVX512BF16__)
  multiply<bf16>(x, panels, added_to<bf16>(residual));
#endif
}

void panel_product_gated(const at::Tensor& x, const at::Tensor& panels, at::Tensor& out) {
  if (is_quantized(panels)) return quantized_product_gated(x, panels, out);
  check_product(x, panels, out, kWide);
  TORCH_CHECK_TYPE(out.scalar_type() == x.scalar_type(), "out must have x's dtype");
  if (is_float(x)) return multiply<float>(x, panels, gated_into<float>(out));
#if defined(__AVX512BF16__)
  multiply<bf16>(x, panels, gated_into<bf16>(out));
#endif
}

void panel_rows(const at::Tensor& panels, const at::Tensor& ids, at::Tensor& out) {
  if (is_quantized(panels)) return quantized_rows(panels, ids, out);
  TORCH_CHECK_VALUE(panels.is_contiguous() && panels.dim() >= 3 && panels.size(2) == kPanel && out.dim() == 2 &&
                        out.stride(1) == 1 && out.size(0) == ids.size(0) &&
                        out.size(1) == panels.size(1) * inputs_per_step(panels),
                    "out must be [tokens, inputs] with dense rows");
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong && ids.is_contiguous(), "ids must be dense int64");
  TORCH_CHECK_TYPE(out.scalar_type() == panels.scalar_type(), "out must have the panels' dtype");
  out.scalar_type() == at::kFloat ? rows_of_panels<float>(panels, ids, out) : rows_of_panels<bf16>(panels, ids, out);
}

// Zeroed memory on huge pages where the system grants them: a step reads all weights, and with small pages the
// translation of addresses costs a third of the memory's speed (measured).
at::Tensor huge_zeros(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "bytes must not be negative");
  const size_t size = (size_t(std::max<int64_t>(bytes, 1)) + kHugePage - 1) / kHugePage * kHugePage;
  const size_t mapped = size + kHugePage;  // room to begin where a huge page begins
  void* region = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) return at::zeros({bytes}, at::kByte);
  char* begin = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(region) + kHugePage - 1) / kHugePage * kHugePage);
#if defined(MADV_HUGEPAGE)
  madvise(begin, size, MADV_HUGEPAGE);
#endif
  return at::from_blob(begin, {bytes}, [region, mapped](void*) { munmap(region, mapped); }, at::kByte);
}

}  // namespace cohort
