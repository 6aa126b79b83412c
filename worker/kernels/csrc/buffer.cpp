#include "buffer.h"

#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace kvray {
namespace {

constexpr size_t kHugePage = 2u << 20;
constexpr size_t kReadAhead = 8192;  // kernels prefetch a little beyond what they read

}  // namespace

Buffer::~Buffer() { std::free(data_); }

void Buffer::grow(size_t bytes) {
  if (bytes <= size_) return;
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  const size_t whole = (bytes + kReadAhead + alignment - 1) / alignment * alignment;
  std::free(data_);
  size_ = 0;
  data_ = std::aligned_alloc(alignment, whole);
  if (data_ == nullptr) throw std::bad_alloc();
  size_ = bytes;
  advise_huge(data_, whole);
}

void advise_huge(void* at, size_t bytes) {
#ifdef __linux__
  const uintptr_t page = 4096, from = (reinterpret_cast<uintptr_t>(at) + page - 1) / page * page;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(at) + bytes) / page * page;
  if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)at, (void)bytes;
#endif
}

}  // namespace kvray
