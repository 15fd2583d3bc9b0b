// What a warp does with its two row tiles of a stage: mma.sync on scaled values, 16 rows x 16 k made once for all
// tokens.
#pragma once
#include "../dequant/load.cuh"
#include "../dequant/scaled.cuh"
#include "../lane_words.cuh"
#include "../parts.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm80 {

// Loads and products may change places within two fragments, or half of one's columns, as far as registers last.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kTogether = 1;
constexpr bool kByHalves = true;
#else
constexpr int kTogether = 2;
constexpr bool kByHalves = false;
#endif

// The words of a row tile for half of its 128 k, which is where those of the first half would lie: fragment f of either
// half is then decoded as fragment f. plane: of the block's codes in a stage.
template <int Bits, class Tile>
__device__ __forceinline__ void load_half(uint32_t plane, int tile, int half, int lane, planes::Words<Bits>& words) {
  layout::for_planes<Bits>([&](auto which) {
    constexpr int kWidth = decltype(which)::value;
    uint32_t* to = words.word + 2 * layout::plane_low(Bits, kWidth);
    const uint32_t from = plane + tile * (256 * kWidth);
    if constexpr (kWidth == 1) {
      to[0] = ptx::load_shared(from + lane * 8 + half * 4);
    } else if constexpr (kWidth == 2) {
      ptx::load_shared(from + lane * 16 + half * 8, to[0], to[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth / 4; ++i)
        ptx::load_shared(from + half * (128 * kWidth) + i * 512 + lane * 16, to[4 * i], to[4 * i + 1], to[4 * i + 2],
                         to[4 * i + 3]);
    }
    plane += Tile::kRowTiles * 256 * kWidth;
  });
}

template <class Weight, class Act, class Tile, class Form>
struct Worker {
  using Stage = gemm_sm80::Stage<Weight, Tile, Form>;
  using Decoder = ScaledDecoder<Weight, Act, Form::kZeroForm, false>;
  using Words = typename Decoder::Words;
  using Group = typename Decoder::Group;
  static constexpr int kColumns = Tile::kColumns, kWarpTiles = Tile::kWarpTiles;
  using Sums = float[kWarpTiles][kColumns][4];

  const Problem& p;
  const int lane, pair;  // pair: of row tiles
  const Decoder decoder;
  const uint32_t own_x;  // where this lane reads x of fragment 0 of 64 k: 16 bytes of a token, swizzled

  __device__ Worker(const Problem& problem, int warp, int own_lane)
      : p(problem),
        lane(own_lane),
        pair(warp),
        decoder(problem.step, problem.zero_base, problem.zero_on_code),
        own_x((own_lane / 16 * 8 + own_lane % 8) * 128 + ((own_lane / 8 % 2) ^ own_lane % 8) * 16) {}

  // 64 k of a stage: the sums grow by the products of both row tiles.
  __device__ __forceinline__ void run_half(uint32_t stage, int half, Sums& sums) const {
    const uint32_t codes = stage + Stage::kX, x_at = stage + half * Stage::kXBox + own_x;
    Words words[kWarpTiles];
    Group own[kWarpTiles];  // of fine groups that of fragment lane / 8
    const int group = Form::kFine ? (half * 4 + lane / 8) >> p.group_fragments : 0;
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) {
      load_half<Stage::kBits, Tile>(codes, pair * kWarpTiles + t, half, lane, words[t]);
      own[t] = Form::kFine ? load_own_group<Stage>(p, decoder, codes, pair * kWarpTiles + t, group, lane)
                           : load_group<Stage>(p, decoder, codes, pair * kWarpTiles + t, group, lane);
    }
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      // Why: else x of too many fragments is loaded early, and registers run out.
      if (Tile::kTokens >= 96 && f % kTogether == 0) __syncwarp();
      uint32_t a[kWarpTiles][4];
#pragma unroll
      for (int t = 0; t < kWarpTiles; ++t) {
        decoder.fragment(words[t], f, Form::kFine ? Decoder::of_lane(own[t], f * 8 + lane / 4) : own[t], a[t]);
      }
#pragma unroll
      for (int column = 0; column < kColumns; column += 2) {
        if (Tile::kTokens >= 96 && kByHalves && column == kColumns / 2) __syncwarp();
        uint32_t x[4];
        ptx::load_matrices(x, (x_at ^ (f * 32)) + column * 1024);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int t = 0; t < kWarpTiles; ++t) ptx::mma<Act>(sums[t][column + i], a[t], x[2 * i], x[2 * i + 1]);
      }
    }
  }

  // All sums of part `turn` have been made: to y, where it is all of a task, or to memory. Why the part is found again:
  // every register is taken before.
  __device__ __forceinline__ void finish(int turn, Sums& sums) const {
    const Part part = Parts(p.deal, ptx::block_again())[turn];
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t)
      finish_part<Act, Tile>(p, part, blockIdx.x, 0, pair * kWarpTiles + t, lane,
                             [&](int column, int i) { return sums[t][column][i]; });
  }
};

}  // namespace lowbit::gemm_sm80
