// Tiles of 144 to 208 tokens, and of 256, of which two blocks of a cluster have 128 rows each and share x: each brings
// half of it to both. Or they share K of the same 128 rows, and their sums meet, where that needs no second kernel
// (deal.cuh). Of 256 tokens those are multiplied that are there, by 160, 192, 224 or 256 columns (columns.cuh).
//
// In a block two warpgroups multiply 64 rows each by wgmma, in turns; one thread brings codes and scales, 128 k
// at a time, and x, 64 k at a time, to two rings: a place of x is free again as soon as its products are done.
#pragma once
#include "../dequant/codebook.cuh"
#include "../dequant/fused.cuh"
#include "../dequant/load.cuh"
#include "../ptx/async.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "helpers.cuh"
#include "lines.cuh"
#include "meeting.cuh"
#include "parts.cuh"
#include "shape.cuh"
#include "warpgroup.cuh"

namespace lowbit::gemm_sm90 {

constexpr int kLargeThreads = 384;                          // two warpgroups multiply, a warp of the third brings
constexpr int kGivenRegisters = 40, kTakenRegisters = 232;  // of 168

// Where things lie in shared memory, from the first multiple of 1024.
template <class Weight, class Tile, class Form>
struct LargeMap {
  using Stage = gemm_sm90::Stage<Weight, Tile, Form>;
  static_assert(Stage::kSteps == 1);
  static constexpr int kXBytes = Stage::kXBox;  // 64 k
  static constexpr int kWBytes = (Stage::kCodes + Stage::kScales * (Stage::kZeros ? 2 : 1) + 127) / 128 * 128;
  using Lines = gemm_sm90::Lines<Weight::kCodebook ? 1 : 2>;  // Why less: the table of a codebook takes their place
  static constexpr int kFixed = 1536;  // barriers, and what lies before the first multiple of 1024
  // Places of x beside so many of weights.
  static constexpr int x_depth(int of_weights) {
    return (kSharedTwoRings - kFixed - of_weights * kWBytes - Lines::kBytes - Stage::kTable) / kXBytes;
  }
  // Why five: with four of n256 products wait for x, with which both blocks must be done; 8192 x 8192, 4096 rows, W8
  // 888 us and 813, W7 894 and 856. A sixth gains nothing (docs/notes/gemm-sm90-versions.md, version 82).
  static constexpr int kWDepth = x_depth(3) >= 5 ? 3 : 2, kXDepth = x_depth(kWDepth);
  static constexpr int kW = kXDepth * kXBytes, kLines = kW + kWDepth * kWBytes;
  static constexpr int kWFull = kLines + Lines::kBytes, kWEmpty = kWFull + 8 * kWDepth;
  static constexpr int kXFull = kWEmpty + 8 * kWDepth, kXEmpty = kXFull + 8 * kXDepth;
  static constexpr int kMet = kXEmpty + 8 * kXDepth, kFree = kMet + 8;
  static constexpr int kTable = (kFree + 8 + 127) / 128 * 128;  // of a codebook
  // Where blocks of a cluster share a task, their sums meet where x was, when all warps of the others have told that
  // they are done with it (kFree). Why not beside x: there is no room for those of more than two blocks and 192 tokens.
  static_assert(meeting_room(Tile::kRowTiles, Tile::kColumns, Stage::kTogether, kMostMeet) <= kXDepth * kXBytes);
  static_assert(kXDepth >= 5 && kTable + Stage::kTable + 1024 <= kSharedTwoRings);
};

template <class Weight, class Act, class Tile, class Form>
struct Large {
  using Map = LargeMap<Weight, Tile, Form>;
  using Stage = typename Map::Stage;
  // As in Wide.
  static constexpr bool kExact = !Form::kFine && !kRoundsValues<Weight, Act, Tile, Form>;
  static constexpr bool kFused = kFuses<Weight, Act, Tile, Form>;
  using Decoder = std::conditional_t<kFused, FusedDecoder<Weight>, ScaledDecoder<Weight, Act, Form::kZeroForm, kExact>>;
  using Words = typename Decoder::Words;
  using Group = typename Decoder::Group;
  using Rows = LinesOfY<Act, Tile, typename Map::Lines, Problem>;
  static constexpr int kEarly = 2;  // steps of weights asked for before the kernel before has ended

  const PosedOf<Stage>& p;
  const uint32_t base;
  const int blocks, rank, worker;  // blocks: of a worker, with rows of their own; rank: of this one
  const Parts parts;

  __device__ Large(const PosedOf<Stage>& problem, uint32_t shared)
      : p(problem),
        base(shared),
        blocks(blocks_of<Tile>(p)),
        rank(blocks == 1 ? 0 : ptx::cluster_rank()),
        worker(Tile::kCluster == 1 ? blockIdx.x : blockIdx.x >> (blocks - 1)),
        parts(p.deal, worker) {}

  // ---- one thread brings everything --------------------------------------------------------------------------------
  __device__ __forceinline__ void bring_weights(const Cursor& at, int place) const {
    ask_for_rows<Stage, Tile>(p, at.stage, (at.row_block * blocks + rank) * Tile::kRowTiles,
                              base + Map::kW + place * Map::kWBytes, base + Map::kWFull + 8 * place, 0,
                              p.patches.token_tiles < kManyTiles ? ptx::kFirstOut : ptx::kLastOut);
  }

  __device__ __forceinline__ void bring_x(const Cursor& at, int half, int place) const {
    const uint32_t barrier = base + Map::kXFull + 8 * place;
    ptx::barrier_expect(barrier, p.tile_tokens * 128);
    if (blocks == 1) {
      ptx::copy_box(base + place * Map::kXBytes, p.maps[kMapOfX], (at.stage * 2 + half) * 64, at.token, barrier,
                    ptx::kLastOut);
      return;
    }
    const int own = rank * (p.tile_tokens / 2);
    ptx::copy_box_to_all(base + place * Map::kXBytes + own * 128, p.maps[kMapOfX], (at.stage * 2 + half) * 64,
                         at.token + own, barrier, 3, ptx::kLastOut);
  }

  // Before the kernel before has ended: weights alone.
  __device__ __forceinline__ void start() const {
    Cursor at(p, parts);
#pragma unroll 1
    for (int i = 0; i < min(kEarly, parts.stages); ++i) {
      bring_weights(at, i);
      at.next(p, parts);
    }
  }

  __device__ __forceinline__ void go_on() const {
    Cursor at(p, parts);
    narrow::Place w(Map::kWDepth), x(p.ring.depth);
    int asked = 0;  // places of x
#pragma unroll 1
    for (int i = 0; i < parts.stages; ++i) {
      if (i >= Map::kWDepth) ptx::wait_arrivals(base + Map::kWEmpty + 8 * w.index, w.parity ^ 1);
      if (i >= kEarly) bring_weights(at, w.index);
#pragma unroll
      for (int half = 0; half < 2; ++half, ++asked) {
        // Both blocks are done with it.
        if (asked >= p.ring.depth) ptx::wait_arrivals(base + Map::kXEmpty + 8 * x.index, x.parity ^ 1);
        bring_x(at, half, x.index);
        x.next();
      }
      at.next(p, parts);
      w.next();
    }
    // Why: the other block still arrives at these barriers, and a block that has left has none.
    const bool all = asked >= p.ring.depth;
    if (!all) x = narrow::Place(p.ring.depth);
#pragma unroll 1
    for (int i = 0; i < min(asked, p.ring.depth); ++i, x.next())
      ptx::wait_arrivals(base + Map::kXEmpty + 8 * x.index, all ? x.parity ^ 1 : 0);
  }

  // ---- warpgroups multiply -----------------------------------------------------------------------------------------
  __device__ __forceinline__ void run(int warp, int lane) const {
    const Decoder decoder =
        make_decoder<Weight, Decoder>(base + Map::kTable, lane, p.step, p.zero_base, p.zero_on_code);
    const LanePlaces<Stage> places(p, warp, lane);
    const Turns turns(warp);
    turns.begin();
    narrow::Place w(Map::kWDepth), x(p.ring.depth);
    uint32_t before[2] = {};  // places of x whose products may still run, by half
    // One lane for each block of a pair: what it brings goes to both.
    const uint32_t releases = lane + (Tile::kCluster == 1 || blocks > 1 ? 0 : ptx::cluster_rank());
    const auto release_x = [&](uint32_t place) {
      if constexpr (Tile::kCluster == 1) {
        if (lane == 0) ptx::arrive(base + Map::kXEmpty + 8 * place);
      } else {
        if (lane < blocks) ptx::arrive_in_cluster(base + Map::kXEmpty + 8 * place, releases);
      }
    };
#pragma unroll 1
    for (int turn = 0; turn < parts.count; ++turn) {
      const Part part = parts[turn];
      float sum[Tile::kTokens / 2] = {};
      Units units;
      uint32_t a[2][4][4];
#pragma unroll 1
      for (int at = part.begin; at < part.end; ++at) {
        ptx::wait_arrivals(base + Map::kWFull + 8 * w.index, w.parity);
        // Why both: a wait between two products would keep the compiler from running them side by side.
        uint32_t own[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::wait_arrivals(base + Map::kXFull + 8 * x.index, x.parity);
          own[half] = x.index;
          x.next();
        }
        const uint32_t codes = base + Map::kW + w.index * Map::kWBytes;
        Words words;
        load_words<Stage, Tile>(codes, 0, [&](int log) { return places.words[log]; }, words);
        Group group;
        float ratio[2];
        if constexpr (!Form::kFine) group = load_group<Stage>(p, decoder, codes + places.scales);
        if constexpr (kExact) units.move_on(group, ratio);
        const auto make_half = [&](int half) {
          Group found;  // of fragment lane / 8 of the half
          if constexpr (Form::kFine) {
            const int group = (half * 4 + lane / 8) >> p.group_fragments;
            found = load_own_group<Stage>(p, decoder, codes, warp, group, lane);
          }
#pragma unroll
          for (int f = 0; f < 4; ++f) {
            if constexpr (Form::kFine) group = Decoder::of_lane(found, f * 8 + lane / 4);
            decoder.fragment(words, half * 4 + f, group, a[half][f]);
          }
        };
        const auto multiply = [&](int half) {
          const uint64_t tokens = ptx::describe_tokens(base + own[half] * Map::kXBytes);
          with_columns<Tile>(p.tile_tokens, [&](auto columns) {
            ptx::begin_products();
            ptx::wgmma<Act, decltype(columns)::value>(sum, a[half], tokens);
            ptx::commit_products();
          });
          before[half] = own[half];
        };
        ptx::wait_products<1>();
        if (at > part.begin) release_x(before[0]);
        make_half(0);
        ptx::wait_products<0>();
        if (at > part.begin) release_x(before[1]);
        if constexpr (kExact) Units::scale(ratio, sum);
        turns.take();
        multiply(0);
        make_half(1);
        multiply(1);
        turns.give();
        __syncwarp();
        if (lane == 0) ptx::arrive(base + Map::kWEmpty + 8 * w.index);
        w.next();
      }
      // What of the end does not depend on products: they still run.
      const Spot spot = p.patches(part.task);
      const int row_tile = (spot.row_block * blocks + rank) * Tile::kRowTiles + warp / 4 * 4;
      Rows rows(p, base + Map::kLines, row_tile * 16, spot.token_tile * p.tile_tokens, warp, lane);
      ptx::wait_products<0>();
      const bool meet = p.deal.meet > 1 && part.end - part.begin < p.deal.stages;
      if (meet && lane < p.deal.meet && lane != static_cast<int>(ptx::cluster_rank()))
        ptx::arrive_in_cluster(base + Map::kFree, lane);
      release_x(before[0]), release_x(before[1]);
      float unit[2] = {1.0f, 1.0f};
      ptx::settle(sum);
      if constexpr (kFused) unit[0] = unit[1] = p.fused_unit;
      if constexpr (kExact) unit[0] = units.now[0] * decoder.factor(), unit[1] = units.now[1] * decoder.factor();
      finish(part, meet, rows, warp, lane, unit, sum);
    }
    turns.end();
  }

  // Stores y of a task, or of the columns that come to this block where its cluster shares the stages (`meet`); or
  // keeps sums of a part. unit: what sums of each row half are counted in.
  __device__ __forceinline__ void finish(const Part& part, bool meet, Rows& rows, int warp, int lane, float (&unit)[2],
                                         typename Meeting<Tile, Stage::kTogether>::Sums& sum) const {
    const auto sums = [&](int column, int i) { return sum[4 * column + i]; };
    uint32_t own = ~0u;
    if (part.end - part.begin < p.deal.stages) count_out(unit, sum);
    if (meet) {
      const Meeting<Tile, Stage::kTogether> meeting{base, base + Map::kMet, p.deal.meet, warp, lane};
      ptx::barrier_wait(base + Map::kFree, 0);
      meeting.hand_in(sum);
      own = meeting.add_up(sum);
    } else if (part.end - part.begin < p.deal.stages) {
      keep_part<Tile>(p, worker, part.place, rank, warp, lane, sums);
      return;
    }
    rows.count_in(unit);
    rows.store(sums, own);
  }
};

template <class Weight, class Act, class Tile, class Form, int Maps>
__global__ void __launch_bounds__(kLargeThreads, 1) multiply_large(const __grid_constant__ Posed<Maps> p) {
  // Elsewhere it is empty, and never launched (prepare). Without nvcc it is a CPU that plays the device (tests).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
  using Worker = Large<Weight, Act, Tile, Form>;
  using Map = typename Worker::Map;
  extern __shared__ uint8_t memory[];

  // ---- setup
  ptx::launch_dependents();
  // Why a shuffle: the compiler would find the address anew in every step.
  const uint32_t base = __shfl_sync(~0u, (ptx::shared_address(memory) + 1023) & ~1023u, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Worker work(p, base);
  if (warp == Tile::kWarps) {
    // ---- weights: they do not depend on the kernel before, nor on the other warps of this one
    if (ptx::elect_one()) {
#pragma unroll 1
      for (int i = 0; i < Map::kWDepth; ++i) ptx::arrivals_init(base + Map::kWFull + 8 * i, 1);
      ptx::publish_barriers();
      work.start();
    }
  } else if (warp < Tile::kWarps) {
    // ---- all other barriers, by all warps, as in gemm_sm90.cuh
    if (ptx::elect_one()) {
#pragma unroll 1
      for (int i = warp; i < Map::kXDepth; i += Tile::kWarps) {
        if (i < Map::kWDepth) ptx::arrivals_init(base + Map::kWEmpty + 8 * i, Tile::kWarps);
        ptx::arrivals_init(base + Map::kXFull + 8 * i, 1);
        ptx::arrivals_init(base + Map::kXEmpty + 8 * i, Tile::kWarps * blocks_of<Tile>(p));
      }
      if (warp == 0 && p.deal.meet > 1) {
        ptx::barrier_init(base + Map::kMet);
        ptx::barrier_expect(base + Map::kMet, Meeting<Tile, Worker::Stage::kTogether>::bytes(p.deal.meet));
        ptx::arrivals_init(base + Map::kFree, Tile::kWarps * (p.deal.meet - 1));
      }
      ptx::publish_barriers();
      ptx::publish_to_cluster();
    }
  } else if (ptx::elect_one()) {
    ptx::prefetch_map(p.maps[kMapOfX]);
  }
  __syncthreads();
  ptx::cluster_arrive_early();
  if constexpr (Weight::kCodebook) {
    CodebookTable<Weight::kBits, Act>::make(base + Map::kTable, p.codebook, warp, kLargeThreads / 32, lane);
    __syncthreads();
  }

  // ---- everything else
  ptx::wait_for_previous_kernel();
  ptx::cluster_wait();  // the barriers of both blocks are ready
  if (warp >= Tile::kWarps) {
    ptx::give_registers<kGivenRegisters>();
    if (warp == Tile::kWarps) {
      if (ptx::elect_one()) work.go_on();
    }
  } else {
    ptx::take_registers<kTakenRegisters>();
    work.run(warp, lane);
  }
#endif
}

}  // namespace lowbit::gemm_sm90
