// Where the sums of a pass meet: what every slice of K found for a tile comes to one block, which stores y.
//
// Tile i of row group r of a block belongs to the block of rank (r * pass_tiles + i) % cluster, which finds in its
// shared memory [owned tile][slice][item][float]: what lanes of a worker handed in (Worker::kItems, kFloats and spot).
// A thread adds up kOwn floats of every slice, and stores them. Barrier: where there are more blocks, one for even
// passes and one for odd.
#pragma once
#include "../epilogue.cuh"
#include "../ptx/async.cuh"
#include "../ptx/cluster.cuh"
#include "shape.cuh"

namespace lowbit::decode {

// Bytes of a tile's sums from one slice.
template <class Worker>
constexpr int kSumBytes = Worker::kItems * Worker::kFloats * 4;

// Of an item, that one thread adds up.
template <class Worker>
constexpr int kOwnFloats = Worker::kTokens < 4 ? 1 : Worker::kFloats;

template <class Act, class Worker, class Tile>
struct Meeting {
  static constexpr int kItems = Worker::kItems, kFloats = Worker::kFloats;
  // Floats that a thread adds up and stores, and how many such threads an item has. Why one: of few tokens one warp
  // does all of it, a chain of instructions. Why more of four tokens: each pass does it again, and there are threads
  // enough.
  static constexpr int kOwn = kOwnFloats<Worker>, kThreads = kFloats / kOwn;
  // Whether no registers are left.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr bool kFull = Worker::kBits == 6;
#else
  static constexpr bool kFull = Worker::kBits == 6 && Worker::kZeros;
#endif
  // Whether y of the first item is found while x is on its way. Why not of more tokens: registers.
  static constexpr bool kAims = Tile::kTokens == 1 && !kFull;
  // Whether it keeps what the problem says of it. Why not there: registers run out.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr bool kHolds = Worker::kBits > 1 || Tile::kTokens == 1;
#else
  static constexpr bool kHolds = Worker::kBits > 1 || Tile::kTokens == 1 || !Worker::kZeros;
#endif
  // Whether a lane finds where its first sums go before x is there.
  static constexpr bool kHandsEarly = Worker::kFolds && kHolds && !kFull;

  // Of an owned tile: where its sums from the first slice lie, from those of the pass on; tile: in pass 0.
  struct Item {
    int from, number, tile, end_tile;
  };

  // A pass: where its sums meet, the barrier that counts them, and which of its phases that waits for.
  struct Pass {
    int number;
    uint32_t sums, met, parity;
  };

  // What becomes of an item's sums, those that a thread stores: y = factor * sum + bias.
  struct Target {
    Act* to[kOwn];  // null: nothing
    float factor[kOwn], bias[kOwn];
  };

  const Position& at;
  const Problem& p;
  Pass pass;
  int cluster_shift, warps_k_shift, pass_tiles;
  int owned;                   // items of a pass, times the threads of each
  Item first;                  // this thread's
  ptx::PlaceInCluster handed;  // where this lane's sums of the first tiles go, if it keeps one tile's
  Target aimed;

  __device__ Meeting(const Position& position, uint32_t sums_at, uint32_t met_at)
      : at(position),
        p(at.p),
        pass{0, sums_at, met_at, 0},
        cluster_shift(p.cluster_shift),
        warps_k_shift(p.warps_k_shift),
        pass_tiles(p.pass_tiles) {
    const int slots = (Tile::kWarps >> warps_k_shift) * pass_tiles;
    owned = ((slots - at.rank + (1 << cluster_shift) - 1) >> cluster_shift) * (kItems * kThreads);
    if (!kHolds) return;
    first = find(threadIdx.x);
    ptx::hold(pass.sums), ptx::hold(pass.met), ptx::hold(cluster_shift), ptx::hold(warps_k_shift);
    ptx::hold(pass_tiles), ptx::hold(owned);
    ptx::hold(first.from), ptx::hold(first.number), ptx::hold(first.tile), ptx::hold(first.end_tile);
    if constexpr (kHandsEarly) {
      const auto kept = Worker::Fold::kept(at.lane);
      handed = place_for(kept.tile, kept.float_number);
      ptx::hold(handed.to), ptx::hold(handed.counts);
    }
  }

  // Where this thread's floats of an item begin.
  __device__ __forceinline__ int own_floats() const { return threadIdx.x % kThreads * kOwn; }

  // The item of thread i of those that have one.
  __device__ __forceinline__ Item find(int i) const {
    const float tiles = static_cast<float>(ptx::found_here(pass_tiles));
    const int own = i / (kItems * kThreads), number = i / kThreads % kItems, slot = (own << cluster_shift) + at.rank;
    const int group = static_cast<int>((static_cast<float>(slot) + 0.5f) * ptx::reciprocal(tiles));
    const int row_group = at.row_group(group);
    const int from = ((own << (cluster_shift + warps_k_shift)) * kItems + number) * (kFloats * 4);
    return {from + own_floats() * 4, number, p.row_groups(row_group) + slot - group * pass_tiles,
            p.row_groups(row_group + 1)};
  }

  // Why two places: one is read while the next is written. No block is two passes ahead of another: to pass a meeting
  // it needs what each of them handed in after it had read the one before. Where there are more passes than one, every
  // block owns a tile of each (sharing.cuh).
  __device__ __forceinline__ void next_pass() {
    const bool was_odd = pass.number & 1;
    pass.sums += was_odd ? -p.meeting_bytes : p.meeting_bytes;
    pass.met += was_odd ? -8 : 8;
    pass.parity ^= was_odd;
    ++pass.number;
  }

  // Tells the barrier of a cluster what will come; before this block hands in anything for the pass.
  __device__ __forceinline__ void expect() const {
    if (cluster_shift && threadIdx.x == 0)
      ptx::barrier_expect(pass.met, ptx::found_here(owned) * (kOwn * 4) << (cluster_shift + warps_k_shift));
  }

  // Where floats of row tile i of the pass go, from this number on.
  __device__ __forceinline__ ptx::PlaceInCluster place_for(int i, int float_number) const {
    const int blocks = ptx::found_here(cluster_shift), slot = (at.warp >> warps_k_shift) * pass_tiles + i;
    const int own = ((slot >> blocks) << (blocks + warps_k_shift)) + at.slice;
    const uint32_t to = pass.sums + own * kSumBytes<Worker> + float_number * 4;
    if (blocks) return ptx::place_in_cluster(to, pass.met, slot & ((1 << blocks) - 1));
    return {to, 0};
  }

  // A warp's sums of the row tiles side by side of which the first is tile i of the pass; every warp hands in something
  // for every i, so that owners know what to wait for.
  __device__ __forceinline__ void hand_in(const Worker& worker, int i) const {
    worker.hand_in([&](int r, int float_number, const auto& values) {
      ptx::PlaceInCluster place = handed;
      if (!kHandsEarly || i || pass.number) place = place_for(i + r, float_number);
      if (cluster_shift) {
        ptx::store_behind(place, 0, values);
      } else {
        ptx::store_shared(place.to, values);
      }
    });
  }

  __device__ __forceinline__ Target aim(const Item& item) const {
    Target target;
    const int tile = item.tile + pass.number * pass_tiles, m = Tile::kTokens == 1 ? 1 : p.m;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const auto spot = Worker::spot(ptx::found_here(item.number), own_floats() + j);
      const int n = tile * 16 + spot.row;
      target.to[j] = nullptr;
      if (tile >= item.end_tile || n >= p.n || spot.token >= m) continue;
      target.to[j] = static_cast<Act*>(p.y) + (Tile::kTokens == 1 ? n : spot.token * p.y_stride + n);
      target.factor[j] = row_factor(p, n, p.step * Worker::unit(spot.row));
      target.bias[j] = p.bias ? load_bias(p.bias, p.bias_type, n) : 0.0f;
    }
    return target;
  }

  // Of pass 0, kAims; after the kernel before, which may have written biases and factors.
  __device__ __forceinline__ void aim_first() {
    if (!kAims) return;
    aimed = aim(first);
    uint64_t to = reinterpret_cast<uint64_t>(aimed.to[0]);
    ptx::hold(to), ptx::hold(aimed.factor[0]), ptx::hold(aimed.bias[0]);
    aimed.to[0] = reinterpret_cast<Act*>(to);
  }

  // Adds what kSlices slices found.
  template <int kSlices>
  static __device__ __forceinline__ void add_up(uint32_t from, float (&value)[kOwn]) {
    float more[kSlices][kOwn];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      if constexpr (kOwn == 1) {
        more[s][0] = __uint_as_float(ptx::load_shared(from + s * kSumBytes<Worker>));
      } else {
        ptx::load_shared(from + s * kSumBytes<Worker>, more[s]);
      }
    }
    // Why by pairs: sixteen additions one after the other take 64 cycles.
#pragma unroll
    for (int apart = 1; apart < kSlices; apart *= 2)
#pragma unroll
      for (int s = 0; s < kSlices; s += 2 * apart)
#pragma unroll
        for (int j = 0; j < kOwn; ++j) more[s][j] += more[s + apart][j];
#pragma unroll
    for (int j = 0; j < kOwn; ++j) value[j] += more[0][j];
  }

  // Waits for all that was handed in, and stores this block's tiles of the pass.
  __device__ __forceinline__ void finish() const {
    // Why before the wait: numbers are found, and biases brought, while sums are on their way.
    Item item = kHolds ? first : find(threadIdx.x);
    Target target = kAims && pass.number == 0 ? aimed : aim(item);
    if (cluster_shift) {
      ptx::barrier_wait(pass.met, pass.parity);
    } else {
      __syncthreads();
    }
    const int slices = 1 << ptx::found_here(cluster_shift + warps_k_shift);
#pragma unroll 1
    for (int i = threadIdx.x; i < owned;) {
      float value[kOwn] = {};
      const uint32_t from = pass.sums + item.from;
      if (kOwn == 1 && slices == 16) {
        add_up<16>(from, value);
      } else if (slices >= 8) {
#pragma unroll 1
        for (int s = 0; s < slices; s += 8) add_up<8>(from + s * kSumBytes<Worker>, value);
      } else if (slices == 4) {
        add_up<4>(from, value);
      } else {
#pragma unroll 1
        for (int s = 0; s < slices; ++s) add_up<1>(from + s * kSumBytes<Worker>, value);
      }
#pragma unroll
      for (int j = 0; j < kOwn; ++j)
        if (target.to[j]) *target.to[j] = static_cast<Act>(fmaf(value[j], target.factor[j], target.bias[j]));
      i += Tile::kThreads;
      if (i >= owned) break;
      item = find(i);
      target = aim(item);
    }
  }

  __device__ __forceinline__ bool is_last() const { return (pass.number + 1) * pass_tiles >= p.most_tiles; }
};

}  // namespace lowbit::decode
