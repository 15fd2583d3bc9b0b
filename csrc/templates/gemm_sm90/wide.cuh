// What a warp of a warpgroup does with its 16 rows of a stage and 32 to 128 tokens: wgmma on scaled values.
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
  using Decoder = ScaledDecoder<Weight, Act, Zeros>;
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

  // Fragments of 64 k are made while the products of the 64 before still run, also those of the stage before:
  // finished() is called when the latter are done. The last 64 still run when this returns.
  template <class Finished>
  __device__ __forceinline__ void run_stage(uint32_t stage, Fragments& a, float (&sum)[Tile::kTokens / 2],
                                            const Finished& finished) const {
    const uint32_t codes = stage + Stage::kX;
    const uint64_t tokens = ptx::describe_tokens(stage);
#pragma unroll
    for (int step = 0; step < Stage::kSteps; ++step) {
      Words words;
      load_words<Stage, Tile>(codes, warp, step, lane, words);
      Group group;
      if constexpr (!Fine) group = load_group<Stage>(p, decoder, codes, warp, step >> p.group_steps, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::wait_products<1>();
        if (step == 0 && half == 1) finished();
#pragma unroll
        for (int f = 0; f < 4; ++f) {
          if constexpr (Fine)
            group = load_group<Stage>(p, decoder, codes, warp, (step * 8 + half * 4 + f) >> p.group_fragments, lane);
          decoder.fragment(words, half * 4 + f, group, a[half][f]);
        }
        ptx::begin_products();
#pragma unroll
        for (int f = 0; f < 4; ++f)
          ptx::wgmma<Act, Tile::kTokens>(sum, a[half][f], tokens + ((step * 2 + half) * Stage::kXBox + f * 32) / 16);
        ptx::commit_products();
      }
    }
  }

  __device__ __forceinline__ void run(const Share& share) const {
    Place<Map::kDepth> place;
    uint32_t before = 0;  // the place whose products may still run
    const auto release = [&](bool used) {
      if (used && lane == 0) ptx::arrive(base + Map::kEmpty + 8 * before);
    };
    share.for_parts(p.stages, [&](const Part& part) {
      float sum[Tile::kTokens / 2] = {};
      Fragments a;
#pragma unroll 1
      for (int at = part.begin; at < part.end; ++at) {
        ptx::wait_arrivals(base + Map::kFull + 8 * place.index, place.parity);
        run_stage(base + place.index * Stage::kBytes, a, sum, [&] { release(at > part.begin); });
        before = place.index;
        place.next();
      }
      ptx::wait_products<0>();
      release(true);
      finish_part<Act, Tile>(p, share, part, blockIdx.x, 0, warp, lane,
                             [&](int column, int i) { return sum[4 * column + i]; });
    });
  }
};

}  // namespace lowbit::gemm_sm90
