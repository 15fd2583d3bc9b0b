// Tasks of equally many stages, dealt out to workers.
//
//     tasks in order   0 1 2 3 4 5 6 7 8 9
//     worker 0         0     3     6     9...            whole tasks go round, while there is one for each worker;
//     worker 1           1     4     7     ...9...       the stages of those left over, one after the other, are cut
//     worker 2             2     5     8         ...9    evenly
//
// Or the blocks of a cluster have equal parts of such a task, and their sums meet in shared memory:
//
//     tasks in order   0 1 2 3 4 5 6 7 8 9
//     cluster 0        0 1     4 5     8 8
//     cluster 1            2 3     6 7     9 9
//
// The order is that of patches (patches.cuh). Plain arithmetic that compiles for the host too, so that the tests can
// walk all workers without a GPU.
#pragma once
#include <cstdint>

#include "cut.cuh"
#include "patches.cuh"

namespace lowbit {

// How many of at most `most` workers share the stages of fewer tasks than that. If `even`, shares may be longer so as
// to end where tasks do: a little where parts stay, but fewer; by a quarter and six stages where none are left. Why so
// much: parts cost what some six stages take, and a device at its limit of power is as fast with a fifth of its workers
// idle.
LOWBIT_HOST_DEVICE constexpr int sharers_of(int tasks, int stages, int most, bool even) {
  const int all = tasks * stages, longest = (all + most - 1) / most;
  if (even) {
    const int fitting = tasks * (most / tasks);
    const int64_t each = (all + fitting - 1) / fitting;
    const bool whole = fitting == tasks;
    if (whole ? each * 4 <= int64_t{longest} * 5 + 24 : each * 20 <= int64_t{longest} * 21 + 20)
      return fitting < all ? fitting : all;
  }
  return (all + longest - 1) / longest;
}

// So many stages from one on.
struct Share {
  int begin, count;
};

struct Deal {
  int tasks, stages;  // stages: of a task
  int workers;
  int rounds;   // whole tasks of every worker
  int sharers;  // workers that have parts of the tasks left over, the first ones
  Cut cut;      // stages of those tasks over them: `stages` at most
  uint32_t inverse = inverse_of(stages);

  LOWBIT_HOST_DEVICE constexpr int left() const { return tasks - rounds * workers; }
  // Whether any task has two parts.
  LOWBIT_HOST_DEVICE constexpr bool in_parts() const { return left() > 0 && (cut.each != stages || cut.more != 0); }
  // What sharer i has of the stages of tasks left over.
  LOWBIT_HOST_DEVICE inline Share share_of(int i) const { return {cut(i), cut.length(i)}; }
  // Stages of the worker that has the most.
  LOWBIT_HOST_DEVICE constexpr int longest() const { return rounds * stages + cut.each + (cut.more > 0); }
};

// The same where the workers of a cluster may have each task left over together; `cut` is then of one of these. Why
// apart: kernels whose sums never meet have no register for it.
struct MeetingDeal : Deal {
  int meet = 1;  // workers of a cluster; 1: sums do not meet
  uint32_t inverse_meet = inverse_of(meet);

  // Whether sums of any task are added up by another kernel.
  LOWBIT_HOST_DEVICE constexpr bool in_parts() const { return meet == 1 && Deal::in_parts(); }
  // Blocks of a worker, each with rows of its own: `most` unless blocks share K instead.
  LOWBIT_HOST_DEVICE constexpr int blocks_of(int most) const { return meet > 1 ? 1 : most; }
  LOWBIT_HOST_DEVICE inline Share share_of(int i) const {
    const int cluster = meet > 1 ? quotient(i, meet, inverse_meet) : 0, within = i - cluster * meet;
    return {cluster * stages + cut(within), cut.length(within)};
  }
};

// tasks, stages, most: at least 1; `even` as in sharers_of.
LOWBIT_HOST_DEVICE constexpr Deal deal(int tasks, int stages, int most, bool even) {
  Deal made{tasks, stages, most, tasks / most, 0, {0, 0}};
  const int left = made.left(), all = left * stages;
  if (left > 0) {
    made.sharers = sharers_of(left, stages, most, even);
    made.cut = {all / made.sharers, all % made.sharers};
  }
  if (made.rounds == 0) made.workers = made.sharers;
  return made;
}

// The same by clusters of `meet` blocks, of which so many run at once; no workers where more tasks are left over.
LOWBIT_HOST_DEVICE constexpr MeetingDeal deal_to_clusters(int tasks, int stages, int clusters, int meet) {
  const int most = clusters * meet, rounds = most > 0 ? tasks / most : 0, left = tasks - rounds * most;
  if (clusters < 1 || left > clusters || stages < meet) return {{tasks, stages, 0, 0, 0, {0, 0}}};
  MeetingDeal made{{tasks, stages, rounds ? most : left * meet, rounds, left * meet, {0, 0}}, meet};
  if (left > 0) made.cut = {stages / meet, stages % meet};
  return made;
}

constexpr int kMostMeet = 4;  // blocks of a cluster whose sums meet
// How many times 128 k more the busiest block may have, so that sums meet. Measured on an H200, 15 shapes, tiles of 32
// to 128 tokens: it is 3 to 9 times 128 k for which both take as long (docs/notes/gemm-sm90-versions.md, version 77).
constexpr int kMeetSaves = 5;

struct MostClusters {
  int of[kMostMeet + 1];  // [blocks of each]: how many run at once
};

// Tasks dealt out to blocks, or to clusters of at most `most_meet` blocks where the busiest block has no more than
// `allowance` stages more by that: what sums that meet save, a second kernel and the wait for it.
LOWBIT_HOST_DEVICE constexpr MeetingDeal best_deal(int tasks, int stages, const MostClusters& most, int most_meet,
                                                   int allowance) {
  MeetingDeal best{deal(tasks, stages, most.of[1], true)};
  if (!best.in_parts()) return best;
  int longest = best.longest() + allowance;
  for (int meet = 2; meet <= most_meet; ++meet) {
    const MeetingDeal other = deal_to_clusters(tasks, stages, most.of[meet], meet);
    if (other.workers > 0 && other.left() > 0 && other.longest() <= longest)
      best = other, longest = other.longest() - 1;
  }
  return best;
}

// Stages of 256 tokens that a second kernel costs, and sums that meet. Measured on an H200, int4 at 256 rows (version
// 81): 8192 x 8192 by pairs 57.4 us, by blocks that share K 55.9, both 32 stages; 7168 x 8192 28 stages by pairs 53.9,
// 32 by blocks 55.1; 8192 x 28672 112 both, 178.1 and 175.7. On an H100 (version 86): 4608 x 3584 8 stages by pairs
// 22.1, 10 by three blocks 20.4; 3584 x 14336 24 by pairs 44.1, 28 by four 45.3.
constexpr int kPairPartsCost = 6, kPairMeetCost = 3;

// Of a tile whose two blocks of a cluster share x, each with rows of its own (`pairs`: tasks of both); or blocks of a
// cluster share the stages of one block's rows (`rows`: tasks of those).
LOWBIT_HOST_DEVICE constexpr MeetingDeal best_deal_of_pairs(int pairs, int rows, int stages, const MostClusters& most,
                                                            int most_meet) {
  MeetingDeal best{deal(pairs, stages, most.of[2], true)};
  int longest = best.longest() + (best.in_parts() ? kPairPartsCost : 0) - kPairMeetCost;
  for (int meet = 2; meet <= most_meet; ++meet) {
    const MeetingDeal other = deal_to_clusters(rows, stages, most.of[meet], meet);
    if (other.workers > 0 && other.left() > 0 && other.longest() < longest) best = other, longest = other.longest();
  }
  return best;
}

// Stages begin .. end - 1 of a task; place: 0 for the first part that a worker has of tasks left over, 1 for the
// second.
struct Part {
  int task, begin, end, place;
};

// What a worker has, one part after the other. Why all is found at once, without a branch: after one the compiler no
// longer knows that a warp goes one way. It stands before a kernel's first stage, where an instruction takes some five
// cycles.
struct Parts {
  int count;              // parts
  int stages;             // of all of them
  int rounds, apart;      // whole tasks, `apart` after each other
  int whole;              // stages of those
  int first, left_first;  // task of the first of them, and of the first part of those left over
  int begin, end[2];      // of the two parts of those

  // deal: a Deal, or a MeetingDeal.
  template <class AnyDeal>
  LOWBIT_HOST_DEVICE inline Parts(const AnyDeal& deal, int worker) {
    const Share share = deal.share_of(worker);
    const int from = worker < deal.sharers ? share.begin : 0, all = worker < deal.sharers ? share.count : 0;
    const int own = quotient(from, deal.stages, deal.inverse);
    rounds = deal.rounds, apart = deal.workers, whole = deal.stages;
    first = worker, left_first = deal.rounds * deal.workers + own;
    begin = from - own * deal.stages;
    end[0] = begin + all < whole ? begin + all : whole;
    end[1] = all - (end[0] - begin);
    count = rounds + (all > 0) + (end[1] > 0);
    stages = rounds * whole + all;
  }

  // Part `turn` of `count`.
  LOWBIT_HOST_DEVICE inline Part operator[](int turn) const {
    const int i = turn - rounds;
    return {i < 0 ? first + turn * apart : left_first + i, i == 0 ? begin : 0,
            i < 0    ? whole
            : i == 0 ? end[0]
                     : end[1],
            i > 0};
  }
};

// The stages of a worker, one after the other: which of its task, and where that lies in W and x. Why kept: divisions
// for every stage would be on the way to the first ones. Problem: deal, patches, tile_tokens.
struct Cursor {
  int turn = 0, stage, end, row_block, token;

  template <class Problem>
  LOWBIT_HOST_DEVICE inline Cursor(const Problem& p, const Parts& parts) {
    begin_part(p, parts);
  }

  // Past the last one nothing changes but the stage.
  template <class Problem>
  LOWBIT_HOST_DEVICE inline void next(const Problem& p, const Parts& parts) {
    if (++stage < end) return;
    if (++turn < parts.count) begin_part(p, parts);
  }
  // The same where there are no registers for the parts: they are found again.
  template <class Problem>
  LOWBIT_HOST_DEVICE inline void next(const Problem& p, int worker) {
    if (++stage < end) return;
    const Parts parts(p.deal, worker);
    if (++turn < parts.count) begin_part(p, parts);
  }

 private:
  template <class Problem>
  LOWBIT_HOST_DEVICE inline void begin_part(const Problem& p, const Parts& parts) {
    const Part part = parts[turn];
    const Spot spot = p.patches(part.task);
    stage = part.begin, end = part.end, row_block = spot.row_block, token = spot.token_tile * p.tile_tokens;
  }
};

}  // namespace lowbit
