#include "isa.h"

namespace kvray {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found;
#ifdef KVRAY_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(avx512bf16_kernels());
  if (avx512) found.push_back(avx512_kernels());
  if (avx2) found.push_back(avx2_kernels());
#endif
  found.push_back(scalar_kernels());
  return found;
}

const Kernels* find_kernels(const std::string& name) {
  for (const Kernels* kernels : available_kernels()) {
    if (name.empty() || name == kernels->name) return kernels;
  }
  return nullptr;
}

const Kernels* fitting_kernels(const Kernels* wanted, int block_size, int dim) {
  bool reached = false;
  for (const Kernels* kernels : available_kernels()) {
    reached = reached || kernels == wanted;
    if (reached && block_size % kernels->width == 0 && dim % kernels->width == 0) return kernels;
  }
  return nullptr;
}

}  // namespace kvray
