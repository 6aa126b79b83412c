// The kernels for one instruction set; its compiler flags are in CMakeLists.txt.
#define KVRAY_BF16
#define KVRAY_NAME "avx512bf16"
#include <cstdint>
#include "vec_avx512.h"
#include "kernels_impl.h"

const kvray::Kernels* kvray::avx512bf16_kernels() { return &kTable; }
