// What a warp does with its 16 rows of a stage and up to 32 tokens: mma.sync on codes, scales on sums of a group.
//
// For families that bring stages through a ring. Stage: kSteps steps of 128 k of x [64 k][token][128 bytes], swizzled,
// then codes [plane][row tile][step], then scales and zeros [row tile][group][16]. Ring: where its places, their
// barriers and their sums of x lie (`stage`, `full`, `summed`, `empty`, `sums`), the order of places (`first`), and
// whether sums that are there tell that all of the stage is (`kSumsLast`), and whether registers are so few that
// loads of steps and groups are kept apart (`kApart`).
// Problem: what load.cuh and parts.cuh need, zero_base, zero_on_code, zero_on_value, group_steps, group_fragments.
#pragma once
#include "../dequant/codebook.cuh"
#include "../dequant/float.cuh"
#include "../dequant/int.cuh"
#include "../dequant/load.cuh"
#include "../parts.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "x_sums.cuh"

namespace lowbit::narrow {

template <class Weight, class Act, class Tile, class Form, class Stage, class Ring, class Problem>
struct Worker {
  static constexpr bool kFine = Form::kFine, kZeros = Form::kZeros;
  using Decoder = lowbit::Decoder<Weight, Act>;
  using Words = typename Decoder::Words;
  using Sum = float[Tile::kColumns][4];
  static constexpr int kColumns = Tile::kColumns;
  static constexpr bool kSummed = Decoder::kSubtractOffset || kZeros;  // sums of x are needed: x_sums.cuh

  static constexpr int kLoads = (kColumns + 1) / 2;  // of x of a fragment
  using Tokens = uint32_t[kLoads][4];
  // Registers are: what can be found again is not kept.
  static constexpr bool kScarce = Ring::kApart && (kFine || kZeros) && kColumns == 2;
  static constexpr bool kFindPart = kColumns == 2 && (Ring::kApart || (kFine && kZeros));
  // Where some are left, though, addresses are not found anew in every stage.
  static constexpr bool kKeepLane = Ring::kApart && kColumns <= 2 && !kScarce;
  static constexpr bool kKeepOwn = Ring::kApart && kColumns == 1;

  // Why a shuffle: the compiler can't find again what came through one.
  template <bool Keep>
  static __device__ __forceinline__ int kept(int number) {
    if constexpr (!Keep) return number;
    return __shfl_sync(~0u, number, threadIdx.x % 32);
  }

  const Problem& p;
  const Ring ring;
  const int warp, lane;
  const Decoder decoder;
  uint32_t own[4];  // where this lane reads x of a box: 16 bytes of a token, swizzled

  // table: of a codebook, in shared memory.
  __device__ Worker(const Problem& problem, const Ring& own_ring, uint32_t table, int own_warp, int own_lane)
      : p(problem),
        ring(own_ring),
        warp(own_warp),
        lane(kept<kKeepLane>(own_lane)),
        decoder(make_decoder<Weight, Decoder>(table, own_lane, problem.zero_base)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = kColumns == 1 ? lane % 8 * 128 + ((4 * i + lane / 8) % 8 ^ lane % 8) * 16
                                   : (lane / 16 * 8 + lane % 8) * 128 + ((2 * i + lane / 8 % 2) ^ lane % 8) * 16;
      own[i] = kept<kKeepOwn>(at);
    }
  }

  // What a sum of row half h is to be multiplied by, but for the step between codes.
  static constexpr float unit(int h) { return Decoder::kUnit / (1 << Decoder::exponent(h)); }

  // x of fragment f of a step; with 8 tokens of f + 1 too.
  __device__ __forceinline__ void load_x(uint32_t step, int f, Tokens& x) const {
    const uint32_t box = step + f / 4 * Stage::kXBox;
    // Stages begin at multiples of 128.
    const uint32_t row = kColumns == 1 ? box + own[f / 2 % 2]
                         : kScarce     ? (box + own[0]) ^ (f % 4 * 32)
                                       : box + own[f % 4];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) ptx::load_matrices(x[i], row + i * 2048);  // 16 tokens each
  }

  static __device__ __forceinline__ void multiply(const uint32_t (&a)[4], const Tokens& x, int f, Sum& to) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int first = kColumns == 1 ? f % 2 * 2 : column % 2 * 2;
      ptx::mma<Act>(to[column], a, x[column / 2][first], x[column / 2][first + 1]);
    }
  }

  // Sums of x of this lane's two tokens of a column, as the helpers left them; `place`: which of a step.
  __device__ __forceinline__ void load_sums(uint32_t sums, int step, int column, int place, float (&sum)[2]) const {
    ptx::load_shared(sums + ((step * kColumns + column) * kSumsOfStep<Stage> + place) * 32 + lane % 4 * 8, sum);
  }

  // Scales of this lane's rows and, with zeros, what sums of x are worth beside: total += scale * sum + on_x * x_sum.
  struct Group {
    float scale[2], on_x[2];
  };

  // group: of a stage.
  __device__ __forceinline__ Group load_group(uint32_t codes, int group) const {
    const uint32_t from = codes + Stage::kCodes + (warp * p.stage_groups + group) * group_bytes<Stage>(p);
    const float2 scales = load_pair<Stage>(p, from, lane);
    Group loaded{{scales.x, scales.y}, {}};
    if constexpr (kZeros) {
      const float2 zeros = load_pair<Stage>(p, from + Stage::kScales, lane);
      const float base = Decoder::kSubtractOffset ? p.zero_base : 0.0f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float zero = h ? zeros.y : zeros.x;
        // Why both factors, of which one is 0: a choice would take twice the instructions.
        loaded.on_x[h] = static_cast<float>(1 << Decoder::exponent(h)) *
                         fmaf(-loaded.scale[h], fmaf(zero, p.zero_on_code, base), zero * p.zero_on_value);
      }
    }
    return loaded;
  }

  __device__ __forceinline__ void apply(const Sum& sum, const float (&x_sum)[kColumns][2], const Group& group,
                                        Sum& total) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[column][i] = fmaf(group.scale[i / 2], sum[column][i], total[column][i]);
        if (kZeros) total[column][i] = fmaf(group.on_x[i / 2], x_sum[column][i % 2], total[column][i]);
      }
  }

  // Sums begin with what the offset of all codes takes away; with zeros `apply` does that.
  __device__ __forceinline__ void begin(const float (&x_sum)[kColumns][2], Sum& sum) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum[column][i] = Decoder::kSubtractOffset && !kZeros
                             ? x_sum[column][i % 2] * (-p.zero_base * (1 << Decoder::exponent(i / 2)))
                             : 0.0f;
  }

  // A step of 128 k whose scales are those of one group.
  __device__ __forceinline__ void run_step(uint32_t stage, uint32_t sums, int step, Sum& total) const {
    const uint32_t codes = stage + Stage::kX, x_at = stage + step * 2 * Stage::kXBox;
    Words words;
    load_words<Stage, Tile>(codes, warp, step, lane, words);
    const Group group = load_group(codes, step >> p.group_steps);
    float x_sum[kColumns][2] = {};
    if constexpr (kSummed)
#pragma unroll
      for (int column = 0; column < kColumns; ++column) load_sums(sums, step, column, 0, x_sum[column]);
    Sum sum;
    begin(x_sum, sum);
    Tokens x;
#pragma unroll
    for (int f = 0; f < 8; ++f) {
      // Why: else x of too many fragments is loaded early, and registers run out.
      if (Ring::kApart && kColumns == 4 && f == 4) __syncwarp();
      if (kColumns > 1 || f % 2 == 0) load_x(x_at, f, x);
      uint32_t a[4];
      decoder.fragment(words, f, a);
      multiply(a, x, f, sum);
    }
    apply(sum, x_sum, group, total);
  }

  // The same with any groups: scales follow every `Fragments` of a step, one or two, which have them in common.
  template <int Fragments>
  __device__ __forceinline__ void run_step_fine(uint32_t stage, uint32_t sums, int step, Sum& total) const {
    const uint32_t codes = stage + Stage::kX, x_at = stage + step * 2 * Stage::kXBox;
    Words words;
    load_words<Stage, Tile>(codes, warp, step, lane, words);
    Tokens x;
#pragma unroll
    for (int first = 0; first < 8; first += Fragments) {
      // Why: else too much of other groups is loaded early, and registers run out.
      if (kScarce && first > 0) __syncwarp();
      const int group = Fragments == 1 ? step * 8 + first : (step * 8 + first) >> p.group_fragments;
      const Group loaded = load_group(codes, group);
      float x_sum[kColumns][2] = {};
      if constexpr (kSummed)
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
          load_sums(sums, step, column, first / Fragments, x_sum[column]);
      Sum sum;
      begin(x_sum, sum);
#pragma unroll
      for (int f = first; f < first + Fragments; ++f) {
        if (kColumns > 1 || f % 2 == 0) load_x(x_at, f, x);
        uint32_t a[4];
        decoder.fragment(words, f, a);
        multiply(a, x, f, sum);
      }
      apply(sum, x_sum, loaded, total);
    }
  }

  __device__ __forceinline__ float table_unit() const {
    if constexpr (Weight::kCodebook) {
      return decoder.unit();
    } else {
      return 1.0f;
    }
  }

  __device__ __forceinline__ void run(const Parts& parts) const {
    auto place = ring.first();
#pragma unroll 1
    for (int turn = 0; turn < parts.count; ++turn) {
      const Part part = kFindPart ? Parts(p.deal, ptx::block_again())[turn] : parts[turn];
      Sum total = {};
#pragma unroll 1
      for (int at = part.begin; at < part.end; ++at, place.next()) {
        if (!kSummed || !Ring::kSumsLast) ptx::wait_arrivals(ring.full(place.index), place.parity);
        if (kSummed) ptx::wait_arrivals(ring.summed(place.index), place.parity);
        const uint32_t stage = ring.stage(place.index);
        const uint32_t sums = ring.sums(place.index);
        if constexpr (kFine) {
          if (p.group_fragments == 0) {
#pragma unroll 1  // Why: else numbers of all steps that stay the same from stage to stage take registers
            for (int step = 0; step < Stage::kSteps; ++step) run_step_fine<1>(stage, sums, step, total);
          } else {
#pragma unroll 1
            for (int step = 0; step < Stage::kSteps; ++step) run_step_fine<2>(stage, sums, step, total);
          }
        } else {
#pragma unroll
          for (int step = 0; step < Stage::kSteps; ++step) {
            if (Ring::kApart && step > 0) __syncwarp();
            run_step(stage, sums, step, total);
          }
        }
        __syncwarp();
        if (lane == 0) ptx::arrive(ring.empty(place.index));
      }
      const float unit = table_unit();
      finish_part<Act, Tile>(p, part, blockIdx.x, 0, warp, lane, [&](int column, int i) {
        return Weight::kCodebook ? total[column][i] * unit : total[column][i];
      });
    }
  }
};

}  // namespace lowbit::narrow
