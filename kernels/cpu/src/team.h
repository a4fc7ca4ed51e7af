// The threads that run ops together: one OpenMP region, many ops, spin barriers between them.
//
//   together(threads, [&](Team& team) { norm(team, …); team.barrier(); linear(team, …); });
//
// An op is a *body* in a header: every thread of the team calls it with the same arguments and does its share. A body has no
// barrier at its end: its caller knows whether what follows reads what others wrote.
// A barrier spins, because two threads meet a few hundred times in a step of some milliseconds; after a while it yields, because
// other workers may want the core that it spins on.
#pragma once
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

#define DT_API extern "C" __attribute__((visibility("default")))

struct Range {
    int64_t begin, end;
};

// What a team's threads share. Counters lie on lines of their own; what they mean is said in stealing.h.
struct TeamShared {
    static constexpr int COUNTERS = 8;
    alignas(64) std::atomic<int32_t> arrived{0};
    alignas(64) std::atomic<int32_t> generation{0};
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    } counters[COUNTERS];
};

struct Team {
    int rank, size;
    TeamShared* shared;
    // Of the counters' use, the same in every thread: see stealing.h.
    int64_t turn = 0;
    int64_t taken[TeamShared::COUNTERS] = {};

    // Whatever any thread wrote before, all see after.
    void barrier() {
        if (size == 1) return;
        const int32_t mine = shared->generation.load(std::memory_order_acquire);
        if (shared->arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            shared->arrived.store(0, std::memory_order_relaxed);
            shared->generation.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int turns = 0; shared->generation.load(std::memory_order_acquire) == mine; ++turns) {
            if (turns < SPINS)
                _mm_pause();
            else
                sched_yield();
        }
    }

   private:
    // About 50 µs.
    static constexpr int SPINS = 2000;
};

// A thread's share of n things dealt out in multiples of `unit`, in order; may be empty.
inline Range share(const Team& team, int64_t n, int64_t unit) {
    const int64_t units = (n + unit - 1) / unit;
    const int64_t begin = units * team.rank / team.size * unit, end = units * (team.rank + 1) / team.size * unit;
    return {begin < n ? begin : n, end < n ? end : n};
}

// Runs body(team) on `threads` threads, on fewer where OpenMP has fewer.
template <class Body>
void together(int threads, const Body& body) {
    TeamShared shared;
#pragma omp parallel num_threads(threads)
    {
        Team team{omp_get_thread_num(), omp_get_num_threads(), &shared};
        body(team);
    }
}
