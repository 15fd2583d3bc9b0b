// What blocks of family decode are made of: warps, shared memory, and the rings that weights come through. Plain
// arithmetic that compiles for the host too.
#pragma once
#include <cstdint>

namespace lowbit::decode {

// Shared memory of a block. Two: so that two launches fit on a multiprocessor, and the next one can start early.
// Whole: nothing fits beside it.
constexpr int kSharedTwo = 112 * 1024;
constexpr int kSharedWhole = 227 * 1024;

constexpr int kRowBytes = 256 + 16;  // of a token at one step; 16 more, so that 8 rows of ldmatrix meet no bank twice
constexpr int kRingsAt = 384;        // Why not less: loads of a warp would touch five lines of 128 bytes, not four

// How much of a multiprocessor a block takes.
enum class Kind { kHalf, kWhole };

// Tokens: 1, 2 or 4, the most a kernel takes.
template <int Tokens, Kind Way = Kind::kHalf>
struct Tile {
  static_assert(Tokens == 1 || Tokens == 2 || Tokens == 4);
  static constexpr Kind kKind = Way;
  static constexpr int kTokens = Tokens;
  // Why not 16 warps in half a multiprocessor: 64 registers a thread are too few.
  static constexpr int kWarps = kKind == Kind::kHalf ? 8 : 16, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kKind == Kind::kHalf ? 2 : 1;  // that fit on a multiprocessor
  // Whether feeds may let the next launch begin, as Sharing::next_after says. Why not of whole multiprocessors, which
  // let it begin at once: nothing fits beside them.
  static constexpr bool kFeedsTell = kKind == Kind::kHalf;
  static constexpr int kSharedBytes = kKind == Kind::kHalf ? kSharedTwo : kSharedWhole;
  // Of all warps. Why less for 4 tokens: x takes more.
  static constexpr int kRingKilobytes = kKind == Kind::kWhole ? (Tokens <= 2 ? 150 : 130) : Tokens <= 2 ? 86 : 60;
  static constexpr int kRingBytes = kRingKilobytes * 1024 / kWarps;
};

// A warp's ring of codes.
struct RingSizes {
  int rows;                     // row tiles side by side, which share x
  int steps;                    // of 128 k in a stage
  int tile_bytes, tile_scales;  // of one row tile in a stage
  int stage_bytes, depth;       // depth: stages
  constexpr int bytes() const { return depth * stage_bytes; }
};

// That of codes that are multiplied as bytes. units: parts of a step that have scales of their own.
template <class Tile>
constexpr RingSizes ring_of(int bits, int units, bool zeros) {
  constexpr bool kHalf = Tile::kKind == Kind::kHalf;
  RingSizes ring{};
  // Why not of more bits: few stages would fit. Blocks of half a multiprocessor have room for them, and small weights,
  // which are theirs, are not brought as fast as they are multiplied. Of 6 bits six stages of one row tile, not three
  // of two: one row, us, 10240 x 8192 17.2 and 16.7, 8192 x 8192 13.5 and 13.2, but 28672 x 4096 22.3 and 22.5.
  ring.rows = bits <= (kHalf && Tile::kTokens <= 2 ? 5 : 4) ? 2 : 1;
  // Why fewer with fine groups: lanes copy their scales in two turns at most. Why two with 3 bits: making operands of
  // them takes twice what it takes of 2 or 4 bits, and half as many stages are a tenth fewer instructions. Why not more
  // bits: two or three stages would fit (6 bits, one row: 57344 x 8192 -0.9%, 4096 x 4096 +12.6%).
  const bool two_steps = bits == 3 && Tile::kTokens <= 2 && units == 1;
  ring.steps = two_steps ? 2 : bits > 2 ? 1 : units > 1 ? 2 : 4 / bits;
  ring.tile_bytes = 256 * bits * ring.steps, ring.tile_scales = 32 * units * ring.steps;
  // Why whole lines: else a warp's 512 bytes touch five of them.
  ring.stage_bytes = ring.rows * (ring.tile_bytes + ring.tile_scales * (zeros ? 2 : 1));
  ring.stage_bytes = (ring.stage_bytes + 127) / 128 * 128;
  // Why less for 4 tokens: narrow codes need no more, and longer rows of x fit.
  const int own = bits <= 2 && !kHalf && Tile::kTokens == 4 ? Tile::kRingBytes * 5 / 8 : Tile::kRingBytes;
  // Why more: whole lines would cost these a stage.
  const int fit = ((bits > 4 && bits < 8) || two_steps ? own + own / 20 : own) / ring.stage_bytes;
  const int most = bits == 3 && kHalf ? 5 : 8;  // Why not six there: x of many k would not fit by two blocks
  ring.depth = fit < 2 ? 2 : fit > most ? most : fit;
  return ring;
}

// That of floats which are not multiplied as bytes: a step a stage, and with it room for scales of a chunk
// (float_feed.cuh).
template <class Tile>
constexpr RingSizes float_ring_of(int bits) {
  constexpr int kChunk = 8;  // steps
  RingSizes ring{};
  ring.rows = 1, ring.steps = 1;  // Why one row tile: registers, and bytes that are waited for at once
  ring.tile_bytes = 256 * bits, ring.tile_scales = 32 * kChunk;
  ring.stage_bytes = ring.tile_bytes + ring.tile_scales;
  const int fit = Tile::kRingBytes / ring.stage_bytes;
  ring.depth = fit < 2 ? 2 : fit > 8 ? 8 : fit;
  return ring;
}

// Steps of 128 k that a warp multiplies at least, of codes that are bytes and long groups: a product of four columns
// holds as many steps as it has tokens to spare, and a stage has as many as it has.
constexpr int turn_of(int tokens, int stage_steps) { return 4 / tokens > stage_steps ? 4 / tokens : stage_steps; }

}  // namespace lowbit::decode
