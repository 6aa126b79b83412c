// Memory for weights and scratch: aligned to huge pages, and asking for them.
#pragma once

#include <cstddef>

namespace kvray {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) { grow(bytes); }
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // At least `bytes`; what was in it is lost when it grows. std::bad_alloc when there is no memory.
  void grow(size_t bytes);
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Asks for huge pages on the whole pages inside [at, at + bytes); a hint, never an error.
void advise_huge(void* at, size_t bytes);

}  // namespace kvray
