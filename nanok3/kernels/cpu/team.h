// Threads that go through many short phases together: one parallel region, work handed out piece by piece.
//
// Decoding one token takes about a hundred phases of some microseconds. What a phase waits for is its work, not its
// threads: whoever finds all pieces done goes on, and one that the system has put aside meanwhile finds, when it comes
// back, that its phases are past. Only a piece that somebody has begun keeps the others waiting: they spin for some
// microseconds and then yield. Which thread computes a piece is left to chance, what is computed for it is not: results
// do not depend on the number of threads.
#pragma once
#include <atomic>
#include <cstdint>
#include <sched.h>

class Team {
 public:
  // body(member) on up to `threads` threads.
  template <class Body>
  static void run(int threads, Body body);

 private:
  friend class Member;
  static constexpr int kSpins = 1000;
  static constexpr int kItemBits = 40;
  explicit Team(int size) : size_(size) {}
  const int size_;
  alignas(64) std::atomic<uint64_t> next_{0};  // the phase, and in the low bits its first item that nobody has taken
  alignas(64) std::atomic<int64_t> done_{0};   // items of this phase
};

// One thread's view of the team.
class Member {
 public:
  explicit Member(Team& team) : team_(team) {}

  // run(begin, end) for pieces of [0, items), which begin at multiples of `piece`: large ones at first, then smaller
  // ones, so that all end together. Every thread calls this, and none returns before all is done. A thread that is late
  // may call it with any number of items, computed from what later phases have written over: nothing is run then.
  template <class Run>
  void share(int64_t items, int64_t piece, Run run) {
    const uint64_t phase = phase_++;
    if (team_.size_ == 1) {
      if (items) run(int64_t(0), items);
      return;
    }
    uint64_t now = team_.next_.load(std::memory_order_acquire);
    while (now >> Team::kItemBits == phase) {
      const int64_t begin = int64_t(now & kItems), left = items - begin;
      if (left <= 0) return items ? wait(phase) : pass(phase);
      const int64_t size = size_of(left, piece);
      if (!team_.next_.compare_exchange_weak(now, now + uint64_t(size), std::memory_order_acquire)) continue;
      run(begin, begin + size);
      if (team_.done_.fetch_add(size, std::memory_order_acq_rel) + size == items) end(phase);
      now = team_.next_.load(std::memory_order_acquire);
    }
  }

 private:
  static constexpr uint64_t kItems = (uint64_t(1) << Team::kItemBits) - 1;

  int64_t size_of(int64_t left, int64_t piece) const {
    const int64_t size = left / (2 * team_.size_) / piece * piece;
    return size >= piece ? size : piece < left ? piece : left;
  }

  void end(uint64_t phase) {
    team_.done_.store(0, std::memory_order_relaxed);
    team_.next_.store((phase + 1) << Team::kItemBits, std::memory_order_release);
  }

  void pass(uint64_t phase) {  // there was nothing to do; the first to say so ends it
    uint64_t untouched = phase << Team::kItemBits;
    team_.next_.compare_exchange_strong(untouched, (phase + 1) << Team::kItemBits);
  }

  void wait(uint64_t phase) {
    for (int spins = 0; team_.next_.load(std::memory_order_acquire) >> Team::kItemBits == phase; ++spins)
      if (spins < Team::kSpins) relax();
      else sched_yield();
  }

  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  Team& team_;
  uint64_t phase_ = 0;
};

template <class Body>
void Team::run(int threads, Body body) {
  Team team(threads);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
  body(Member(team));
}
