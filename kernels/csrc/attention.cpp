// One call for all rows of a step (R14): cuts them into tasks, runs the tasks on torch's threads, joins split contexts.
//
// A task is some positions of a row: all that a decode row has, or as many of a prompt as keep their sums close. Tasks are
// taken from one counter, so a thread that drew short rows takes more of them; a context long enough to keep others waiting
// is split (split-KV). How a step is cut changes no bit of it: attention_tile.h says why.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>

#include "attention_tile.h"
#include "ops.h"

namespace cohort {
namespace {

constexpr int64_t kSmallestSplit = 256;  // tokens: below it a merge costs more than it gains
constexpr int64_t kTasksPerThread = 4;   // enough for the counter to even out unequal rows
constexpr int64_t kManyColumns = 64;     // from here on arithmetic takes longer than reading the cache
constexpr int kColumnsPerTask = 128;
constexpr int64_t kWorthThreads = 1 << 17;  // multiply-adds; less is done before a second thread wakes

struct RowPlan {
  int row, queries;
  int64_t context;
  bool many;
  int queries_per_task;
};

// First position that the queries [begin, end) of a row can see, and the end of what they see.
std::pair<int64_t, int64_t> visible(const RowPlan& row, int begin, int end, int64_t window) {
  int64_t first = row.context - row.queries + begin, last = row.context - row.queries + end - 1;
  return {window ? std::max<int64_t>(0, first - window + 1) : 0, last + 1};
}

struct Plan {
  std::vector<Task> tasks;
  std::vector<MergeGroup> merges;
  int64_t partial_floats = 0, work = 0;
};

template <typename T>
Plan plan_tasks(const Step<T>& step, int64_t rows, int64_t table_blocks, int64_t tokens, int threads) {
  const int64_t group = step.group, head_dim = step.cache.head_dim, kv_heads = step.cache.num_kv_heads;
  std::vector<RowPlan> row_plans;
  int64_t work = 0;  // column · token pairs over all kv heads
  int64_t many_tasks = 0;
  for (int64_t r = 0; r < rows; ++r) {
    int queries = step.query_start[r + 1] - step.query_start[r];
    int64_t context = step.context_lens[r];
    TORCH_CHECK_VALUE(queries >= 0 && step.query_start[r] >= 0 && step.query_start[r + 1] <= tokens,
                      "query_start: row ", r, " lies outside the ", tokens, " query tokens");
    if (queries == 0) continue;
    TORCH_CHECK_VALUE(context >= queries && context <= table_blocks * step.cache.block_size, "context_lens: row ", r,
                      " has ", context, " tokens, ", queries, " queries and ", table_blocks, " blocks");
    bool many = queries * group >= kManyColumns;
    int per_task = int(std::max<int64_t>(1, kColumnsPerTask / group));
    row_plans.push_back({int(r), queries, context, many, per_task});
    work += kv_heads * group * queries * context;
    if (many) many_tasks += kv_heads * ((queries + per_task - 1) / per_task);
  }
  if (work * head_dim * 2 < kWorthThreads) threads = 1;

  Plan plan;
  plan.work = work * head_dim * 2;
  // tokens that a task may read before it is worth splitting
  int64_t share = threads == 1 ? INT64_MAX : std::max<int64_t>(1, work / (threads * kTasksPerThread));
  auto add = [&](const RowPlan& row, int begin, int end, int heads) {
    auto [kv_begin, kv_end] = visible(row, begin, end, step.window);
    int64_t columns = (end - begin) * group * heads, length = kv_end - kv_begin;
    int64_t split = std::max(kSmallestSplit, share == INT64_MAX ? length : (share + columns - 1) / columns);
    int parts = int((length + split - 1) / split);
    int64_t part_length = (length + parts - 1) / parts;
    // parts begin where tiles begin
    const int64_t first_tile = kv_begin / kTile, tiles = (kv_end + kTile - 1) / kTile - first_tile;
    const int64_t part_tiles = parts == 1 ? tiles : (part_length + kTile - 1) / kTile;
    parts = int((tiles + part_tiles - 1) / part_tiles);
    for (int head = 0; head < kv_heads; head += heads) {
      int merge = -1;
      if (parts > 1) {
        merge = int(plan.merges.size());
        plan.merges.push_back({parts, first_tile, tiles, plan.partial_floats});
        plan.partial_floats += tiles * columns * partial_floats(int(head_dim));
      }
      for (int part = 0; part < parts; ++part) {
        const int64_t from = first_tile + part * part_tiles;
        plan.tasks.push_back({row.row, head, heads, begin, end, std::max(kv_begin, from * kTile),
                              std::min(kv_end, (from + part_tiles) * kTile), merge});
      }
    }
  };
  // few rows' tasks would leave threads idle at the end: smaller query tiles then
  bool scarce = many_tasks < threads * kTasksPerThread;
  for (RowPlan& row : row_plans) {
    if (!row.many) continue;
    int per_task = row.queries_per_task;
    if (threads > 1 && scarce) per_task = std::max<int>(1, std::max<int64_t>(per_task / 4, 4 * kWide / group));
    // the last queries see most: longest tasks first
    for (int end = row.queries; end > 0; end -= per_task) add(row, std::max(0, end - per_task), end, 1);
  }
  // A block's heads lie side by side: one task for all of them reads longer stretches. Few rows leave too few tasks.
  int64_t few = 0;
  for (RowPlan& row : row_plans) few += !row.many;
  const int heads = few >= 2 * threads ? int(kv_heads) : 1;
  for (RowPlan& row : row_plans) {
    if (!row.many) add(row, 0, row.queries, heads);
  }
  return plan;
}

template <typename T>
void merge_parts(const Step<T>& step, const Task& task, const MergeGroup& merge, const float* partials) {
  const int floats = sum_floats(step.cache.head_dim), width = partial_floats(step.cache.head_dim);
  const int64_t columns = columns_of(task, step.group), all = task.kv_heads * columns;
  std::vector<float> sums(floats);
  for (int64_t i = 0; i < all; ++i) {
    float maximum = kNoScore;
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t tile = 0; tile < merge.tiles; ++tile) {
      const float* found = partials + merge.offset + (tile * all + i) * width;
      if (found[floats] != kMasked) merge_sums(sums.data(), maximum, found, found[floats], floats);
    }
    write_column<T>(step, task, int(task.kv_head + i / columns), int(i % columns), sums.data(), maximum);
  }
}

template <typename T>
void run(const Step<T>& step, int64_t rows, int64_t table_blocks, int64_t tokens) {
  int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  Plan plan = plan_tasks(step, rows, table_blocks, tokens, threads);
  if (plan.tasks.empty()) return;
  static thread_local std::vector<float> partials;
  if (int64_t(partials.size()) < plan.partial_floats) partials.resize(plan.partial_floats);
  float* partial_base = partials.data();
  std::unique_ptr<std::atomic<int>[]> missing(new std::atomic<int>[plan.merges.size()]);
  for (size_t m = 0; m < plan.merges.size(); ++m) missing[m] = plan.merges[m].parts;

  std::atomic<size_t> next{0};
  auto work = [&](int64_t, int64_t) {
    static thread_local Scratch scratch;
    for (size_t i = next++; i < plan.tasks.size(); i = next++) {
      const Task& task = plan.tasks[i];
      if (task.merge < 0) {
        attend(step, task, nullptr, 0, scratch);
        continue;
      }
      const MergeGroup& merge = plan.merges[task.merge];
      attend(step, task, partial_base + merge.offset, merge.first_tile, scratch);
      if (missing[task.merge].fetch_sub(1) == 1) merge_parts(step, task, merge, partial_base);
    }
  };
  int64_t workers = plan.work < kWorthThreads ? 1 : std::min<int64_t>(threads, plan.tasks.size());
  if (workers == 1) {
    work(0, 1);
  } else {
    at::parallel_for(0, workers, 1, work);
  }
}

template <typename T>
void launch(const at::Tensor& query, const at::Tensor& kv, int64_t layer, const at::Tensor& query_start,
            const at::Tensor& context_lens, const at::Tensor& block_tables, const std::optional<at::Tensor>& directions,
            double scale, at::Tensor& out, int64_t window, double softcap, const std::optional<at::Tensor>& sinks) {
  const int64_t size = kv.element_size();
  Step<T> step;
  step.cache = {static_cast<const char*>(kv.const_data_ptr()) + layer * kv.stride(1) * size,
                kv.stride(0) * size,
                value_offset(kv) * size,
                kv.size(0),
                int(kv.size(3)),
                int(kv.size(4)),
                int(cache_head_dim(kv)),
                int(kv.size(5) * size),
                is_fp8(kv)};
  step.query = static_cast<const T*>(query.const_data_ptr());
  step.query_token_stride = query.stride(0);
  step.query_head_stride = query.stride(1);
  step.out = static_cast<T*>(out.mutable_data_ptr());
  step.out_token_stride = out.stride(0);
  step.out_head_stride = out.stride(1);
  step.query_start = query_start.const_data_ptr<int32_t>();
  step.context_lens = context_lens.const_data_ptr<int32_t>();
  step.block_tables = block_tables.const_data_ptr<int32_t>();
  step.table_stride = block_tables.stride(0);
  step.directions = directions ? directions->const_data_ptr<uint8_t>() : nullptr;
  step.direction_stride = directions ? directions->stride(0) : 0;
  step.group = int(query.size(1) / kv.size(3));
  step.scale_log2 = float(scale * 1.4426950408889634);
  step.window = window;
  step.cap_log2 = float(softcap * 1.4426950408889634);
  step.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  run(step, context_lens.size(0), block_tables.size(1), query.size(0));
}

}  // namespace

void paged_attention(const at::Tensor& query, const at::Tensor& kv, int64_t layer, const at::Tensor& query_start,
                     const at::Tensor& context_lens, const at::Tensor& block_tables,
                     const std::optional<at::Tensor>& directions, double scale, at::Tensor& out, int64_t window,
                     double softcap, const std::optional<at::Tensor>& sinks) {
  check_cache(kv, layer);
  TORCH_CHECK_VALUE(query.dim() == 3 && query.size(2) == cache_head_dim(kv) && query.stride(2) == 1,
                    "query must be [tokens, heads, head_dim] with dense heads");
  TORCH_CHECK_VALUE(query.size(1) % kv.size(3) == 0, "query heads must be a multiple of kv heads");
  TORCH_CHECK_VALUE(out.sizes() == query.sizes() && out.stride(2) == 1,
                    "out must have query's shape, with dense heads");
  TORCH_CHECK_TYPE(query.scalar_type() == out.scalar_type() && (is_fp8(kv) || query.scalar_type() == kv.scalar_type()),
                   "query, kv and out must have one dtype, unless kv is in FP8");
  TORCH_CHECK_TYPE(query.scalar_type() == at::kFloat || query.scalar_type() == at::kBFloat16,
                   "query must be float32 or bfloat16");
  int64_t rows = context_lens.size(0);
  for (const at::Tensor* table : {&query_start, &context_lens, &block_tables}) {
    TORCH_CHECK_TYPE(table->scalar_type() == at::kInt && table->is_cpu(), "row tables must be int32 on the CPU");
  }
  TORCH_CHECK_VALUE(query_start.dim() == 1 && query_start.size(0) == rows + 1 && query_start.is_contiguous() &&
                        context_lens.is_contiguous(),
                    "query_start must have one entry more than context_lens");
  TORCH_CHECK_VALUE(block_tables.dim() == 2 && block_tables.size(0) >= rows && block_tables.stride(1) == 1,
                    "block_tables must be [rows, blocks]");
  if (directions) {
    TORCH_CHECK_TYPE(directions->scalar_type() == at::kByte, "directions must be uint8");
    TORCH_CHECK_VALUE(directions->dim() == 2 && directions->size(0) >= rows &&
                          directions->size(1) >= block_tables.size(1) && directions->stride(1) == 1,
                      "directions must be shaped like block_tables");
  }
  TORCH_CHECK_VALUE(window >= 0, "sliding_window must not be negative");
  TORCH_CHECK_VALUE(softcap >= 0, "softcap must not be negative");
  if (sinks) {
    TORCH_CHECK_TYPE(sinks->scalar_type() == at::kFloat && sinks->is_cpu(), "sinks must be float32 on the CPU");
    TORCH_CHECK_VALUE(sinks->dim() == 1 && sinks->size(0) == query.size(1) && sinks->is_contiguous(),
                      "sinks must be dense, one per query head");
  }
  if (query.scalar_type() == at::kFloat) {
    launch<float>(query, kv, layer, query_start, context_lens, block_tables, directions, scale, out, window, softcap,
                  sinks);
  } else {
    launch<bf16>(query, kv, layer, query_start, context_lens, block_tables, directions, scale, out, window, softcap,
                  sinks);
  }
}

}  // namespace cohort
