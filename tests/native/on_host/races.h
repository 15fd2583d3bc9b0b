// Which reads and writes of shared memory no barrier puts in order: vector clocks, as FastTrack has them (Flanagan and
// Freund, 2009). A race is found in whatever order threads happened to run.
//
// Actors are threads, and engines, which work for them: one of each barrier for copies that it counts, one of each warp
// for products, a thread's own for cp.async. What an engine does begins when it is asked and is known to those who
// waited for it.
//
// The copy engine of boxes writes what was read only when that was told after the reader ended its reads (end_reads),
// or began products with what it had read (wgmma): other loads may still be under way then, whatever a barrier says.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace emulated {

// How much of what each actor did is known; behind, of each thread, how much of what it read has ended.
using Clock = std::vector<uint32_t>;
inline void learn(Clock& own, const Clock& other) {
  for (size_t i = 0; i < other.size(); ++i) own[i] = std::max(own[i], other[i]);
}

struct Access {
  uint32_t actor, count;
};

// 4 bytes of shared memory: the last write, and all reads since then.
struct Cell {
  Access written{0, 0};
  std::vector<Access> read;
};

struct Races {
  std::vector<Clock> known;           // by thread
  std::vector<uint32_t> engine;       // by actor: what an engine has done
  std::vector<std::vector<Cell>> of;  // of each block
  Clock nothing;
  int actors, threads;

  void begin(int own_threads, int engines, int blocks, int bytes) {
    threads = own_threads, actors = threads + engines;
    nothing.assign(actors + threads, 0);
    known.assign(threads, nothing);
    for (int i = 0; i < threads; ++i) known[i][i] = 1;
    engine = nothing;
    of.resize(blocks);
    for (auto& cells : of) cells.assign(bytes / 4, {});
  }

  bool knows(int thread, const Access& act) const { return act.count <= known[thread][act.actor]; }

  // actor: the thread itself, or an engine that it asked.
  Access next(int thread, uint32_t actor) {
    return {actor, actor == static_cast<uint32_t>(thread) ? known[thread][thread] : ++engine[actor]};
  }

  // Whether it races with a write.
  bool reads(int thread, int block, uint32_t at, uint32_t bytes, uint32_t actor) {
    bool race = false;
    const Access own = next(thread, actor);
    for (uint32_t i = at / 4; i < (at + bytes + 3) / 4; ++i) {
      Cell& cell = of[block][i];
      race |= !knows(thread, cell.written);
      if (cell.read.empty() || cell.read.back().actor != own.actor || cell.read.back().count != own.count)
        cell.read.push_back(own);
    }
    return race;
  }

  // Whether it races with a read or write.
  bool writes(int thread, int block, uint32_t at, uint32_t bytes, uint32_t actor) {
    bool race = false;
    const Access own = next(thread, actor);
    for (uint32_t i = at / 4; i < (at + bytes + 3) / 4; ++i) {
      Cell& cell = of[block][i];
      race |= !knows(thread, cell.written);
      for (const Access& read : cell.read) race |= !knows(thread, read);
      cell.read.clear();
      cell.written = own;
    }
    return race;
  }

  // Whether a box that a thread asks for would lie over what may still be read.
  bool covers(int thread, int block, uint32_t at, uint32_t bytes) const {
    bool race = false;
    for (uint32_t i = at / 4; i < (at + bytes + 3) / 4; ++i)
      for (const Access& read : of[block][i].read)
        race |= read.actor < static_cast<uint32_t>(threads) && read.count > known[thread][actors + read.actor];
    return race;
  }

  // All reads that a thread knows of have ended, its own up to now.
  void end_reads(int thread) {
    Clock& own = known[thread];
    for (int i = 0; i < threads; ++i) own[actors + i] = std::max(own[actors + i], own[i]);
    ++own[thread];
  }

  // What a thread did up to now is part of `told`; what it does later is not.
  void tell(int thread, Clock& told) {
    if (told.empty()) told = nothing;
    learn(told, known[thread]);
    ++known[thread][thread];
  }
};

inline Races races;

}  // namespace emulated
