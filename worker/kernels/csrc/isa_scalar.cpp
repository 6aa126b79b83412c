// The kernels for one instruction set; its compiler flags are in CMakeLists.txt.
#define KVRAY_NAME "scalar"
#include <cstdint>
#include "vec_scalar.h"
#include "kernels_impl.h"

const kvray::Kernels* kvray::scalar_kernels() { return &kTable; }
