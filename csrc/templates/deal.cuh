// Tasks of equally many stages, dealt out to workers.
//
//     tasks in order   0 1 2 3 4 5 6 7 8 9
//     worker 0         0     3     6     9...            whole tasks go round, while there is one for each worker;
//     worker 1           1     4     7     ...9...       the stages of those left over, one after the other, are cut
//     worker 2             2     5     8         ...9    evenly
//
// The order is that of patches of row blocks, so that what workers read at the same time fits into the last cache.
// Plain arithmetic that compiles for the host too, so that the tests can walk all workers without a GPU.
#pragma once
#include <cstdint>

#include "cut.cuh"

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
  // Stages of the worker that has the most.
  LOWBIT_HOST_DEVICE constexpr int longest() const { return rounds * stages + cut.each + (cut.more > 0); }
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

// Stages begin .. end - 1 of a task; place: 0 for the first part that a worker has of tasks left over, 1 for the
// second.
struct Part {
  int task, begin, end, place;
};

// What a worker has, one part after the other. Why all is found at once, without a branch: after one the compiler no
// longer knows that a warp goes one way.
struct Parts {
  int count;              // parts
  int stages;             // of all of them
  int rounds, apart;      // whole tasks, `apart` after each other
  int whole;              // stages of those
  int first, left_first;  // task of the first of them, and of the first part of those left over
  int begin, end[2];      // of the two parts of those

  LOWBIT_HOST_DEVICE inline Parts(const Deal& deal, int worker) {
    const int from = worker < deal.sharers ? deal.cut(worker) : 0;
    const int all = worker < deal.sharers ? deal.cut(worker + 1) - from : 0,
              own = quotient(from, deal.stages, deal.inverse);
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

// A task: a block of rows of W and a tile of tokens.
struct Spot {
  int row_block, token_tile;
};

constexpr int kPatch = 8;  // row blocks side by side

LOWBIT_HOST_DEVICE constexpr Spot spot_of(int task, int row_blocks, int token_tiles) {
  if (token_tiles == 1) return {task, 0};
  const int patch = task / (kPatch * token_tiles), first = patch * kPatch, within = task - first * token_tiles;
  const int rows = row_blocks - first < kPatch ? row_blocks - first : kPatch;
  return {first + within % rows, within / rows};
}

// The stages of a worker, one after the other: which of its task, and where that lies in W and x. Why kept: divisions
// for every stage would be on the way to the first ones. Problem: deal, row_blocks, token_tiles, tile_tokens.
struct Cursor {
  int turn = 0, stage, end, row_block, token;

  template <class Problem>
  LOWBIT_HOST_DEVICE inline Cursor(const Problem& p, int worker) {
    begin_part(p, Parts(p.deal, worker));
  }

  // Past the last one nothing changes but the stage.
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
    const Spot spot = spot_of(part.task, p.row_blocks, p.token_tiles);
    stage = part.begin, end = part.end, row_block = spot.row_block, token = spot.token_tile * p.tile_tokens;
  }
};

}  // namespace lowbit
