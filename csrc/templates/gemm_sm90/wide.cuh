// What a warp of a warpgroup does with its 16 rows of a stage and 32 to 128 tokens: wgmma on exact or on scaled values.
#pragma once
#include "../dequant/scaled.cuh"
#include "../ptx/async.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "parts.cuh"
#include "shape.cuh"
#include "words.cuh"

namespace lowbit::gemm_sm90 {

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
struct Wide {
  using Stage = gemm_sm90::Stage<Weight, Tile, Fine, Zeros>;
  using Map = gemm_sm90::Map<Stage>;
  // Whether values stay exact numbers and their scales are those of sums, of 128 k each: where there are registers for
  // both sums, and scales do not change within.
  static constexpr bool kExact = !Fine && Tile::kTokens <= 96;
  using Decoder = ScaledDecoder<Weight, Act, Zeros, kExact>;
  using Words = typename Decoder::Words;
  using Group = typename Decoder::Group;
  static constexpr int kColumns = Tile::kColumns;
  static constexpr bool kSummed = false;

  const Problem& p;
  const uint32_t base;
  const int warp, lane;
  const Decoder decoder;

  __device__ Wide(const Problem& problem, uint32_t shared, int own_warp, int own_lane)
      : p(problem), base(shared), warp(own_warp), lane(own_lane), decoder(problem.step, problem.zero_base) {}

  static constexpr float unit(int /*h*/) { return 1.0f; }

  using Fragments = uint32_t[2][4][4];  // of 64 k each
  using Sums = float[Tile::kTokens / 2];

  __device__ __forceinline__ Group load_group(uint32_t codes, int group) const {
    return lowbit::load_group<Stage>(p, decoder, codes, warp, group, lane);
  }

  // Products of fragments of 64 k, the first of a sum if `begin`.
  __device__ __forceinline__ void multiply(const uint32_t (&a)[4][4], uint64_t tokens, bool begin, Sums& sum) const {
    ptx::begin_products();
#pragma unroll
    for (int f = 0; f < 4; ++f)
      ptx::wgmma<Act, Tile::kTokens>(sum, a[f], tokens + f * 32 / 16, begin && f == 0 ? 0 : 1);
    ptx::commit_products();
  }

  // Fragments of 64 k are made while the products of the 64 before still run, also those of the stage before:
  // finished() is called when the latter are done. The last 64 still run when this returns.
  template <class Finished>
  __device__ __forceinline__ void run_stage(uint32_t stage, Fragments& a, Sums& sum, const Finished& finished) const {
    const uint32_t codes = stage + Stage::kX;
    const uint64_t tokens = ptx::describe_tokens(stage);
#pragma unroll
    for (int step = 0; step < Stage::kSteps; ++step) {
      Words words;
      load_words<Stage, Tile>(codes, warp, step, lane, words);
      Group group;
      if constexpr (!Fine) group = load_group(codes, step >> p.group_steps);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::wait_products<1>();
        if (step == 0 && half == 1) finished();
#pragma unroll
        for (int f = 0; f < 4; ++f) {
          if constexpr (Fine) group = load_group(codes, (step * 8 + half * 4 + f) >> p.group_fragments);
          decoder.fragment(words, half * 4 + f, group, a[half][f]);
        }
        multiply(a[half], tokens + (step * 2 + half) * Stage::kXBox / 16, false, sum);
      }
    }
  }

  // The same where sums of 128 k, `part`, are scaled: those of the step before when all its products are done.
  // scale: of the step before, then of the last of this stage.
  template <class Finished>
  __device__ __forceinline__ void run_stage_exact(uint32_t stage, Fragments& a, Sums& part, float (&scale)[2],
                                                  Sums& sum, const Finished& finished) const {
    const uint32_t codes = stage + Stage::kX;
    const uint64_t tokens = ptx::describe_tokens(stage);
#pragma unroll
    for (int step = 0; step < Stage::kSteps; ++step) {
      Words words;
      load_words<Stage, Tile>(codes, warp, step, lane, words);
      const Group group = load_group(codes, step >> p.group_steps);
      ptx::wait_products<1>();
#pragma unroll
      for (int f = 0; f < 4; ++f) decoder.fragment(words, f, group, a[0][f]);
      ptx::wait_products<0>();
      if (step == 0) finished();
      apply(part, scale, sum);
      multiply(a[0], tokens + step * 2 * Stage::kXBox / 16, true, part);
#pragma unroll
      for (int f = 0; f < 4; ++f) decoder.fragment(words, 4 + f, group, a[1][f]);
      multiply(a[1], tokens + (step * 2 + 1) * Stage::kXBox / 16, false, part);
      scale[0] = group.on_sums[0], scale[1] = group.on_sums[1];
    }
  }

  // sum += scale * part, whose products are done.
  static __device__ __forceinline__ void apply(Sums& part, const float (&scale)[2], Sums& sum) {
    ptx::settle(part);
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 2; ++i) sum[i] = fmaf(scale[i / 2 % 2], part[i], sum[i]);
  }

  __device__ __forceinline__ void run(const Parts& parts) const {
    Place<Map::kDepth> place;
    uint32_t before = 0;  // the place whose products may still run
    const auto release = [&](bool used) {
      if (used && lane == 0) ptx::arrive(base + Map::kEmpty + 8 * before);
    };
#pragma unroll 1
    for (int turn = 0; turn < parts.count; ++turn) {
      const Part part = parts[turn];
      Sums sum = {}, open = {};
      float scale[2] = {};  // of sums of the step before: none
      Fragments a;
#pragma unroll 1
      for (int at = part.begin; at < part.end; ++at) {
        ptx::wait_arrivals(base + Map::kFull + 8 * place.index, place.parity);
        const uint32_t stage = base + place.index * Stage::kBytes;
        const auto finished = [&] { release(at > part.begin); };
        if constexpr (kExact) {
          run_stage_exact(stage, a, open, scale, sum, finished);
        } else {
          run_stage(stage, a, sum, finished);
        }
        before = place.index;
        place.next();
      }
      ptx::wait_products<0>();
      release(true);
      if constexpr (kExact) apply(open, scale, sum);
      finish_part<Act, Tile>(p, part, blockIdx.x, 0, warp, lane,
                             [&](int column, int i) { return sum[4 * column + i]; });
    }
  }
};

}  // namespace lowbit::gemm_sm90
