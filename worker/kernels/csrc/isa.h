// Which instruction sets this build has and this machine can run, best first.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace kvray {

std::vector<const Kernels*> available_kernels();

// By name, or the best one for an empty name; null when it is not available here.
const Kernels* find_kernels(const std::string& name);

// `wanted`, or a narrower set whose vectors divide block size and head dim; null when none does.
const Kernels* fitting_kernels(const Kernels* wanted, int block_size, int dim);

}  // namespace kvray
