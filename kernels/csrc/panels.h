// What every product over packed panels shares: how panels and rows go to threads, and what becomes of the sums.
//
// A panel holds kPanel outputs. A product calls `tile(x row, rows, panel, sums)` for a block of rows and a panel, and
// then a finisher for each of the rows with its float32 sums [kPanel].
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <type_traits>

#include "silu.h"
#include "simd.h"

namespace cohort {

constexpr int kPanel = 2 * kWide;                   // outputs of a panel
constexpr int64_t kAheadBytes = 4096;               // how far ahead weights are asked for
constexpr int64_t kWorthThreads = 1 << 17;          // multiply-adds; less is done before a second thread wakes
constexpr int64_t kPanelsPerThread = 8;             // with fewer, rows are shared out too, so that threads end together
constexpr int64_t kRowBytes = 1 << 19;              // of rows that pass all panels before the next do: they stay in the cache
constexpr int64_t kFewestRows = 128;                // but so many, so that panels are read seldom

struct EqualTiles {};

// Every row of every panel, in tiles of at most `kRows` rows of `row_bytes` each; `work`: multiply-adds of all. A `Unit` lives
// on each thread as long as its share: with EqualTiles tiles are about equal, else full, and the last has the rest.
template <int kRows, typename Unit = EqualTiles, typename Tile, typename Finish>
void for_each_panel(int64_t rows, int64_t row_bytes, int64_t count, int64_t work, Tile&& tile, Finish&& finish) {
  constexpr bool kEqual = std::is_same_v<Unit, EqualTiles>;
  const int64_t blocks = (rows + kRows - 1) / kRows;
  const int64_t threads = at::get_num_threads();
  const int64_t shares = count < kPanelsPerThread * threads ? std::min(blocks, threads) : 1;
  const int64_t together = (std::max(kFewestRows, kRowBytes / std::max<int64_t>(1, row_bytes)) + kRows - 1) / kRows;
  at::parallel_for(0, count * shares, work < kWorthThreads ? count * shares : 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[kRows * kPanel];
    [[maybe_unused]] const Unit unit_of_share;
    for (int64_t from = 0; from < blocks; from += together) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t panel = unit / shares, share = unit % shares;
        const int64_t to = std::min(from + together, blocks * (share + 1) / shares);
        for (int64_t block = std::max(from, blocks * share / shares); block < to; ++block) {
          const int64_t first = kEqual ? rows * block / blocks : block * kRows;
          const int64_t last = kEqual ? rows * (block + 1) / blocks : std::min(first + kRows, rows);
          tile(first, int(last - first), panel, sums);
          for (int64_t row = first; row < last; ++row) finish(row, panel, sums + (row - first) * kPanel);
        }
      }
    }
  });
}

// One panel's outputs of a row, some of which may lie beyond the last output.
template <typename Out, typename Value>
inline void store_outputs(Out* to, int64_t count, Value&& value) {
  using S = Simd<kWide>;
  if (count >= kPanel) {
    S::store(to, value(0));
    S::store(to + kWide, value(kWide));
    return;
  }
  Out whole[kPanel];
  S::store(whole, value(0));
  S::store(whole + kWide, value(kWide));
  std::copy(whole, whole + count, to);
}

// out = sums + bias, of x's type T
template <typename T, typename Out>
auto into_outputs(const std::optional<at::Tensor>& bias, at::Tensor& out) {
  Out* to = static_cast<Out*>(out.mutable_data_ptr());
  const int64_t stride = out.stride(0), outputs = out.size(1);
  const T* offsets = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
  return [=](int64_t row, int64_t panel, float* sums) {
    const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, outputs - first);
    if (offsets) {
      for (int64_t i = 0; i < count; ++i) sums[i] += to_float(offsets[first + i]);
    }
    store_outputs(to + row * stride + first, count, [&](int at) { return Simd<kWide>::load(sums + at); });
  };
}

// residual += sums, rounded before they are added
template <typename T>
auto added_to(at::Tensor& residual) {
  T* to = static_cast<T*>(residual.mutable_data_ptr());
  const int64_t stride = residual.stride(0), outputs = residual.size(1);
  return [=](int64_t row, int64_t panel, float* sums) {
    using S = Simd<kWide>;
    const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, outputs - first);
    T* at_row = to + row * stride + first;
    T before[kPanel] = {};
    std::copy(at_row, at_row + count, before);
    store_outputs(at_row, count, [&](int at) {
      return S::load(before + at) + S::template rounded<T>(S::load(sums + at));
    });
  };
}

// out = silu(gates) · ups: a gated panel holds kWide gates and the kWide ups that go with them.
template <typename T>
auto gated_into(at::Tensor& out) {
  T* to = static_cast<T*>(out.mutable_data_ptr());
  const int64_t stride = out.stride(0), outputs = out.size(1);
  return [=](int64_t row, int64_t panel, float* sums) {
    using S = Simd<kWide>;
    const int64_t first = panel * kWide, count = std::min<int64_t>(kWide, outputs - first);
    auto value = silu_mul_lanes<T>(S::template rounded<T>(S::load(sums)), S::template rounded<T>(S::load(sums + kWide)));
    if (count == kWide) return S::store(to + row * stride + first, value);
    T whole[kWide];
    S::store(whole, value);
    std::copy(whole, whole + count, to + row * stride + first);
  };
}

}  // namespace cohort
