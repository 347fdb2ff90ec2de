// Threads that share the work of a step.
//
// A step is a list of phases, and a phase a number of tasks.  Each thread takes tasks until none is left, those of its
// own share first, and goes on when all tasks of the phase are done, whoever did them.  So a thread that wakes up late,
// or that another process has put aside between two tasks, keeps nobody waiting.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace minivllm {

static inline void relax() { __builtin_ia32_pause(); }

static inline void sleep_on(std::atomic<int32_t>& word, int32_t value) {
  syscall(SYS_futex, (int32_t*)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

static inline void wake_all(std::atomic<int32_t>& word) {
  syscall(SYS_futex, (int32_t*)&word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

// Between two steps a thread looks for the next one, offers its processor to others in between, and sleeps after about
// a millisecond: to be woken takes as long as the layers of a small model.
constexpr int SPINS = 400;
constexpr int OFFERS = 2000;
constexpr int YIELDS_AFTER = 2000;  // looks at a phase that others compute before the processor is offered to them

class Team {
 public:
  // as many threads as the system gives: all tasks are done with fewer too
  explicit Team(int threads) {
    workers_.reserve(threads);
    try {
      for (int t = 1; t < threads; t++) workers_.emplace_back([this, t] { work(t); });
    } catch (const std::system_error&) {
    }
    count_ = 1 + int(workers_.size());
  }

  ~Team() {
    end_.store(true);
    generation_.fetch_add(1);
    wake_all(generation_);
    for (auto& worker : workers_) worker.join();
  }

  int count() const { return count_; }

  // run(phase, task, thread) for the tasks of all phases in order; tasks(phase): how many there are
  void run(int phases, const std::function<int(int)>& tasks, const std::function<void(int, int, int)>& run) {
    if (workers_.empty()) {
      for (int p = 0; p < phases; p++)
        for (int i = 0, n = tasks(p); i < n; i++) run(p, i, 0);
      return;
    }
    // who woke up late for the last step leaves first; its processor may have been given to another process
    for (int looks = 0; inside_.load(); looks++) {
      if (looks < YIELDS_AFTER)
        relax();
      else
        sched_yield();
    }
    if (size_t(phases) > states_.size()) {
      std::vector<Phase> grown(phases);
      states_.swap(grown);
      for (auto& s : states_) s.next.reset(new Counter[count_]);
    }
    for (int p = 0; p < phases; p++) {
      states_[p].total = tasks(p);
      states_[p].done.value.store(0, std::memory_order_relaxed);
      for (int t = 0; t < count_; t++) states_[p].next[t].value.store(0, std::memory_order_relaxed);
    }
    phases_ = phases;
    run_ = &run;
    open_.store(true);
    generation_.fetch_add(1);
    if (asleep_.load()) wake_all(generation_);
    go(0);
    open_.store(false);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int32_t> value{0};
  };
  struct Phase {
    int total = 0;
    Counter done;
    std::unique_ptr<Counter[]> next;  // of the share of each thread
  };

  void go(int me) {
    for (int p = 0; p < phases_; p++) {
      Phase& phase = states_[p];
      const int n = phase.total;
      int did = 0;
      for (int o = 0; o < count_; o++) {
        const int whose = (me + o) % count_;
        const int from = int(int64_t(n) * whose / count_), to = int(int64_t(n) * (whose + 1) / count_);
        while (from < to) {
          const int task = from + phase.next[whose].value.fetch_add(1, std::memory_order_relaxed);
          if (task >= to) break;
          (*run_)(p, task, me);
          did++;
        }
      }
      if (did) phase.done.value.fetch_add(did, std::memory_order_acq_rel);
      for (int looks = 0; phase.done.value.load(std::memory_order_acquire) < n; looks++) {
        if (looks < YIELDS_AFTER)
          relax();
        else
          sched_yield();
      }
    }
  }

  void work(int me) {
    int32_t seen = 0;
    for (;;) {
      for (int looks = 0; generation_.load(std::memory_order_acquire) == seen; looks++) {
        if (looks < SPINS) {
          relax();
          continue;
        }
        if (looks < SPINS + OFFERS) {
          sched_yield();
          continue;
        }
        asleep_.fetch_add(1);
        sleep_on(generation_, seen);
        asleep_.fetch_sub(1);
      }
      seen = generation_.load(std::memory_order_acquire);
      if (end_.load()) return;
      inside_.fetch_add(1);
      if (open_.load()) go(me);
      inside_.fetch_sub(1);
    }
  }

  int count_ = 1;  // workers read it in a step, so after it was set
  std::vector<std::thread> workers_;
  std::vector<Phase> states_;
  int phases_ = 0;
  const std::function<void(int, int, int)>* run_ = nullptr;
  std::atomic<int32_t> generation_{0}, inside_{0}, asleep_{0};
  std::atomic<bool> open_{false}, end_{false};
};

}  // namespace minivllm
