// What a warp does with its 16 rows, or its part of K of them, of a stage and up to 32 tokens: mma.sync on values of
// codes without scale, or on bare codes where zeros are no whole numbers; scales on sums of a group.
//
// For families that bring stages through a ring. Stage: from kCodesAt on codes [plane][warp][step] of kSteps steps of
// 128 k a warp, then scales and zeros [row tile][group][16], kWhole where these are whole; from kXAt on x [part of
// K][64 k][token][128 bytes], swizzled (kOneRow: or of one token, as it is); kGroups: bytes of a block for what warps
// make of groups (groups.cuh). Ring: where its places, their barriers, their sums of x [part of K] and that room lie
// (`stage`, `full`, `summed`, `empty`, `sums`, `groups`), the order of places (`first`), whether sums that are there
// tell that all of the stage is (`kSumsLast`), whether registers are so few that loads of steps and groups are kept
// apart (`kApart`), whether the copy engine writes stages (`kByEngine`), whether warps may share K (`kSplits`; then
// where sums meet, meeting.cuh), and whether a block has no more than a part of one task (`kOneTask`). Problem: what
// load.cuh, groups.cuh and parts.cuh need, group_steps, x_box where kOneRow (x_sums.cuh), and where warps may share K
// ring (Stages).
#pragma once
#include "../dequant/codebook.cuh"
#include "../dequant/float.cuh"
#include "../dequant/int.cuh"
#include "../dequant/load.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "ending.cuh"
#include "groups.cuh"
#include "ring.cuh"
#include "x_sums.cuh"

namespace lowbit::narrow {

template <class Weight, class Act, class Tile, class Form, class Stage, class Ring, class Problem>
struct Worker {
  static constexpr int kBits = Weight::kBits;
  // Whole zeros are part of the number that makes a value of a code. Others are taken away by sums of x: x_sums.cuh.
  static constexpr bool kFine = Form::kFine, kWhole = Form::kWhole, kSums = Form::kZeros && !kWhole;
  // Why not exact where there are sums of x: they take the offset away too, for one operation a code less.
  using Decoder = typename DecoderFor<Weight, Act, !kSums>::Type;
  using Words = typename Decoder::Words;
  using Sum = float[Tile::kColumns][4];
  static constexpr int kColumns = Tile::kColumns;
  using Groups = narrow::Groups<Decoder, Stage>;
  using Group = typename Groups::Group;

  // Whether what comes from helpers is waited for after most products of a stage's first step.
  static constexpr bool kLate = !Ring::kSumsLast && !kFine && !kWhole;

  static constexpr int kLoads = (kColumns + 1) / 2;  // of x of a fragment
  using Tokens = uint32_t[kLoads][4];
  // Registers are: what can be found again is not kept.
  static constexpr bool kScarce = Ring::kApart && (kFine || kSums) && kColumns == 2;
  static constexpr bool kFindPart = kColumns == 2 && (Ring::kApart || kFine);
  // Where some are left, though, addresses are not found anew in every stage.
  static constexpr bool kKeepLane = Ring::kApart && kColumns <= 2 && !kScarce;
  static constexpr bool kKeepOwn = Ring::kApart && kColumns == 1;
  // Fragments of a step that have a scale in common, at most, where groups are fine. Why fewer: registers.
  static constexpr int kMostFragments = Ring::kApart ? 2 : 4;
  // Steps of fine groups whose instructions are laid out one after the other: where a step has few groups. Why not
  // always: numbers of all steps that stay the same from stage to stage take registers.
  template <int Fragments>
  static constexpr int kTogether =
      !Ring::kApart && !kSums && Fragments >= 2 << (int{kWhole} + int{kColumns > 1}) ? 2 : 1;
  // Whether what the end of a task needs is found before x is there. Why only in halves of a multiprocessor: others
  // may have several tasks, and need the registers for blocks of add_parts beside them: they got up to 19% slower. Why
  // not always there: registers.
  static constexpr bool kFindsEnd = Ring::kOneTask && !kFine && !(kColumns == 2 && (kSums || kBits == 1));
  using Ending = narrow::Ending<Act, Tile, Ring, Problem, kFindsEnd>;
  // Whether x of the second half of a step is not to be loaded in the first: registers would not do.
  static constexpr bool kXApart = Ring::kApart && (kColumns == 4 || (kColumns == 2 && Stage::kBits <= 2 && !kSums));

  static __device__ __forceinline__ int parts_of(const Problem& p) {
    if constexpr (Ring::kSplits) return p.ring.split.parts;
    return 1;
  }
  static __device__ __forceinline__ int tile_of(const Problem& p, int warp) {
    if constexpr (Ring::kSplits) return p.ring.tile_of(warp);
    return warp;
  }

  // Why a shuffle: the compiler can't find again what came through one.
  template <bool Keep>
  static __device__ __forceinline__ int kept(int number) {
    if constexpr (!Keep) return number;
    return __shfl_sync(~0u, number, threadIdx.x % 32);
  }

  const Problem& p;
  const Ring ring;
  const int warp, lane;
  const int tile, part;  // row tile, part of K
  const Decoder decoder;
  const uint32_t own_groups;  // of a stage: this row tile's, from those of this part on
  const uint32_t room;        // for what is made of them
  const uint32_t own_sums;    // of a stage: sums of x of this part, this lane's tokens
  uint32_t own[4];            // of a stage: where this lane reads x of a box: 16 bytes of a token, swizzled
  const Ending ending;

  // table: of a codebook, in shared memory.
  __device__ Worker(const Problem& problem, const Ring& own_ring, uint32_t table, int own_warp, int own_lane)
      : p(problem),
        ring(own_ring),
        warp(own_warp),
        lane(kept<kKeepLane>(own_lane)),
        tile(tile_of(problem, own_warp)),
        part(own_warp - tile * parts_of(problem)),
        decoder(make_decoder<Weight, Decoder>(table, own_lane, problem.zero_base)),
        own_groups(Groups::template at<kMostFragments>(
            problem,
            tile * problem.stage_groups + (kFine ? (part * Stage::kSteps * 8) >> problem.group_fragments
                                                 : (part * Stage::kSteps) >> problem.group_steps),
            lane)),
        room(Groups::kMade ? own_ring.groups() + own_warp * Groups::kRoom : 0),
        own_sums(part * Stage::kSums + lane % 4 * (kSumBytes / 4)),
        ending(problem, ring, tile, part, warp, lane) {
    const int x_box = x_box_of<Stage>(p);
    const bool one_row = Stage::kOneRow && x_box < Stage::kXBox;
    const uint32_t own_x = Stage::kXAt + part * (Stage::kX / Stage::kXBox) * x_box;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = kColumns == 1 ? place_of_x(lane % 8, (4 * i + lane / 8) % 8, one_row)
                                   : (lane / 16 * 8 + lane % 8) * 128 + ((2 * i + lane / 8 % 2) ^ lane % 8) * 16;
      own[i] = kept<kKeepOwn>(own_x + at);
    }
  }

  // What a sum of row half h is to be multiplied by, but for the step between codes.
  static constexpr float unit(int h) { return Decoder::kUnit / (1 << Decoder::exponent(h)); }

  // x of fragment f of a step; with 8 tokens of f + 1 too.
  __device__ __forceinline__ void load_x(uint32_t step, int f, Tokens& x) const {
    const uint32_t box = step + f / 4 * x_box_of<Stage>(p);
    // Stages, and x of them, begin at multiples of 128.
    const uint32_t row = kColumns == 1 ? box + own[f / 2 % 2]
                         : kScarce     ? (box + own[0]) ^ (f % 4 * 32)
                                       : box + own[f % 4];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) ptx::load_matrices(x[i], row + i * 2048);  // 16 tokens each
  }

  __device__ __forceinline__ void fragment(const Words& words, int f, const Group& group, uint32_t (&a)[4]) const {
    if constexpr (kWhole) {
      decoder.fragment(words, f, {ptx::twice<0>(group.addends), ptx::twice<1>(group.addends)}, a);
    } else {
      decoder.fragment(words, f, a);
    }
  }

  static __device__ __forceinline__ void multiply(const uint32_t (&a)[4], const Tokens& x, int f, Sum& to) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int first = kColumns == 1 ? f % 2 * 2 : column % 2 * 2;
      ptx::mma<Act>(to[column], a, x[column / 2][first], x[column / 2][first + 1]);
    }
  }

  // What comes to this block where those of a cluster share K.
  static __device__ __forceinline__ int meeting_bytes(const Problem& p) {
    if constexpr (Ring::kSplits) return narrow::meeting_bytes<Tile>(p.ring);
    return 0;
  }

  // What helpers multiply sums of x by.
  static constexpr float kSumFactor = 1.0f / Decoder::kUnit;

  // Where there are such: sums of x of this lane's two tokens of each column; `place`: which of a step.
  __device__ __forceinline__ void load_sums(uint32_t sums, int step, int place, float (&x_sum)[kColumns][2]) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
      if constexpr (kSums)
        ptx::load_shared(sums + ((step * kColumns + column) * kSumsOfStep<Stage> + place) * kSumBytes, x_sum[column]);
  }

  __device__ __forceinline__ void apply(const Sum& sum, const float (&x_sum)[kColumns][2], const Group& group,
                                        Sum& total) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[column][i] = fmaf(group.scale[i / 2], sum[column][i], total[column][i]);
        if (kSums) total[column][i] = fmaf(group.on_x[i / 2], x_sum[column][i % 2], total[column][i]);
      }
  }

  // A step of 128 k whose scales are those of one group. Of the first step of a stage, what comes from helpers is
  // waited for when most products are done.
  template <class Place>
  __device__ __forceinline__ void run_step(uint32_t stage, uint32_t sums, int step, const Place& place,
                                           Sum& total) const {
    const bool late = kLate && step == 0;
    const uint32_t x_at = stage + step * 2 * x_box_of<Stage>(p);
    Words words;
    load_words<Stage, Tile>(stage + Stage::kCodesAt, warp, step, lane, words);
    Group group;
    Sum sum = {};
    float x_sum[kColumns][2] = {};
    const auto from_helpers = [&] {
      group = Groups::find(p, p, stage + own_groups + (step >> p.group_steps) * group_bytes<Stage>(p), lane);
      load_sums(sums, step, 0, x_sum);
    };
    if (!late) from_helpers();
    Tokens x;
#pragma unroll
    for (int f = 0; f < 8; ++f) {
      if (kXApart && f == 4) __syncwarp();
      if (kColumns > 1 || f % 2 == 0) load_x(x_at, f, x);
      uint32_t a[4];
      fragment(words, f, group, a);
      multiply(a, x, f, sum);
      if (late && f == 5) {
        if (kSums) ptx::wait_arrivals(ring.summed(place.index), place.parity);
        from_helpers();
      }
    }
    apply(sum, x_sum, group, total);
  }

  // The same with any groups: scales follow every `Fragments` of a step, which have them in common.
  template <int Fragments>
  __device__ __forceinline__ void run_step_fine(uint32_t stage, uint32_t sums, int step, Sum& total) const {
    const uint32_t x_at = stage + step * 2 * x_box_of<Stage>(p);
    constexpr int kSum = Fragments == 1 ? 1 : 2;  // fragments that there are sums of x of
    // Why late: 16 tokens of groups of 32 2 to 4% faster, 8 tokens or groups of 64 1 to 3% slower.
    // Why apart: uint4 and 16 tokens 1 to 6% faster. 8 tokens are up to 12% slower, and without zeros both. Of
    // gemm_sm80 some kernels with 8 tokens spill else.
    constexpr bool kApart = kWhole && (kColumns > 1 || Ring::kApart);
    constexpr bool kFindLate = Groups::kMade && !kWhole && kColumns > 1 && Fragments < 4;
    const auto group_at = [&](int f) {
      const int index = Fragments == 1 ? step * 8 + f : (step * 8 + f) >> p.group_fragments;
      return stage + own_groups + index * group_bytes<Stage>(p);
    };
    Words words;
    load_words<Stage, Tile>(stage + Stage::kCodesAt, warp, step, lane, words);
    Tokens x;
    Group group;
#pragma unroll
    for (int first = 0; first < 8; first += Fragments) {
      // Why: else too much of other groups is loaded early, and registers run out.
      if (kScarce && first > 0) __syncwarp();
      const auto find_group = [&] {
        if constexpr (Groups::kMade) {
          // Those of four times so many fragments at once: half of a step, a step or two.
          const int piece = (step * 8 + first) / Fragments % 4;
          if (piece == 0) Groups::template make<kApart>(p, group_at(first), Groups::made_at(room, lane));
          group = Groups::load(Groups::found_at(room, lane), piece);
        } else {
          group = Groups::find(p, p, group_at(first), kScarce ? ptx::thread_again() % 32 : lane);
        }
      };
      if (!kFindLate) find_group();
      Sum sum = {};
#pragma unroll
      for (int f = first; f < first + Fragments; ++f) {
        if (kColumns > 1 || f % 2 == 0) load_x(x_at, f, x);
        uint32_t a[4];
        fragment(words, f, group, a);
        multiply(a, x, f, sum);
      }
      if (kFindLate) find_group();
      float x_sum[kColumns][2] = {};
#pragma unroll
      for (int at = first / kSum; at < (first + Fragments) / kSum; ++at) {
        float more[kColumns][2] = {};
        load_sums(sums, step, at, more);
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
          for (int i = 0; i < 2; ++i) x_sum[column][i] += more[column][i];
      }
      apply(sum, x_sum, group, total);
    }
  }

  __device__ __forceinline__ void run(const Parts& parts) const {
    auto place = ring.first();
    bool idle = false;
    if constexpr (Ring::kSplits) idle = tile >= p.ring.split.row_tiles;
    Ending end = ending;
    end.bring();
#pragma unroll 1
    for (int turn = 0; turn < parts.count; ++turn) {
      const Part now = kFindPart ? Parts(p.deal, ptx::block_again())[turn] : parts[turn];
      Sum total = {};
#pragma unroll 1
      for (int at = idle ? now.end : now.begin; at < now.end; ++at, place.next()) {
        if (!kSums || !Ring::kSumsLast) ptx::wait_arrivals(ring.full(place.index), place.parity);
        if (kSums && !kLate) ptx::wait_arrivals(ring.summed(place.index), place.parity);
        const uint32_t stage = ring.stage(place.index);
        // Why: where registers are scarce what can be found again is not kept.
        const uint32_t sums = ring.sums(place.index) + (kScarce ? ptx::thread_again() % 4 * (kSumBytes / 4) : own_sums);
        if constexpr (kFine) {
          const auto run_steps = [&](auto fragments) {
#pragma unroll(kTogether<decltype(fragments)::value>)
            for (int step = 0; step < Stage::kSteps; ++step)
              run_step_fine<decltype(fragments)::value>(stage, sums, step, total);
          };
          if (p.group_fragments == 0) {
            run_steps(std::integral_constant<int, 1>{});
          } else if (kMostFragments == 2 || p.group_fragments == 1) {
            run_steps(std::integral_constant<int, 2>{});
          } else {
            run_steps(std::integral_constant<int, kMostFragments>{});
          }
        } else {
#pragma unroll
          for (int step = 0; step < Stage::kSteps; ++step) {
            if (Ring::kApart && step > 0) __syncwarp();
            run_step(stage, sums, step, place, total);
          }
        }
        if (Ring::kByEngine) ptx::end_reads();
        __syncwarp();
        if (lane == 0) ptx::arrive(ring.empty(place.index));
      }
      if constexpr (Weight::kCodebook) {
        const float unit = decoder.unit();
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
          for (int i = 0; i < 4; ++i) total[column][i] *= unit;
      }
      end.finish(now, total);
    }
  }
};

}  // namespace lowbit::narrow
