// A whole decoder-only transformer in one call: embedding, layers, logits, over packed weights and the paged pool.
//
// Few rows (decode): every product is cut by output columns, with a barrier between. Many rows (prefill): everything
// that concerns a row alone is done block of rows by block of rows, so activations stay in cache; only attention, which
// needs the others' KV, is apart. The arithmetic of a row is the same in both forms.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "buffer.h"
#include "kernels.h"
#include "packed_matrix.h"
#include "thread_pool.h"

namespace kvray {

struct DecoderShape {
  DType dtype;
  int64_t vocab, hidden, intermediate;
  int layers, heads, kv_heads, dim;
  float eps;
  std::vector<float> inv_freq;  // one per rotated pair
  float rope_scaling;
  std::vector<int64_t> windows;  // per layer; 0: all

  int64_t qkv() const { return static_cast<int64_t>(heads + 2 * kv_heads) * dim; }
  int64_t attended() const { return static_cast<int64_t>(heads) * dim; }
};

struct Tensor {
  const void* data = nullptr;  // null: the model has none
  DType dtype = DType::F32;
};

struct LayerTensors {
  Tensor attn_norm, qkv, qkv_bias, q_norm, k_norm, out, out_bias, mlp_norm, gate_up, gate_up_bias, down, down_bias;
};

struct StepInput {
  std::vector<int32_t> tokens;
  std::vector<Span> spans;  // rows in order, without gaps
  std::vector<int32_t> logit_rows;
  void* kv;              // block 0, layer 0, K
  int64_t block_stride;  // elements
  int64_t layer_stride;
  int64_t v_offset;
  int block_size;
  float* logits;  // [logit_rows, vocab]
};

class Decoder {
 public:
  Decoder(ThreadPool& pool, const Kernels* kernels, DecoderShape shape);

  // `embedding` must outlive the decoder: rows are looked up in it. `head` may be the same tensor.
  void set_ends(Tensor embedding, Tensor final_norm, Tensor head);
  void set_layer(int index, const LayerTensors& tensors);

  void step(const StepInput& input);

  int64_t weight_bytes() const { return static_cast<int64_t>(weights_.size()); }
  const Kernels* kernels() const { return kernels_; }

 private:
  struct Layer {
    std::vector<float> attn_norm, mlp_norm, q_norm, k_norm;
    PackedMatrix qkv, out, gate_up, down;
  };
  struct Stages;  // the work of one step, in decoder.cpp

  void reserve(int64_t rows, int64_t logit_rows);
  int64_t wide_floats() const;  // of scratch for products, per thread
  std::vector<float> floats(Tensor tensor, int64_t n) const;
  void pack(PackedMatrix& matrix, Tensor weight, Tensor bias);

  ThreadPool& pool_;
  const Kernels* kernels_;
  DecoderShape shape_;
  std::vector<Layer> layers_;
  PackedMatrix head_;
  Tensor embedding_;
  std::vector<float> final_norm_;
  Buffer weights_;
  size_t used_ = 0;
  AttentionPlan plan_;
  Buffer x_, act_, qkv_, attended_, hidden_, rope_, scratch_, wide_, last_;
  std::vector<Counter> counters_;
};

}  // namespace kvray
