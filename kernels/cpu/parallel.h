// A parallel loop that never waits for a thread which has not begun to help.
//
// A decode step has hundreds of loops of a few microseconds. OpenMP ends each by waiting for all of its threads, so on
// a machine that is busy with something else every loop can cost a time slice. Here the calling thread takes pieces of
// the work until there are none; helpers take pieces too when they are awake and have a core. Each begins with a share of
// its own and takes it in order, so that it reads memory in one stream, and then helps with what others have left.
//
// Between loops helpers would wait, and memory with them. They fetch what is going to be read then: what followed the last
// time, as one step is like another.
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
#include <unordered_map>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace parallel {

constexpr int64_t kLine = 64;  // bytes that memory gives at a time

struct Span {
  const char* begin = nullptr;
  int64_t bytes = 0;
};

// What was read after what. It may be gone by now: to fetch from any address is harmless.
class Order {
 public:
  // Notes that this is read now; what was read after it the last time.
  Span after(Span now) {
    std::lock_guard<std::mutex> lock(mutex_);
    next_[last_] = now;
    last_ = now.begin;
    return next_[now.begin];
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const char*, Span> next_;
  const char* last_ = nullptr;
};

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

  // Names what the next loop reads, each thread the share that it begins with.
  void reads(Span span) {
    const Span next = order_.after(span);
    expected_bytes_.store(next.bytes, std::memory_order_relaxed);
    expected_.store(next.begin, std::memory_order_relaxed);
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
  static constexpr int64_t kFetched = 1 << 20;  // bytes that a helper fetches at most: about what its caches hold

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

  // The beginning of a thread's share of what is expected.
  Span expected(int id) const {
    const char* begin = expected_.load(std::memory_order_relaxed);
    const int64_t bytes = expected_bytes_.load(std::memory_order_relaxed);
    const int64_t threads = threads_.load(std::memory_order_relaxed);
    const int64_t first = bytes * id / threads, end = bytes * (id + 1) / threads;
    return {begin + first, std::min(end - first, kFetched)};
  }

  // A few lines, for which a pause is long enough: the CPU drops requests that come faster than memory answers.
  static void fetch(Span& span) {
    constexpr int kLines = 6;
    for (int i = 0; i < kLines; i++) __builtin_prefetch(span.begin + i * kLine, 0, 2);
    span = {span.begin + kLines * kLine, span.bytes - kLines * kLine};
  }

  void help(int id) {
    const char* last = nullptr;  // what was expected when `coming` was made
    Span coming;
    for (uint32_t seen = 0;;) {
      for (int spins = 0; spins < kSpins; spins++) {
        if (wanted(id, seen)) {
          seen = loop_.load();
          work(id);
          const char* now = expected_.load(std::memory_order_relaxed);
          if (now != last) coming = expected(id), last = now;
          spins = 0;
        }
        if (coming.bytes > 0) fetch(coming);
        pause();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      wake_.wait(lock, [&] { return wanted(id, seen); });
      asleep_.fetch_sub(1);
    }
  }

  Order order_;
  std::atomic<const char*> expected_{nullptr};  // what is read after the loop that runs
  std::atomic<int64_t> expected_bytes_{0};
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
  constexpr double kPiece = 4.0, kPiecesPerThread = 16.0;
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
