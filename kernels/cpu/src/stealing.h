// Units of work taken one by one, because two cores are seldom equally fast: whoever is done first takes the next.
//
//   for (Units mine(team, n); mine.now < n; mine.advance()) work(mine.now);      mine.next is what follows, ≥ n: nothing
//
// A unit is taken one ahead of its work, so that its memory can be asked for meanwhile. Thread r begins with unit r.
// A counter is never set back: every thread knows how far all its uses will have moved it (n each), so it serves again without a
// barrier. A team has eight; a barrier must lie within any eight uses, and every thread must use them in the same order.
#pragma once
#include "team.h"

class Units {
   public:
    int64_t now, next;

    Units(Team& team, int64_t n)
        : n_(n), counter_(team.shared->counters[team.turn % TeamShared::COUNTERS].value),
          base_(team.taken[team.turn % TeamShared::COUNTERS]), size_(team.size) {
        team.taken[team.turn % TeamShared::COUNTERS] += n;
        ++team.turn;
        now = team.rank;
        next = take(now);
    }

    void advance() {
        now = next;
        next = take(now);
    }

   private:
    int64_t n_;
    std::atomic<int64_t>& counter_;
    int64_t base_;
    int size_;

    // Nothing follows nothing: each thread that got a unit is told once that none is left. That makes n takes in all.
    int64_t take(int64_t last) {
        if (last >= n_) return last;
        return size_ + counter_.fetch_add(1, std::memory_order_relaxed) - base_;
    }
};
