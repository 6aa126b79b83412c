// Python's view of the native kernels: worker/kernels/native.py wraps it.
//
// Tensors come as DLPack arrays or as addresses of memory that Python keeps alive for the call. The GIL is released in
// everything that computes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>

#include "decoder.h"
#include "isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvray {
namespace {

using Array = nb::ndarray<nb::device::cpu, nb::c_contig>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::device::cpu, nb::c_contig>;

DType dtype_named(const std::string& name) {
  if (name == "float32") return DType::F32;
  if (name == "bfloat16") return DType::BF16;
  if (name == "float16") return DType::F16;
  throw nb::value_error("dtype must be float32, bfloat16 or float16");
}

DType dtype_of(const Array& array) {
  const auto type = array.dtype();
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 32) return DType::F32;
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 16) return DType::F16;
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && type.bits == 16) return DType::BF16;
  throw nb::type_error("expected a float32, float16 or bfloat16 array");
}


Tensor sized(const Array& array, int64_t elements) {
  if (static_cast<int64_t>(array.size()) != elements) throw nb::value_error("a weight has the wrong number of elements");
  return {array.data(), dtype_of(array)};
}

std::optional<Tensor> sized(const std::optional<Array>& array, int64_t elements) {
  return array ? std::optional<Tensor>(sized(*array, elements)) : std::nullopt;
}

const Kernels* kernels_named(const std::string& name) {
  const Kernels* kernels = find_kernels(name);
  if (kernels == nullptr) throw nb::value_error("this machine or build has no kernels of that name");
  return kernels;
}

// spans: (count, start, blocks) of each; tables: their block ids one after the other.
std::vector<Span> spans_of(const Ints& spans, const Ints& tables, int block_size, int64_t rows, int64_t num_blocks) {
  std::vector<Span> found;
  for (size_t i = 0; i < tables.size(); ++i) {
    if (tables.data()[i] < 0 || tables.data()[i] >= num_blocks) throw nb::value_error("a block id is outside the pool");
  }
  int64_t row = 0;
  size_t at = 0;
  for (size_t i = 0; i + 3 <= spans.size(); i += 3) {
    const int32_t count = spans.data()[i], start = spans.data()[i + 1], blocks = spans.data()[i + 2];
    if (count < 1 || start < 0 || at + static_cast<size_t>(blocks) > tables.size() ||
        static_cast<int64_t>(start) + count > static_cast<int64_t>(blocks) * block_size) {
      throw nb::value_error("a span does not fit its block table");
    }
    found.push_back({row, count, start, tables.data() + at});
    row += count;
    at += static_cast<size_t>(blocks);
  }
  if (row != rows || at != tables.size()) throw nb::value_error("spans do not cover the rows");
  return found;
}

int block_size_for(const Kernels* kernels, int block_size) {
  if (block_size <= 0 || block_size % kernels->width != 0 || block_size > kTile || kTile % block_size != 0) {
    throw nb::value_error("block size must divide 256 and be a multiple of the vector width");
  }
  return block_size;
}

class PyDecoder {
 public:
  PyDecoder(ThreadPool& pool, const std::string& isa, DecoderShape shape)
      : vocab_(shape.vocab), shape_(shape), decoder_(pool, kernels_named(isa), std::move(shape)) {}

  void set_ends(Array embedding, Array final_norm, Array head) {
    const int64_t table = shape_.vocab * shape_.hidden;
    const Tensor e = sized(embedding, table), n = sized(final_norm, shape_.hidden), h = sized(head, table);
    embedding_ = embedding;
    nb::gil_scoped_release release;
    decoder_.set_ends(e, n, h);
  }

  void set_layer(int index, Array attn_norm, Array qkv, std::optional<Array> qkv_bias, std::optional<Array> q_norm,
                 std::optional<Array> k_norm, Array out, std::optional<Array> out_bias, Array mlp_norm, Array gate_up,
                 std::optional<Array> gate_up_bias, Array down, std::optional<Array> down_bias) {
    const auto& s = shape_;
    LayerTensors t;
    t.attn_norm = sized(attn_norm, s.hidden);
    t.qkv = sized(qkv, s.qkv() * s.hidden);
    t.qkv_bias = sized(qkv_bias, s.qkv()).value_or(Tensor{});
    t.q_norm = sized(q_norm, s.dim).value_or(Tensor{});
    t.k_norm = sized(k_norm, s.dim).value_or(Tensor{});
    t.out = sized(out, s.hidden * s.attended());
    t.out_bias = sized(out_bias, s.hidden).value_or(Tensor{});
    t.mlp_norm = sized(mlp_norm, s.hidden);
    t.gate_up = sized(gate_up, 2 * s.intermediate * s.hidden);
    t.gate_up_bias = sized(gate_up_bias, 2 * s.intermediate).value_or(Tensor{});
    t.down = sized(down, s.hidden * s.intermediate);
    t.down_bias = sized(down_bias, s.hidden).value_or(Tensor{});
    nb::gil_scoped_release release;
    decoder_.set_layer(index, t);
  }

  void step(Ints tokens, Ints spans, Ints tables, Ints logit_rows, uintptr_t kv, int64_t num_blocks, int64_t block_stride,
            int64_t layer_stride, int64_t v_offset, int block_size, uintptr_t logits) {
    StepInput in;
    const int64_t rows = static_cast<int64_t>(tokens.size());
    in.tokens.assign(tokens.data(), tokens.data() + tokens.size());
    in.logit_rows.assign(logit_rows.data(), logit_rows.data() + logit_rows.size());
    for (int32_t token : in.tokens) {
      if (token < 0 || token >= vocab_) throw nb::value_error("a token id is outside the vocabulary");
    }
    for (int32_t row : in.logit_rows) {
      if (row < 0 || row >= rows) throw nb::value_error("a logit row is outside the batch");
    }
    in.block_size = block_size_for(decoder_.kernels(), block_size);
    in.spans = spans_of(spans, tables, block_size, rows, num_blocks);
    in.kv = reinterpret_cast<void*>(kv);
    in.block_stride = block_stride;
    in.layer_stride = layer_stride;
    in.v_offset = v_offset;
    in.logits = reinterpret_cast<float*>(logits);
    nb::gil_scoped_release release;
    decoder_.step(in);
  }

  int64_t weight_bytes() const { return decoder_.weight_bytes(); }

 private:
  int64_t vocab_;
  DecoderShape shape_;
  Decoder decoder_;
  std::optional<Array> embedding_;  // kept alive: rows are looked up in it
};

// One matrix alone: y = x W^T + bias, as the decoder computes it. For other models and for tests.
class PyMatrix {
 public:
  PyMatrix(ThreadPool& pool, const std::string& isa, const std::string& dtype, Array weight, std::optional<Array> bias,
           bool gated)
      : pool_(pool), kernels_(kernels_named(isa)) {
    if (weight.ndim() != 2) throw nb::value_error("a weight has two dimensions");
    matrix_ = PackedMatrix(dtype_named(dtype), static_cast<int64_t>(weight.shape(0)),
                           static_cast<int64_t>(weight.shape(1)), gated);
    if (gated && matrix_.n % (2 * kHalfPanel) != 0) throw nb::value_error("gate and up need a multiple of 8 rows each");
    data_.grow(static_cast<size_t>(matrix_.bytes()));
    const Tensor b = bias ? sized(*bias, matrix_.n) : Tensor{};
    const Tensor w{weight.data(), dtype_of(weight)};
    nb::gil_scoped_release release;
    matrix_.pack(pool_, w.data, w.dtype, data_.as<void>());
    if (b.data != nullptr) matrix_.set_bias(b.data, b.dtype);
  }

  // x [M, K] fp32 -> y [M, N] fp32 ([M, N / 2] when gated); `add` keeps what y holds.
  void multiply(nb::ndarray<const float, nb::ndim<2>, nb::device::cpu, nb::c_contig> x,
                nb::ndarray<float, nb::ndim<2>, nb::device::cpu, nb::c_contig> y, bool add) {
    const int64_t rows = static_cast<int64_t>(x.shape(0)), k = matrix_.k, width = kernels_->act_bytes(matrix_.dtype);
    const int64_t columns = matrix_.gated ? matrix_.n / 2 : matrix_.n;
    if (static_cast<int64_t>(x.shape(1)) != k || static_cast<int64_t>(y.shape(0)) != rows ||
        static_cast<int64_t>(y.shape(1)) != columns) {
      throw nb::value_error("shapes of x, y and the weight do not fit");
    }
    const float* from = x.data();
    float* to = y.data();
    nb::gil_scoped_release release;
    const int64_t lda = matrix_.groups * matrix_.kstep;
    act_.grow(static_cast<size_t>(rows * lda * width));
    gated_.grow(matrix_.gated ? static_cast<size_t>(rows * columns * width) : 0);
    auto* act = act_.as<char>();
    for (int64_t row = 0; row < rows; ++row) {
      auto* at = act + row * lda * width;
      kernels_->to_act(matrix_.dtype, from + row * k, at, k);
      for (int64_t i = k * width; i < lda * width; ++i) at[i] = 0;
    }
    const Epilogue epilogue = matrix_.gated ? Epilogue::SiluMul : add ? Epilogue::Add : Epilogue::Store;
    void* out = matrix_.gated ? gated_.as<void>() : to;
    const Gemm call = matrix_.call(act, lda, out, columns, epilogue);
    const int64_t block = rows <= 32 ? rows : 48, blocks = (rows + block - 1) / block, parts = (matrix_.panels + 7) / 8;
    const int64_t wide = matrix_.groups * matrix_.kstep * kPanel * kWidePanels;
    scratch_.grow(static_cast<size_t>(wide * pool_.size()) * sizeof(float));
    Counter counter;
    pool_.run([&](int thread) {
      int64_t first, last;
      float* scratch = scratch_.as<float>() + wide * thread;
      while (counter.take(blocks * parts, 1, first, last)) {
        const int64_t row = first / parts * block, panel = first % parts * 8;
        kernels_->gemm(matrix_.dtype, call, row, std::min(rows, row + block), panel, std::min(matrix_.panels, panel + 8),
                       scratch);
      }
    });
    if (matrix_.gated) {
      if (width == 4) {
        std::copy_n(gated_.as<float>(), rows * columns, to);
      } else {
        kernels_->to_float(matrix_.dtype, gated_.as<void>(), to, rows * columns);
      }
    }
  }

 private:
  ThreadPool& pool_;
  const Kernels* kernels_;
  PackedMatrix matrix_;
  Buffer data_, act_, gated_, scratch_;
};

// Paged attention of one layer for tensors that are already rotated.
class PyAttention {
 public:
  PyAttention(ThreadPool& pool, const std::string& isa, int heads, int kv_heads, int dim)
      : pool_(pool),
        kernels_(fitting(isa, heads, kv_heads, dim)),
        plan_(heads, kv_heads, dim),
        heads_(heads),
        kv_heads_(kv_heads),
        dim_(dim) {}

  // qkv fp32 [T, (heads + 2 kv_heads) * dim] -> out fp32 [T, heads * dim]; kv is this layer of block 0.
  void forward(nb::ndarray<const float, nb::ndim<2>, nb::device::cpu, nb::c_contig> qkv,
               nb::ndarray<float, nb::ndim<2>, nb::device::cpu, nb::c_contig> out, Ints spans, Ints tables, uintptr_t kv,
               int64_t num_blocks, const std::string& dtype, int64_t block_stride, int64_t v_offset, int block_size, float scale,
               int64_t window, float softcap) {
    const int64_t rows = static_cast<int64_t>(qkv.shape(0));
    Attention a{};
    const DType type = dtype_named(dtype);
    const std::vector<Span> all = spans_of(spans, tables, block_size_for(kernels_, block_size), rows, num_blocks);
    a.qkv = qkv.data();
    a.ld = static_cast<int64_t>(heads_ + 2 * kv_heads_) * dim_;
    a.heads = heads_, a.kv_heads = kv_heads_, a.dim = dim_;
    a.kv = reinterpret_cast<void*>(kv);
    a.block_stride = block_stride, a.v_offset = v_offset, a.block_size = block_size;
    a.scale = scale, a.window = window == 0 ? INT64_MAX / 2 : window, a.softcap = softcap;
    a.ldo = static_cast<int64_t>(heads_) * dim_;
    if (static_cast<int64_t>(qkv.shape(1)) != a.ld || static_cast<int64_t>(out.shape(0)) != rows ||
        static_cast<int64_t>(out.shape(1)) != a.ldo) {
      throw nb::value_error("shapes of qkv and out do not fit the heads");
    }
    float* to = out.data();
    nb::gil_scoped_release release;
    plan_.prepare(all, pool_.size());
    scratch_.grow(plan_.scratch_bytes() * static_cast<size_t>(pool_.size()));
    act_.grow(static_cast<size_t>(rows * a.ldo * kernels_->act_bytes(type)));
    a.spans = plan_.spans().data(), a.out = act_.as<void>();
    a.partials = plan_.partials(), a.partial_floats = plan_.partial_floats(), a.joins = plan_.joins();
    a.write_own = !plan_.any_wide();
    Counter writes, units;
    pool_.run([&](int thread) {
      int64_t first, last;
      while (!a.write_own && writes.take(static_cast<int64_t>(all.size()) * kv_heads_, 1, first, last)) {
        const Span& span = all[static_cast<size_t>(first / kv_heads_)];
        kernels_->write_kv(type, a, span, 0, span.count, static_cast<int>(first % kv_heads_));
      }
      pool_.barrier();
      const Scratch scratch = plan_.scratch(scratch_.as<char>() + plan_.scratch_bytes() * static_cast<size_t>(thread));
      walk(units, plan_.units(), [&](const Unit& unit, const Unit* next) { kernels_->attend(type, a, unit, next, scratch); });
    });
    if (kernels_->act_bytes(type) == 4) {
      std::copy_n(act_.as<float>(), rows * a.ldo, to);
    } else {
      kernels_->to_float(type, act_.as<void>(), to, rows * a.ldo);
    }
  }

 private:
  static const Kernels* fitting(const std::string& isa, int heads, int kv_heads, int dim) {
    const Kernels* kernels = kernels_named(isa);
    if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0 || dim < 1 || dim > kMaxDim || dim % kernels->width != 0) {
      throw nb::value_error("heads and dim do not fit the kernels");
    }
    return kernels;
  }

  ThreadPool& pool_;
  const Kernels* kernels_;
  AttentionPlan plan_;
  int heads_, kv_heads_, dim_;
  Buffer scratch_, act_;
};

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of each of `passes` reads of a buffer of that many bytes by all threads.
std::vector<double> read_times(ThreadPool& pool, int64_t bytes, int passes) {
  const Kernels* kernels = find_kernels("");
  Buffer buffer(static_cast<size_t>(bytes));
  const int64_t piece = 256 * 1024, pieces = bytes / piece;
  for (int64_t i = 0; i < bytes; i += 4096) buffer.as<char>()[i] = 1;
  std::vector<double> times;
  for (int pass = 0; pass < passes; ++pass) {
    Counter counter;
    std::atomic<uint64_t> sum{0};
    const double start = seconds();
    pool.run([&](int) {
      int64_t first, last;
      while (counter.take(pieces, 1, first, last)) sum += kernels->read(buffer.as<char>() + first * piece, piece);
    });
    times.push_back(seconds() - start);
  }
  return times;
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.def("available", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
    return names;
  });
  m.def("fitting", [](const std::string& wanted, int block_size, int dim) {
    const Kernels* kernels = fitting_kernels(kernels_named(wanted), block_size, dim);
    return kernels == nullptr ? std::string() : std::string(kernels->name);
  }, "wanted"_a, "block_size"_a, "dim"_a);
  m.def("advise_huge", [](uintptr_t at, size_t bytes) { advise_huge(reinterpret_cast<void*>(at), bytes); }, "at"_a, "bytes"_a);
  m.def("read_times", &read_times, "pool"_a, "bytes"_a, "passes"_a, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<ThreadPool>(m, "ThreadPool").def(nb::init<int>(), "threads"_a).def_prop_ro("size", &ThreadPool::size);

  nb::class_<PyDecoder>(m, "Decoder")
      .def("__init__",
           [](PyDecoder* self, ThreadPool& pool, const std::string& isa, const std::string& dtype, int64_t vocab,
              int64_t hidden, int64_t intermediate, int layers, int heads, int kv_heads, int dim, float eps,
              std::vector<float> inv_freq, float rope_scaling, std::vector<int64_t> windows) {
             if (hidden % 8 != 0 || intermediate % 8 != 0 || kv_heads < 1 || heads % kv_heads != 0 || dim < 8 || dim % 8 != 0 || dim > kMaxDim ||
                 windows.size() != static_cast<size_t>(layers) || inv_freq.size() * 2 > static_cast<size_t>(dim)) {
               throw nb::value_error("these sizes do not fit the native decoder");
             }
             new (self) PyDecoder(pool, isa, DecoderShape{dtype_named(dtype), vocab, hidden, intermediate, layers, heads,
                                                          kv_heads, dim, eps, std::move(inv_freq), rope_scaling,
                                                          std::move(windows)});
           },
           nb::keep_alive<1, 2>(), "pool"_a, "isa"_a, "dtype"_a, nb::kw_only(), "vocab"_a, "hidden"_a, "intermediate"_a,
           "layers"_a, "heads"_a, "kv_heads"_a, "dim"_a, "eps"_a, "inv_freq"_a, "rope_scaling"_a, "windows"_a)
      .def("set_ends", &PyDecoder::set_ends, "embedding"_a, "final_norm"_a, "head"_a)
      .def("set_layer", &PyDecoder::set_layer, "index"_a, nb::kw_only(), "attn_norm"_a, "qkv"_a,
           "qkv_bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), "out"_a, "out_bias"_a.none(), "mlp_norm"_a,
           "gate_up"_a, "gate_up_bias"_a.none(), "down"_a, "down_bias"_a.none())
      .def("step", &PyDecoder::step, nb::kw_only(), "tokens"_a, "spans"_a, "tables"_a, "logit_rows"_a, "kv"_a,
           "num_blocks"_a, "block_stride"_a, "layer_stride"_a, "v_offset"_a, "block_size"_a, "logits"_a)
      .def_prop_ro("weight_bytes", &PyDecoder::weight_bytes);

  nb::class_<PyMatrix>(m, "Matrix")
      .def(nb::init<ThreadPool&, const std::string&, const std::string&, Array, std::optional<Array>, bool>(),
           nb::keep_alive<1, 2>(), "pool"_a, "isa"_a, "dtype"_a, "weight"_a, "bias"_a.none() = nb::none(),
           "gated"_a = false)
      .def("multiply", &PyMatrix::multiply, "x"_a, "y"_a, "add"_a = false);

  nb::class_<PyAttention>(m, "Attention")
      .def(nb::init<ThreadPool&, const std::string&, int, int, int>(), nb::keep_alive<1, 2>(), "pool"_a, "isa"_a,
           "heads"_a, "kv_heads"_a, "dim"_a)
      .def("forward", &PyAttention::forward, nb::kw_only(), "qkv"_a, "out"_a, "spans"_a, "tables"_a, "kv"_a, "num_blocks"_a, "dtype"_a,
           "block_stride"_a, "v_offset"_a, "block_size"_a, "scale"_a, "window"_a, "softcap"_a);
}

}  // namespace kvray
