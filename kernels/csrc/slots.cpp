// Moves single tokens between dense tensors and their slots in the paged cache: writes of a layer's new keys and
// values, and gather/scatter of whole tokens (R12).
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>

#include "fp8_cache.h"
#include "ops.h"

namespace cohort {
namespace {

constexpr int64_t kBytesPerThread = 1 << 16;

const int64_t* checked_slots(const at::Tensor& slots, const at::Tensor& kv, int64_t count) {
  TORCH_CHECK_TYPE(slots.scalar_type() == at::kLong, "slots must be int64");
  TORCH_CHECK_VALUE(slots.dim() == 1 && slots.size(0) == count && slots.is_contiguous(), "slots must be dense [", count,
                    "]");
  const int64_t* data = slots.const_data_ptr<int64_t>();
  const int64_t limit = kv.size(0) * kv.size(4);
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(data[i] >= 0 && data[i] < limit, "slot ", data[i], " outside the cache of ", limit);
  }
  return data;
}

int64_t grain(int64_t bytes_per_item) {
  return std::max<int64_t>(1, kBytesPerThread / std::max<int64_t>(1, bytes_per_item));
}

template <bool kToCache>
void move_tokens(char* dense, char* cache, const at::Tensor& kv, const int64_t* slots, int64_t count) {
  const int64_t block_size = kv.size(4), row_bytes = kv.size(5) * kv.element_size();
  const int64_t rows = kv.size(1) * kv.size(2) * kv.size(3);  // one per layer, K or V, kv head
  at::parallel_for(0, count, grain(rows * row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* token = dense + i * rows * row_bytes;
      char* slot = cache + (slots[i] / block_size * rows * block_size + slots[i] % block_size) * row_bytes;
      for (int64_t r = 0; r < rows; ++r) {
        char* in_cache = slot + r * block_size * row_bytes;
        std::memcpy(kToCache ? in_cache : token + r * row_bytes, kToCache ? token + r * row_bytes : in_cache,
                    row_bytes);
      }
    }
  });
}

void check_dense(const at::Tensor& dense, const at::Tensor& kv, const char* name) {
  TORCH_CHECK_VALUE(dense.dim() == 5 && dense.is_contiguous() && dense.size(1) == kv.size(1) &&
                        dense.size(2) == kv.size(2) &&
                        dense.size(3) == kv.size(3) && dense.size(4) == kv.size(5),
                    name, " must be dense [tokens, layers, 2, kv_heads, head_dim]");
  TORCH_CHECK_TYPE(dense.scalar_type() == kv.scalar_type(), name, " must have kv's dtype");
}

template <typename T>
void write_fp8_as(const at::Tensor& key, const at::Tensor& value, at::Tensor& kv, int64_t layer,
                  const at::Tensor& slot_mapping) {
  const int64_t count = key.size(0), heads = kv.size(3), block_size = kv.size(4), row = kv.size(5);
  const int64_t* slots = checked_slots(slot_mapping, kv, count);
  uint8_t* base = static_cast<uint8_t*>(kv.mutable_data_ptr()) + layer * kv.stride(1);
  const int64_t block_stride = kv.stride(0), values_after = value_offset(kv);
  const T* keys = static_cast<const T*>(key.const_data_ptr());
  const T* values = static_cast<const T*>(value.const_data_ptr());
  const int64_t key_token = key.stride(0), key_head = key.stride(1);
  const int64_t value_token = value.stride(0), value_head = value.stride(1);
  at::parallel_for(0, count, grain(2 * heads * row * 8), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      uint8_t* to = base + slots[t] / block_size * block_stride + slots[t] % block_size * row;
      for (int64_t h = 0; h < heads; ++h, to += block_size * row) {
        write_fp8_row(keys + t * key_token + h * key_head, int(row - 1), to);
        write_fp8_row(values + t * value_token + h * value_head, int(row - 1), to + values_after);
      }
    }
  });
}

void write_fp8(const at::Tensor& key, const at::Tensor& value, at::Tensor& kv, int64_t layer, const at::Tensor& slots) {
  TORCH_CHECK_TYPE(key.scalar_type() == at::kFloat || key.scalar_type() == at::kBFloat16,
                   "key and value must be float32 or bfloat16");
  key.scalar_type() == at::kFloat ? write_fp8_as<float>(key, value, kv, layer, slots)
                                  : write_fp8_as<bf16>(key, value, kv, layer, slots);
}

}  // namespace

void write_kv(const at::Tensor& key, const at::Tensor& value, at::Tensor& kv, int64_t layer,
              const at::Tensor& slot_mapping) {
  check_cache(kv, layer);
  for (const at::Tensor* x : {&key, &value}) {
    TORCH_CHECK_VALUE(x->dim() == 3 && x->size(0) == key.size(0) && x->size(1) == kv.size(3) &&
                          x->size(2) == cache_head_dim(kv) && x->stride(2) == 1,
                      "key and value must be [tokens, kv_heads, head_dim] with dense heads");
    TORCH_CHECK_TYPE(x->scalar_type() == (is_fp8(kv) ? key.scalar_type() : kv.scalar_type()),
                     "key and value must have kv's dtype, or one of their own where kv is in FP8");
  }
  if (is_fp8(kv)) return write_fp8(key, value, kv, layer, slot_mapping);
  const int64_t count = key.size(0), heads = kv.size(3), block_size = kv.size(4);
  const int64_t* slots = checked_slots(slot_mapping, kv, count);
  const int64_t size = kv.element_size(), row_bytes = kv.size(5) * size;
  const int64_t head_bytes = block_size * row_bytes, value_bytes = value_offset(kv) * size,
                block_bytes = kv.stride(0) * size;
  char* base = static_cast<char*>(kv.mutable_data_ptr()) + layer * kv.stride(1) * size;
  const char* keys = static_cast<const char*>(key.const_data_ptr());
  const char* values = static_cast<const char*>(value.const_data_ptr());
  const int64_t key_token = key.stride(0) * size, key_head = key.stride(1) * size;
  const int64_t value_token = value.stride(0) * size, value_head = value.stride(1) * size;
  at::parallel_for(0, count, grain(2 * heads * row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      char* to = base + slots[t] / block_size * block_bytes + slots[t] % block_size * row_bytes;
      for (int64_t h = 0; h < heads; ++h) {
        std::memcpy(to + h * head_bytes, keys + t * key_token + h * key_head, row_bytes);
        std::memcpy(to + value_bytes + h * head_bytes, values + t * value_token + h * value_head, row_bytes);
      }
    }
  });
}

void gather_slots(const at::Tensor& kv, const at::Tensor& slots, at::Tensor& out) {
  check_cache(kv, 0);
  check_dense(out, kv, "out");
  const int64_t* at = checked_slots(slots, kv, out.size(0));
  move_tokens<false>(static_cast<char*>(out.mutable_data_ptr()),
                     const_cast<char*>(static_cast<const char*>(kv.const_data_ptr())), kv, at, out.size(0));
}

void scatter_slots(const at::Tensor& src, at::Tensor& kv, const at::Tensor& slots) {
  check_cache(kv, 0);
  check_dense(src, kv, "src");
  const int64_t* at = checked_slots(slots, kv, src.size(0));
  move_tokens<true>(const_cast<char*>(static_cast<const char*>(src.const_data_ptr())),
                    static_cast<char*>(kv.mutable_data_ptr()), kv, at, src.size(0));
}

}  // namespace cohort
