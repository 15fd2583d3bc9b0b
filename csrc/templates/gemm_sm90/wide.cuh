// What a warp of a warpgroup does with its 16 rows of a stage and 32 to 192 tokens: wgmma on exact or on scaled values.
#pragma once
#include "../dequant/scaled.cuh"
#include "../ptx/async.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "parts.cuh"
#include "shape.cuh"
#include "warpgroup.cuh"
#include "words.cuh"

namespace lowbit::gemm_sm90 {

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
struct Wide {
  using Stage = gemm_sm90::Stage<Weight, Tile, Fine, Zeros>;
  using Map = gemm_sm90::Map<Stage>;
  // Whether values stay exact numbers and scales are those of sums, of 128 k each (struct Units).
  static constexpr bool kExact = !Fine;
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

  // Products of fragments of 64 k.
  __device__ __forceinline__ void multiply(const uint32_t (&a)[4][4], uint64_t tokens, Sums& sum) const {
    ptx::begin_products();
#pragma unroll
    for (int f = 0; f < 4; ++f) ptx::wgmma<Act, Tile::kTokens>(sum, a[f], tokens + f * 32 / 16);
    ptx::commit_products();
  }

  // Fragments of 64 k are made while the products of the 64 before still run, also those of the stage before:
  // finished() is called when the latter are done. The last 64 still run when this returns.
  template <class Finished>
  __device__ __forceinline__ void run_stage(uint32_t stage, const Turns& turns, Fragments& a, Units& units, Sums& sum,
                                            const Finished& finished) const {
    const uint32_t codes = stage + Stage::kX;
    const uint64_t tokens = ptx::describe_tokens(stage);
#pragma unroll
    for (int step = 0; step < Stage::kSteps; ++step) {
      Words words;
      load_words<Stage, Tile>(codes, warp, step, lane, words);
      Group group;
      float ratio[2];
      if constexpr (kExact) {
        group = load_group(codes, step >> p.group_steps);
        units.move_on(group, ratio);
      }
      const auto make_half = [&](int half) {
#pragma unroll
        for (int f = 0; f < 4; ++f) {
          if constexpr (Fine) group = load_group(codes, (step * 8 + half * 4 + f) >> p.group_fragments);
          decoder.fragment(words, half * 4 + f, group, a[half][f]);
        }
      };
      ptx::wait_products<1>();
      make_half(0);
      ptx::wait_products<0>();
      if (step == 0) finished();
      if constexpr (kExact) Units::scale(ratio, sum);
      turns.take();
      multiply(a[0], tokens + step * 2 * Stage::kXBox / 16, sum);
      make_half(1);
      multiply(a[1], tokens + (step * 2 + 1) * Stage::kXBox / 16, sum);
      turns.give();
    }
  }

  __device__ __forceinline__ void run(const Parts& parts) const {
    const Turns turns(warp);
    turns.begin();
    Place<Map::kDepth> place;
    uint32_t before = 0;  // the place whose products may still run
    const auto release = [&](bool used) {
      if (used && lane == 0) ptx::arrive(base + Map::kEmpty + 8 * before);
    };
#pragma unroll 1
    for (int turn = 0; turn < parts.count; ++turn) {
      const Part part = parts[turn];
      Sums sum = {};
      Units units;
      Fragments a;
#pragma unroll 1
      for (int at = part.begin; at < part.end; ++at) {
        ptx::wait_arrivals(base + Map::kFull + 8 * place.index, place.parity);
        run_stage(base + place.index * Stage::kBytes, turns, a, units, sum, [&] { release(at > part.begin); });
        before = place.index;
        place.next();
      }
      ptx::wait_products<0>();
      release(true);
      const float unit[2] = {units.now[0] * decoder.factor(), units.now[1] * decoder.factor()};
      finish_part<Act, Tile>(p, part, blockIdx.x, 0, warp, lane, [&](int column, int i) {
        return kExact ? sum[4 * column + i] * unit[i / 2] : sum[4 * column + i];
      });
    }
    turns.end();
  }
};

}  // namespace lowbit::gemm_sm90
