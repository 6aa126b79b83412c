// The kernels for one instruction set; its compiler flags are in CMakeLists.txt.
#define KVRAY_NAME "avx2"
#include <cstdint>
#include "vec_avx2.h"
#include "kernels_impl.h"

const kvray::Kernels* kvray::avx2_kernels() { return &kTable; }
