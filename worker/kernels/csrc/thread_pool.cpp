#include "thread_pool.h"

#include <climits>

#ifdef __linux__
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <chrono>
#endif

namespace kvray {
namespace {

constexpr int kSpins = 2000;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : size_(threads) {
  for (int i = 1; i < threads; ++i) {
    threads_.emplace_back([this, i] { work(i); });
#ifdef __linux__
    pthread_setname_np(threads_.back().native_handle(), "kvray-pool");  // seen in top -H
#endif
  }
}

ThreadPool::~ThreadPool() {
  job_ = nullptr;
  jobs_.fetch_add(1);
  wake(jobs_);
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::start(Job job, void* context) {
  const std::lock_guard<std::mutex> turn(turn_);
  job_ = job;
  context_ = context;
  if (size_ > 1) {
    jobs_.fetch_add(1);
    wake(jobs_);
  }
  job(context, 0);
  barrier();
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    wait(jobs_, seen);
    ++seen;
    if (job_ == nullptr) return;
    job_(context_, thread);
    barrier();
  }
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1);
    wake(phase_);
  } else {
    wait(phase_, phase);
  }
}

// The waker changes the word and then looks for sleepers; a sleeper announces itself and then checks the word (in the
// kernel). Both in sequential order, so one of them sees the other.
void ThreadPool::wait(std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    pause_briefly();
  }
  sleepers_.fetch_add(1);
  while (word.load() == old) {
#ifdef __linux__
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
  }
  sleepers_.fetch_sub(1);
}

void ThreadPool::wake(std::atomic<uint32_t>& word) {
#ifdef __linux__
  if (sleepers_.load() != 0) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
#else
  (void)word;
#endif
}

}  // namespace kvray
