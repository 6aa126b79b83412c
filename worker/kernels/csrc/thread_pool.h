// A fixed team of threads that run one function together, and a barrier among them.
//
// Waiting spins for some microseconds and then sleeps in the kernel: on a shared machine a thread that waits for a
// descheduled one must give its core away.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace kvray {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Runs fn(thread) on every thread, the caller being thread 0; returns when all are done. Callers take turns.
  template <class Fn>
  void run(Fn&& fn) {
    start([](void* context, int thread) { (*static_cast<Fn*>(context))(thread); }, &fn);
  }

  // Inside run: returns when every thread has called it.
  void barrier();

 private:
  using Job = void (*)(void*, int);
  void start(Job job, void* context);
  void work(int thread);
  void wait(std::atomic<uint32_t>& word, uint32_t old);
  void wake(std::atomic<uint32_t>& word);

  const int size_;
  std::mutex turn_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> jobs_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::vector<std::thread> threads_;
};

// Hands out [0, total) in pieces, to whoever asks next.
struct alignas(64) Counter {
  std::atomic<int64_t> next{0};
  bool take(int64_t total, int64_t grain, int64_t& first, int64_t& last) {
    first = next.fetch_add(grain, std::memory_order_relaxed);
    last = first + grain < total ? first + grain : total;
    return first < total;
  }
};

}  // namespace kvray
