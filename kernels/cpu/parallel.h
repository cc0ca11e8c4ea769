// A parallel loop that never waits for a thread which has not begun to help.
//
// A decode step has hundreds of loops of a few microseconds. OpenMP ends each by waiting for all of its threads, so on
// a machine that is busy with something else every loop can cost a time slice. Here the calling thread takes pieces of
// the work until there are none; helpers take pieces too when they are awake and have a core. Each begins with a share of
// its own and takes it in order, so that it reads memory in one stream, and then helps with what others have left.
#pragma once

#include <ATen/Parallel.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace parallel {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Pool {
 public:
  static Pool& get() {
    static std::once_flag once;
    // A forked child has none of its parent's threads, and their locks are in an unknown state: it starts anew.
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { current() = new Pool; }); });
    return *current();
  }

  // Calls body(context, piece) for every piece in [0, pieces); false if the pool is busy with another loop.
  bool run(int threads, uint32_t pieces, void (*body)(void*, uint32_t), void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    threads = std::min(threads, kMost);
    for (; helpers_ < threads - 1; helpers_++) std::thread([this, id = helpers_ + 1] { help(id); }).detach();
    threads_.store(threads, std::memory_order_relaxed);
    body_ = body;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    const uint32_t generation = loop_.load(std::memory_order_relaxed) + 1;
    for (int t = 0; t < threads; t++) {
      const uint32_t begin = uint64_t(pieces) * t / threads, end = uint64_t(pieces) * (t + 1) / threads;
      shares_[t].end.store(end, std::memory_order_relaxed);
      shares_[t].left.store((uint64_t(generation) << 32) | (end - begin), std::memory_order_release);
    }
    loop_.store(generation);
    if (asleep_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    work(0);
    for (int spins = 0; done_.load(std::memory_order_acquire) != pieces; spins++) spins < 2000 ? pause() : (void)sched_yield();
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  // Helpers spin this many times for the next loop of a step before they sleep: about 50 microseconds.
  static constexpr int kSpins = 1500;
  static constexpr int kMost = 256;  // threads

  // The pieces that a thread begins with, in a cache line of its own.
  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};  // generation of the loop << 32 | pieces that nobody has claimed
    std::atomic<uint32_t> end{0};   // they are the ones before this
  };

  static Pool*& current() {
    static Pool* pool = new Pool;
    return pool;
  }

  // Claims the first piece that is left of a share and works on it. While a piece is claimed and not done its loop
  // cannot end, so that what belongs to the loop may be read after the claim; the generation keeps a late claim from
  // hitting the next loop.
  bool take(Share& share) {
    uint64_t left = share.left.load(std::memory_order_acquire);
    do {
      if (uint32_t(left) == 0) return false;
    } while (!share.left.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    body_(context_, share.end.load(std::memory_order_relaxed) - uint32_t(left));
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void work(int id) {
    const int threads = threads_.load(std::memory_order_relaxed);
    for (int t = 0; t < threads; t++)
      while (take(shares_[(id + t) % threads])) {
      }
  }

  // Whether there is another loop than the last one this helper saw, and it is one for so many threads.
  bool wanted(int id, uint32_t seen) const {
    return loop_.load() != seen && id < threads_.load(std::memory_order_relaxed);
  }

  void help(int id) {
    for (uint32_t seen = 0;;) {
      for (int spins = 0; spins < kSpins; spins++) {
        if (wanted(id, seen)) {
          seen = loop_.load();
          work(id);
          spins = 0;
        }
        pause();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      wake_.wait(lock, [&] { return wanted(id, seen); });
      asleep_.fetch_sub(1);
    }
  }

  std::atomic<bool> busy_{false};
  std::atomic<uint32_t> loop_{0};  // generation of the last loop
  std::atomic<uint32_t> done_{0};
  std::atomic<int> threads_{1}, asleep_{0};
  Share shares_[kMost];
  void (*body_)(void*, uint32_t) = nullptr;
  void* context_ = nullptr;
  int helpers_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Calls f(i) for i in [0, count), in any order, on up to as many threads as PyTorch is set to. One call takes
// about `work` microseconds; loops of little work are not split. f must not throw.
template <class Function>
void loop(int64_t count, double work, const Function& f) {
  constexpr double kPiece = 4.0, kPiecesPerThread = 8.0;
  const int threads = at::get_num_threads();
  const double total = double(count) * work;
  const int64_t pieces = std::min<int64_t>(count, int64_t(std::min(total / kPiece, threads * kPiecesPerThread)));
  const auto serial = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) f(i);
  };
  if (threads < 2 || pieces < 2) return serial(0, count);
  struct Context {
    decltype(serial)* body;
    int64_t count, pieces;
  } context{&serial, count, pieces};
  const auto body = [](void* opaque, uint32_t piece) {
    auto& c = *static_cast<Context*>(opaque);
    (*c.body)(c.count * piece / c.pieces, c.count * (piece + 1) / c.pieces);
  };
  if (!Pool::get().run(threads, uint32_t(pieces), body, &context)) serial(0, count);
}

}  // namespace parallel
