// Threads that go through many short phases together: one parallel region, work handed out piece by piece, a barrier
// of our own after each phase.
//
// Decoding one token takes about a hundred phases of ten microseconds. OpenMP's barrier may put a thread to sleep, or
// spin while another program wants the core; ours spins for some microseconds and then yields. Which thread computes a
// piece is left to chance, what is computed for it is not: results do not depend on the number of threads.
#pragma once
#include <atomic>
#include <cstdint>
#if defined(_OPENMP)
#include <omp.h>
#endif
#include <sched.h>

class Team {
 public:
  // body(member) on up to `threads` threads.
  template <class Body>
  static void run(int threads, Body body);

 private:
  friend class Member;
  static constexpr int kSpins = 1000;
  int size_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> finished_{0};  // phases
  alignas(64) std::atomic<int64_t> next_[2] = {{0}, {0}};  // next piece, of this phase and of the one to come
};

// One thread's view of the team.
class Member {
 public:
  explicit Member(Team& team) : team_(team) {}
  int team_size() const { return team_.size_; }

  // run(begin, end) for pieces of [0, items), at most `piece` long; every thread calls this, and none returns before
  // all is done.
  template <class Run>
  void share(int64_t items, int64_t piece, Run run) {
    if (team_.size_ == 1) {
      if (items) run(int64_t(0), items);
      return;
    }
    std::atomic<int64_t>& next = team_.next_[phase_ & 1];
    for (int64_t begin; (begin = next.fetch_add(piece, std::memory_order_relaxed)) < items;)
      run(begin, begin + piece < items ? begin + piece : items);
    wait();
  }

 private:
  void wait() {
    const unsigned done = ++phase_;
    if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_.size_) {
      team_.arrived_.store(0, std::memory_order_relaxed);
      team_.next_[done & 1].store(0, std::memory_order_relaxed);  // nobody uses it since the barrier before
      team_.finished_.store(done, std::memory_order_release);
      return;
    }
    for (int spins = 0; team_.finished_.load(std::memory_order_acquire) != done; ++spins)
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
  unsigned phase_ = 0;
};

template <class Body>
void Team::run(int threads, Body body) {
  Team team;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp single
    team.size_ = omp_get_num_threads();
    body(Member(team));
  }
#else
  (void)threads;
  body(Member(team));
#endif
}
