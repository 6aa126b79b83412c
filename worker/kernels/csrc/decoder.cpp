#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace kvray {
namespace {

constexpr int64_t kFewRows = 32;     // up to here products are cut by columns, above by rows
constexpr int64_t kPrivateRows = 4;  // up to here every thread norms all rows for itself, which saves a barrier
constexpr int64_t kBlockRows = 128;  // rows whose activations stay in cache through a layer
constexpr int kStages = 6;           // counters per layer

size_t aligned(int64_t bytes) { return static_cast<size_t>((bytes + 63) / 64 * 64); }

}  // namespace

Decoder::Decoder(ThreadPool& pool, const Kernels* kernels, DecoderShape shape)
    : pool_(pool),
      kernels_(kernels),
      shape_(std::move(shape)),
      layers_(static_cast<size_t>(shape_.layers)),
      plan_(shape_.heads, shape_.kv_heads, shape_.dim),
      counters_(static_cast<size_t>((shape_.layers + 1) * kStages)) {
  const auto& s = shape_;
  size_t bytes = 0;
  for (auto& layer : layers_) {
    layer.qkv = PackedMatrix(s.dtype, s.qkv(), s.hidden, false);
    layer.out = PackedMatrix(s.dtype, s.hidden, s.attended(), false);
    layer.gate_up = PackedMatrix(s.dtype, 2 * s.intermediate, s.hidden, true);
    layer.down = PackedMatrix(s.dtype, s.hidden, s.intermediate, false);
    for (const auto* m : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) bytes += aligned(m->bytes());
  }
  head_ = PackedMatrix(s.dtype, s.vocab, s.hidden, false);
  weights_.grow(bytes + aligned(head_.bytes()));
}

std::vector<float> Decoder::floats(Tensor tensor, int64_t n) const {
  std::vector<float> values(tensor.data == nullptr ? 0 : static_cast<size_t>(n));
  if (tensor.data != nullptr) kernels_->to_float(tensor.dtype, tensor.data, values.data(), n);
  return values;
}

void Decoder::pack(PackedMatrix& matrix, Tensor weight, Tensor bias) {
  matrix.pack(pool_, weight.data, weight.dtype, weights_.as<char>() + used_);
  used_ += aligned(matrix.bytes());
  if (bias.data != nullptr) matrix.set_bias(bias.data, bias.dtype);
}

void Decoder::set_ends(Tensor embedding, Tensor final_norm, Tensor head) {
  embedding_ = embedding;
  final_norm_ = floats(final_norm, shape_.hidden);
  pack(head_, head, {});
}

void Decoder::set_layer(int index, const LayerTensors& t) {
  Layer& layer = layers_.at(static_cast<size_t>(index));
  layer.attn_norm = floats(t.attn_norm, shape_.hidden);
  layer.mlp_norm = floats(t.mlp_norm, shape_.hidden);
  layer.q_norm = floats(t.q_norm, shape_.dim);
  layer.k_norm = floats(t.k_norm, shape_.dim);
  pack(layer.qkv, t.qkv, t.qkv_bias);
  pack(layer.out, t.out, t.out_bias);
  pack(layer.gate_up, t.gate_up, t.gate_up_bias);
  pack(layer.down, t.down, t.down_bias);
}

int64_t Decoder::wide_floats() const {
  const int64_t inputs = std::max({shape_.hidden, shape_.attended(), shape_.intermediate});
  return (inputs + 1) * kPanel * kWidePanels;
}

void Decoder::reserve(int64_t rows, int64_t logit_rows) {
  const auto& s = shape_;
  const auto floats_of = [&](int64_t columns) { return static_cast<size_t>(rows * columns) * sizeof(float); };
  x_.grow(floats_of(s.hidden));
  qkv_.grow(floats_of(s.qkv()));
  attended_.grow(floats_of(s.attended()));
  hidden_.grow(floats_of(s.intermediate));
  act_.grow(floats_of(s.hidden) * static_cast<size_t>(rows <= kPrivateRows ? pool_.size() : 1));
  rope_.grow(floats_of(2 * static_cast<int64_t>(s.inv_freq.size())) + 64);
  last_.grow(static_cast<size_t>(logit_rows * s.hidden + 1) * sizeof(float));
  wide_.grow(static_cast<size_t>(wide_floats() * pool_.size()) * sizeof(float));
  scratch_.grow(plan_.scratch_bytes() * static_cast<size_t>(pool_.size()));
}

// One step as seen by one thread; all threads walk through the same stages.
struct Decoder::Stages {
  Decoder& d;
  const StepInput& in;
  const int thread;
  const int64_t rows;
  const Kernels& k;
  const DType dtype;
  const DecoderShape& s;
  Attention attention{};
  size_t stage = 0;

  Stages(Decoder& decoder, const StepInput& input, int at)
      : d(decoder),
        in(input),
        thread(at),
        rows(static_cast<int64_t>(input.tokens.size())),
        k(*decoder.kernels_),
        dtype(decoder.shape_.dtype),
        s(decoder.shape_) {}

  float* x(int64_t row) const { return d.x_.as<float>() + row * s.hidden; }
  char* act(Buffer& buffer, int64_t row, int64_t columns) const {
    return buffer.as<char>() + row * columns * k.act_bytes(dtype);
  }

  float* wide() const { return d.wide_.as<float>() + d.wide_floats() * thread; }

  void run() {
    for_rows(16, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) embed(row);
    });
    d.pool_.barrier();
    if (rows > kFewRows) {
      many_rows();
    } else {
      few_rows();
    }
    logits();
  }

  void embed(int64_t row) {
    const auto* table = static_cast<const char*>(d.embedding_.data);
    const int64_t bytes = s.hidden * dtype_bytes(d.embedding_.dtype);
    k.to_float(d.embedding_.dtype, table + in.tokens[static_cast<size_t>(row)] * bytes, x(row), s.hidden);
  }

  // Work handed out piece by piece; every call is a stage with its own counter.
  template <class Fn>
  void shared(int64_t total, int64_t grain, Fn fn) {
    Counter& counter = d.counters_[stage++];
    int64_t first, last;
    while (counter.take(total, grain, first, last)) fn(first, last);
  }
  template <class Fn>
  void for_rows(int64_t grain, Fn fn) {
    shared(rows, grain, fn);
  }

  void few_rows() {
    for (int i = 0; i < s.layers; ++i) {
      stage = 1 + static_cast<size_t>(i) * kStages;
      Layer& layer = d.layers_[static_cast<size_t>(i)];
      product(layer.qkv, normed(layer.attn_norm), s.hidden, d.qkv_.as<float>(), s.qkv(), Epilogue::Store);
      d.pool_.barrier();
      aim(i);
      attention.write_own = !d.plan_.any_wide();
      if (!attention.write_own) {
        for_spans();
        d.pool_.barrier();
      } else {
        ++stage;
      }
      attend();
      d.pool_.barrier();
      product(layer.out, d.attended_.as<char>(), s.attended(), d.x_.as<float>(), s.hidden, Epilogue::Add);
      d.pool_.barrier();
      product(layer.gate_up, normed(layer.mlp_norm), s.hidden, d.hidden_.as<char>(), s.intermediate, Epilogue::SiluMul);
      d.pool_.barrier();
      product(layer.down, d.hidden_.as<char>(), s.intermediate, d.x_.as<float>(), s.hidden, Epilogue::Add);
      d.pool_.barrier();
    }
  }

  // All rows normed, in a buffer of this thread's own when they are few.
  const char* normed(const std::vector<float>& weight) {
    const bool own = rows <= kPrivateRows;
    for (int64_t row = own ? 0 : thread; row < rows; row += own ? 1 : d.pool_.size()) {
      k.rms_norm(dtype, x(row), weight.data(), s.eps, s.hidden, act(d.act_, row + (own ? thread * rows : 0), s.hidden));
    }
    if (!own) d.pool_.barrier();
    return act(d.act_, own ? thread * rows : 0, s.hidden);
  }

  void product(const PackedMatrix& m, const char* a, int64_t lda, void* y, int64_t ldy, Epilogue epilogue) {
    const Gemm call = m.call(a, lda, y, ldy, epilogue);
    const int64_t grain = std::clamp<int64_t>(m.panels / (d.pool_.size() * 16) * 2, 2, 16);
    shared(m.panels, grain, [&](int64_t first, int64_t last) { k.gemm(dtype, call, 0, rows, first, last, wide()); });
  }

  void many_rows() {
    // Blocks of about kBlockRows, as many for each thread: with one more for some, the others would wait.
    const int64_t rounds = std::max<int64_t>(1, (rows + kBlockRows * d.pool_.size() / 2) / (kBlockRows * d.pool_.size()));
    const int64_t grain = (rows + rounds * d.pool_.size() - 1) / (rounds * d.pool_.size());
    for (int i = 0; i <= s.layers; ++i) {
      stage = 1 + static_cast<size_t>(i) * kStages;
      for_rows(grain, [&](int64_t first, int64_t last) {
        if (i > 0) after_attention(d.layers_[static_cast<size_t>(i - 1)], first, last);
        if (i < s.layers) before_attention(i, first, last);
      });
      d.pool_.barrier();
      if (i == s.layers) break;
      aim(i);
      attention.write_own = false;
      attend();
      d.pool_.barrier();
    }
  }

  void before_attention(int index, int64_t first, int64_t last) {
    Layer& layer = d.layers_[static_cast<size_t>(index)];
    norm_rows(layer.attn_norm, first, last);
    rows_product(layer.qkv, d.act_, s.hidden, d.qkv_.as<float>(), s.qkv(), Epilogue::Store, first, last);
    aim(index);
    write_rows(first, last);
  }

  void after_attention(Layer& layer, int64_t first, int64_t last) {
    rows_product(layer.out, d.attended_, s.attended(), d.x_.as<float>(), s.hidden, Epilogue::Add, first, last);
    norm_rows(layer.mlp_norm, first, last);
    rows_product(layer.gate_up, d.act_, s.hidden, d.hidden_.as<char>(), s.intermediate, Epilogue::SiluMul, first, last);
    rows_product(layer.down, d.hidden_, s.intermediate, d.x_.as<float>(), s.hidden, Epilogue::Add, first, last);
  }

  void norm_rows(const std::vector<float>& weight, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      k.rms_norm(dtype, x(row), weight.data(), s.eps, s.hidden, act(d.act_, row, s.hidden));
    }
  }

  void rows_product(const PackedMatrix& m, const Buffer& a, int64_t lda, void* y, int64_t ldy, Epilogue epilogue,
                    int64_t first, int64_t last) {
    k.gemm(dtype, m.call(a.as<char>(), lda, y, ldy, epilogue), first, last, 0, m.panels, wide());
  }

  // Points the attention struct at a layer.
  void aim(int index) {
    const Layer& layer = d.layers_[static_cast<size_t>(index)];
    const int64_t window = s.windows[static_cast<size_t>(index)];
    attention.qkv = d.qkv_.as<float>();
    attention.ld = s.qkv();
    attention.heads = s.heads;
    attention.kv_heads = s.kv_heads;
    attention.dim = s.dim;
    attention.q_norm = layer.q_norm.empty() ? nullptr : layer.q_norm.data();
    attention.k_norm = layer.k_norm.empty() ? nullptr : layer.k_norm.data();
    attention.eps = s.eps;
    attention.rope = d.rope_.as<float>();
    attention.rotary = 2 * static_cast<int>(s.inv_freq.size());
    attention.kv = static_cast<char*>(in.kv) + index * in.layer_stride * dtype_bytes(dtype);
    attention.block_stride = in.block_stride;
    attention.v_offset = in.v_offset;
    attention.block_size = in.block_size;
    attention.scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
    attention.window = window == 0 ? INT64_MAX / 2 : window;
    attention.softcap = 0.0f;
    attention.spans = d.plan_.spans().data();
    attention.out = d.attended_.as<char>();
    attention.ldo = s.attended();
    attention.partials = d.plan_.partials();
    attention.partial_floats = d.plan_.partial_floats();
    attention.joins = d.plan_.joins();
  }

  void for_spans() {
    const auto& spans = d.plan_.spans();
    shared(static_cast<int64_t>(spans.size()), 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) write_span(spans[static_cast<size_t>(i)], 0, spans[static_cast<size_t>(i)].count);
    });
  }

  void write_span(const Span& span, int64_t first, int64_t last) {
    for (int head = 0; head < s.kv_heads; ++head) k.write_kv(dtype, attention, span, first, last, head);
  }

  void write_rows(int64_t first, int64_t last) {
    for (const Span& span : d.plan_.spans()) {
      const int64_t from = std::max(first, span.row), to = std::min(last, span.row + span.count);
      if (from < to) write_span(span, from - span.row, to - span.row);
    }
  }

  void attend() {
    const auto& units = d.plan_.units();
    const size_t each = d.plan_.scratch_bytes();
    const Scratch scratch = d.plan_.scratch(d.scratch_.as<char>() + each * static_cast<size_t>(thread));
    walk(d.counters_[stage++], units, [&](const Unit& unit, const Unit* next) {
      k.attend(dtype, attention, unit, next, scratch);
    });
  }

  void logits() {
    const int64_t wanted = static_cast<int64_t>(in.logit_rows.size());
    if (wanted == 0) return;
    stage = static_cast<size_t>(s.layers * kStages) + 3;
    shared(wanted, 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        k.rms_norm(dtype, x(in.logit_rows[static_cast<size_t>(i)]), d.final_norm_.data(), s.eps, s.hidden,
                   act(d.last_, i, s.hidden));
      }
    });
    d.pool_.barrier();
    const Gemm call = d.head_.call(d.last_.as<char>(), s.hidden, in.logits, s.vocab, Epilogue::Store);
    shared(d.head_.panels, 16, [&](int64_t first, int64_t last) { k.gemm(dtype, call, 0, wanted, first, last, wide()); });
  }
};

void Decoder::step(const StepInput& input) {
  const int64_t rows = static_cast<int64_t>(input.tokens.size());
  if (rows == 0) return;
  plan_.prepare(input.spans, pool_.size());
  reserve(rows, static_cast<int64_t>(input.logit_rows.size()));
  for (auto& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
  const int64_t pairs = static_cast<int64_t>(shape_.inv_freq.size());
  auto* rope = rope_.as<float>();
  for (const Span& span : input.spans) {
    for (int64_t i = 0; i < span.count; ++i, rope += 2 * pairs) {
      for (int64_t j = 0; j < pairs; ++j) {
        const float angle = static_cast<float>(span.start + i) * shape_.inv_freq[static_cast<size_t>(j)];
        rope[j] = std::cos(angle) * shape_.rope_scaling;
        rope[pairs + j] = std::sin(angle) * shape_.rope_scaling;
      }
    }
  }
  pool_.run([&](int thread) { Stages(*this, input, thread).run(); });
}

}  // namespace kvray
