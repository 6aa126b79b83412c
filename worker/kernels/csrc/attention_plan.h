// The attention work of one step, cut into units: the same for every layer.
//
// A span with few query rows is cut by KV tile (split-KV), so that one long sequence keeps all threads busy; a longer
// piece is cut by query rows. Either way a row's arithmetic is that of its tiles in ascending order.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "thread_pool.h"

namespace kvray {

class AttentionPlan {
 public:
  AttentionPlan(int heads, int kv_heads, int dim);

  // `threads` decides how finely the work is cut, which changes no bits.
  void prepare(const std::vector<Span>& spans, int threads);

  const std::vector<Span>& spans() const { return spans_; }
  const std::vector<Unit>& units() const { return units_; }
  bool any_wide() const { return any_wide_; }  // a span has rows in several units, so none can write KV alone
  float* partials() const { return partials_.as<float>(); }
  int64_t partial_floats() const { return partial_floats_; }
  std::atomic<int32_t>* joins() const { return joins_.get(); }

  size_t scratch_bytes() const;
  Scratch scratch(void* memory) const;

 private:
  int64_t most_queries() const;   // that a unit may have: their rows stay in cache
  int64_t split_queries() const;  // a span with no more of them is split by tile

  int kv_heads_, group_, dim_;
  std::vector<Span> spans_;
  std::vector<Unit> units_;
  bool any_wide_ = false;
  Buffer partials_;
  int64_t partial_floats_ = 0;
  std::unique_ptr<std::atomic<int32_t>[]> joins_;
  size_t num_joins_ = 0;
};

// Calls fn(unit, next) for the units this thread gets, one taken ahead; next is null at the last.
template <class Fn>
void walk(Counter& counter, const std::vector<Unit>& units, Fn fn) {
  const int64_t total = static_cast<int64_t>(units.size());
  int64_t at, next, end;
  for (bool more = counter.take(total, 1, at, end); more; at = next) {
    more = counter.take(total, 1, next, end);
    fn(units[static_cast<size_t>(at)], more ? &units[static_cast<size_t>(next)] : nullptr);
  }
}

}  // namespace kvray
