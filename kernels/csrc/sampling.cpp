// One token per row of logits, at a temperature: top_k, top_p and min_p decide which tokens stay, and a race among these, in
// which each runs for an exponential time divided by its weight, decides which one comes.
//
// The same steps as common/engine/step/sampler.py has in torch. What it sorts is selected here, and what cannot win the race
// is left out before its logarithm is taken: a row takes a seventh of the time. Rows go to threads, and no bit of a row
// depends on another.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops.h"
#include "simd.h"

namespace cohort {
namespace {

using S = Simd<kWide>;

constexpr int kChunk = 4 * kWide;
constexpr double kNegligible = 0x1p-53 / 37.0;  // a lighter token loses any race against weight 1
constexpr double kNear[] = {4.0, 10.0};         // tokens with weights above e^-4 hold what top_p wants mostly

struct Rules {
  double temperature, top_k, top_p;
  float min_p;
  uint64_t key;  // the start of the row's random numbers
};

uint64_t mixed(uint64_t value) {  // SplitMix64, as common/engine/step/counter_random.py
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

// A token that may stay: how far its logit lies below the largest, and its weight.
struct Near {
  float distance, weight;
  int32_t token;
};

// The largest logit, the first of equals; a NaN is larger than any number, as NumPy has it.
int64_t likeliest(const float* logits, int64_t count) {
  const int64_t whole = count / kWide * kWide;
  S::F highest = S::splat(-std::numeric_limits<float>::infinity());
  S::I unordered{};
  for (int64_t i = 0; i < whole; i += kWide) {
    const S::F some = S::load(logits + i);
    unordered |= some != some;
    highest = S::max(some, highest);
  }
  bool nan = false;
  for (int lane = 0; lane < kWide; ++lane) nan |= unordered[lane] != 0;
  float best = S::highest(highest);
  for (int64_t i = whole; i < count; ++i) {
    nan |= logits[i] != logits[i];
    best = std::max(best, logits[i]);
  }
  return std::find_if(logits, logits + count, [=](float x) { return nan ? x != x : x == best; }) - logits;
}

// The least distance within which tokens have `wanted` of `mass`, all of them where rounding leaves the sum under it. By
// parts around a distance among them, of which only the one with the border is looked at again.
template <typename Mass>
float reach(std::vector<Near>& tokens, double wanted, Mass&& mass) {
  auto begin = tokens.begin(), end = tokens.end();
  float furthest = 0;
  while (begin != end) {
    const float pivot = (begin + (end - begin) / 2)->distance;
    const auto nearer = std::partition(begin, end, [=](const Near& each) { return each.distance < pivot; });
    const auto further = std::partition(nearer, end, [=](const Near& each) { return each.distance == pivot; });
    double before = 0, within = 0;
    for (auto each = begin; each != nearer; ++each) before += mass(*each);
    for (auto each = nearer; each != further; ++each) within += mass(*each);
    if (before >= wanted) {
      end = nearer;
      continue;
    }
    if (before + within >= wanted) return pivot;
    wanted -= before + within;
    furthest = std::max(furthest, pivot);
    begin = further;
  }
  return furthest;
}

class Row {
 public:
  Row(const float* logits, int64_t count, const Rules& rules, std::vector<float>& weights, std::vector<Near>& tokens)
      : logits_(logits), count_(count), rules_(rules), weights_(weights), tokens_(tokens) {}

  int64_t sample() {
    best_ = likeliest(logits_, count_);
    highest_ = logits_[best_];
    if (!std::isfinite(highest_)) return best_;
    weigh();
    const bool few = 0 < rules_.top_k && rules_.top_k < double(count_);
    if (few || rules_.top_p < 1.0) {
      collect(few);
      if (few) leave(reach(tokens_, rules_.top_k, [](const Near&) { return 1.0; }));
      if (rules_.top_p < 1.0) {
        const double whole = few ? held() : total_;
        leave(reach(tokens_, rules_.top_p * whole, [](const Near& each) { return double(each.weight); }));
      }
      for (const Near& each : tokens_) run(each.token, each.weight);
      return winner_ < 0 ? best_ : winner_;
    }
    run(best_, 1.0f);
    run_all();
    return winner_;
  }

 private:
  // weight = e^(-distance / temperature); the largest is 1
  void weigh() {
    const float factor = float(-1.4426950408889634 / rules_.temperature);
    const int64_t whole = count_ / kChunk * kChunk;
    weights_.resize(whole + kChunk);
    auto chunk = [&](const float* logits, float* weights) {
      S::F sum{};
      for (int i = 0; i < kChunk; i += kWide) {
        const S::F weight = S::exp2((S::splat(highest_) - S::load(logits + i)) * factor);
        S::store(weights + i, weight);
        sum += weight;
      }
      total_ += S::sum(sum);
    };
    for (int64_t i = 0; i < whole; i += kChunk) chunk(logits_ + i, weights_.data() + i);
    float rest[kChunk];
    std::fill(std::copy(logits_ + whole, logits_ + count_, rest), rest + kChunk, -std::numeric_limits<float>::infinity());
    chunk(rest, weights_.data() + whole);
  }

  // Collects the nearest tokens, as many as top_k or top_p may want.
  void collect(bool few) {
    for (const double most : kNear) {
      near(float(most * rules_.temperature));
      if (few ? double(tokens_.size()) >= rules_.top_k : held() >= rules_.top_p * total_) return;
    }
    near(std::numeric_limits<float>::max());
  }

  // Collects the tokens at most `most` away.
  void near(float most) {
    tokens_.clear();
    auto add = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float distance = highest_ - logits_[i];
        if (distance <= most) tokens_.push_back({distance, weights_[i], int32_t(i)});
      }
    };
    const int64_t whole = count_ / kChunk * kChunk;
    for (int64_t i = 0; i < whole; i += kChunk) {
      S::F highest = S::load(logits_ + i);
      for (int at = kWide; at < kChunk; at += kWide) highest = S::max(highest, S::load(logits_ + i + at));
      if (highest_ - S::highest(highest) <= most) add(i, i + kChunk);
    }
    add(whole, count_);
  }

  double held() const {
    double sum = 0;
    for (const Near& each : tokens_) sum += each.weight;
    return sum;
  }

  void leave(float most) {
    std::erase_if(tokens_, [=](const Near& each) { return each.distance > most; });
  }

  // A token's time is -log(u) / weight with u = (drawn + 1) · 2^-53. Since 1 - u ≤ -log(u), most tokens have lost before
  // the logarithm is taken.
  static double ahead(uint64_t drawn) { return double(int64_t((uint64_t(1) << 53) - 1 - drawn)) * 0x1p-53; }
  bool may_win(uint64_t drawn, float weight) const { return ahead(drawn) <= time_ * double(weight) * (1 + 1e-9); }

  void run(int64_t token, float weight) {
    if (!(weight > kNegligible) || !(weight >= rules_.min_p)) return;
    const uint64_t drawn = mixed(uint64_t(token) ^ rules_.key) >> 11;
    if (!may_win(drawn, weight)) return;
    const double time = -std::log((double(int64_t(drawn)) + 1.0) * 0x1p-53) / double(weight);
    if (time < time_ || (time == time_ && token < winner_)) {
      time_ = time;
      winner_ = token;
    }
  }

  void run_all() {
    for (int64_t i = 0; i < count_; i += kChunk) {
      const float* weights = weights_.data() + i;
      bool any = false;
      for (int at = 0; at < kChunk; ++at) any |= may_win(mixed(uint64_t(i + at) ^ rules_.key) >> 11, weights[at]);
      if (!any) continue;
      for (int64_t token = i; token < std::min(count_, i + kChunk); ++token) run(token, weights_[token]);
    }
  }

  const float* logits_;
  int64_t count_;
  const Rules& rules_;
  std::vector<float>& weights_;
  std::vector<Near>& tokens_;
  int64_t best_ = 0, winner_ = -1;
  float highest_ = 0;
  double total_ = 0, time_ = std::numeric_limits<double>::infinity();
};

}  // namespace

// `rules` [rows, 4]: temperature, top_k, top_p, min_p.
void sample_tokens(at::TensorList logits, const at::Tensor& rules, const at::Tensor& keys, at::Tensor& tokens) {
  const int64_t rows = int64_t(logits.size());
  TORCH_CHECK_TYPE(rules.scalar_type() == at::kDouble && keys.scalar_type() == at::kLong &&
                       tokens.scalar_type() == at::kLong,
                   "rules must be float64, keys and tokens int64");
  TORCH_CHECK_VALUE(rules.is_contiguous() && rules.numel() == 4 * rows && keys.is_contiguous() &&
                        keys.numel() == rows && tokens.is_contiguous() && tokens.numel() == rows,
                    "rules must be [rows, 4], keys and tokens [rows]");
  std::vector<const float*> from;
  std::vector<int64_t> counts;
  for (const at::Tensor& row : logits) {
    TORCH_CHECK_VALUE(row.dim() == 1 && row.is_contiguous() && row.numel() > 0 &&
                          row.numel() <= std::numeric_limits<int32_t>::max(),
                      "a row of logits must be dense");
    TORCH_CHECK_TYPE(row.scalar_type() == at::kFloat, "logits must be float32");
    from.push_back(row.const_data_ptr<float>());
    counts.push_back(row.numel());
  }
  const double* rule = rules.const_data_ptr<double>();
  const int64_t* key = keys.const_data_ptr<int64_t>();
  int64_t* to = tokens.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> weights;
    static thread_local std::vector<Near> near;
    for (int64_t r = begin; r < end; ++r) {
      const double* own = rule + 4 * r;
      const Rules of_row{own[0], own[1], own[2], float(own[3]), uint64_t(key[r])};
      to[r] = Row(from[r], counts[r], of_row, weights, near).sample();
    }
  });
}

}  // namespace cohort
