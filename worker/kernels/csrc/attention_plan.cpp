#include "attention_plan.h"

#include <algorithm>

namespace kvray {

constexpr int64_t kUnitsPerThread = 8;  // enough that threads end at about the same time

AttentionPlan::AttentionPlan(int heads, int kv_heads, int dim) : kv_heads_(kv_heads), group_(heads / kv_heads), dim_(dim) {}

int64_t AttentionPlan::most_queries() const { return std::max(split_queries(), int64_t{kQueryFloats} / dim_ / group_); }
int64_t AttentionPlan::split_queries() const { return std::max<int64_t>(1, kSplitRows / group_); }

void AttentionPlan::prepare(const std::vector<Span>& spans, int threads) {
  spans_ = spans;
  units_.clear();
  any_wide_ = false;
  partial_floats_ = 0;
  int64_t rows = 0;
  for (const Span& span : spans_) rows += span.count;
  const int64_t queries = std::clamp(rows * kv_heads_ / (kUnitsPerThread * threads), split_queries(), most_queries());
  int32_t slots = 0, joins = 0;
  for (int32_t s = 0; s < static_cast<int32_t>(spans_.size()); ++s) {
    const Span& span = spans_[s];
    const auto tiles_to = [&](int64_t query) {
      return static_cast<int32_t>((span.start + query) / kTile + 1);  // tiles that the query at this row sees
    };
    if (span.count <= split_queries()) {
      partial_floats_ = std::max(partial_floats_, span.count * group_ * (dim_ + 2));
      const int32_t tiles = tiles_to(span.count - 1), count = static_cast<int32_t>(span.count);
      for (int32_t t = 0; t < tiles; ++t) {  // heads innermost: in a block they lie side by side
        for (int32_t head = 0; head < kv_heads_; ++head) {
          const int32_t first_slot = slots + head * tiles;
          units_.push_back({s, head, 0, count, t, t + 1, first_slot + t, first_slot, tiles, joins + head});
        }
      }
      slots += tiles * kv_heads_;
      joins += kv_heads_;
      continue;
    }
    any_wide_ = true;
    for (int64_t end = span.count; end > 0; end -= std::min(end, queries)) {  // the longest contexts first
      const int64_t first = std::max<int64_t>(0, end - queries);
      for (int32_t head = 0; head < kv_heads_; ++head) {
        units_.push_back({s, head, static_cast<int32_t>(first), static_cast<int32_t>(end - first), 0, tiles_to(end - 1),
                          0, 0, 1, 0});
      }
    }
  }
  partials_.grow(static_cast<size_t>(slots) * partial_floats_ * sizeof(float) + 64);
  if (static_cast<size_t>(joins) > num_joins_) {
    num_joins_ = static_cast<size_t>(joins) * 2;
    joins_ = std::make_unique<std::atomic<int32_t>[]>(num_joins_);
    for (size_t i = 0; i < num_joins_; ++i) joins_[i].store(0);
  }
}

size_t AttentionPlan::scratch_bytes() const {
  const size_t rows = static_cast<size_t>(most_queries() * group_);
  return rows * (4 * static_cast<size_t>(dim_) * 3 + 4 * kTile * 2 + 16) + 8 * kTile * static_cast<size_t>(dim_) + 64 * 8;
}

Scratch AttentionPlan::scratch(void* memory) const {
  const size_t rows = static_cast<size_t>(most_queries() * group_);
  auto* at = static_cast<char*>(memory);
  const auto take = [&](size_t bytes) {
    auto* part = at;
    at += (bytes + 63) / 64 * 64;
    return part;
  };
  Scratch scratch{};
  scratch.q = take(rows * dim_ * 4);
  scratch.scores = reinterpret_cast<float*>(take(rows * kTile * 4));
  scratch.weights = take(rows * kTile * 4);
  scratch.tile = reinterpret_cast<float*>(take(rows * dim_ * 4));
  scratch.sum = reinterpret_cast<float*>(take(rows * dim_ * 4));
  scratch.wide = reinterpret_cast<float*>(take(8 * kTile * static_cast<size_t>(dim_)));
  scratch.top = reinterpret_cast<float*>(take(rows * 16));
  return scratch;
}

}  // namespace kvray
