// The matrix unit of a processor that has one for bfloat16 (AMX): an instruction multiplies 16 rows by 16 outputs over 32
// inputs, that is 16 pairs. Its second operand has the outputs' pairs side by side, as panels, packed keys and packed values
// have them. An element is one chain over the inputs, by 32: its bits do not depend on what is computed beside it.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define COHORT_MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cohort {

constexpr int kUnitRows = 32;   // rows of a block: two operands of sixteen, so that four sums keep the unit busy
constexpr int kUnitPairs = 16;  // pairs of inputs of an instruction

#if !defined(COHORT_MATRIX_UNIT)

constexpr bool kHasMatrixUnit = false;
struct MatrixUnit {};

#else

constexpr bool kHasMatrixUnit = true;

// Asks the system to let this process use the unit: once, for all its threads and what it forks. Where it refuses, the build
// leaves the unit out (build.py).
inline bool request_matrix_unit() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// The compiler's intrinsics for tiles do not say what memory they read and write.
inline void tiles_meet_memory() { asm volatile("" ::: "memory"); }

// The unit, set up for its full shape until the end of the scope: to set it up takes as long as a dozen products. So both
// operands' rows come by sixteen; what lies in rows that nobody asked for changes no other.
class MatrixUnit {
 public:
  MatrixUnit() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    static_assert(sizeof(shape) == 64);
    tiles_meet_memory();
    _tile_loadconfig(&shape);
  }
  ~MatrixUnit() { _tile_release(); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

  // c[row][output] = Σ a[row][pair] · b[pair][output] of 16 or, with kTall, 32 rows; of 16 or, with kWideBlock, 32 outputs. A
  // pair takes four bytes; steps are in bytes; `pairs` is a multiple of kUnitPairs.
  template <bool kTall, bool kWideBlock>
  static void multiply(int64_t pairs, const void* a, int64_t a_step, const void* b, int64_t b_step, float* c,
                       int64_t c_step) {
    zero<kTall, kWideBlock>();
    add<kTall, kWideBlock>(pairs, a, a_step, b, b_step);
    store<kTall, kWideBlock>(c, c_step);
  }

  // The three parts of it. `kAhead`, if not 0: how far behind what is read `b` is asked for.
  template <bool kTall, bool kWideBlock>
  static void zero() {
    _tile_zero(0);
    if constexpr (kWideBlock) _tile_zero(1);
    if constexpr (kTall) _tile_zero(2);
    if constexpr (kTall && kWideBlock) _tile_zero(3);
  }

  template <bool kTall, bool kWideBlock, int kAhead = 0>
  static void add(int64_t pairs, const void* a_rows, int64_t a_step, const void* b_rows, int64_t b_step) {
    const char* a = static_cast<const char*>(a_rows);
    const char* b = static_cast<const char*>(b_rows);
    tiles_meet_memory();
    for (int64_t pair = 0; pair < pairs; pair += kUnitPairs, a += 4 * kUnitPairs, b += kUnitPairs * b_step) {
      if constexpr (kAhead > 0) {
        for (int p = 0; p < kUnitPairs; ++p) {
          __builtin_prefetch(b + kAhead + p * b_step, 0, 3);
          if constexpr (kWideBlock) __builtin_prefetch(b + kAhead + p * b_step + 64, 0, 3);
        }
      }
      _tile_loadd(6, b, b_step);
      _tile_loadd(4, a, a_step);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kWideBlock) {
        _tile_loadd(7, b + 64, b_step);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTall) {
        _tile_loadd(5, a + 16 * a_step, a_step);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kWideBlock) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }

  template <bool kTall, bool kWideBlock>
  static void store(float* c, int64_t step) {
    float* below = reinterpret_cast<float*>(reinterpret_cast<char*>(c) + 16 * step);
    _tile_stored(0, c, step);
    if constexpr (kWideBlock) _tile_stored(1, c + 16, step);
    if constexpr (kTall) _tile_stored(2, below, step);
    if constexpr (kTall && kWideBlock) _tile_stored(3, below + 16, step);
    tiles_meet_memory();
  }
};

#endif

}  // namespace cohort
