// How family gemm_sm90 cuts its work, and where things lie in shared memory. The picture is in gemm_sm90.cuh.
#pragma once
#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../../args.h"
#include "../deal.cuh"
#include "../dequant/planes.cuh"
#include "../form.cuh"
#include "../layout.cuh"
#include "../narrow/ring.cuh"
#include "../narrow/split.cuh"

namespace lowbit::gemm_sm90 {

using layout::kStepK;  // 128 k: whole tiles of every plane

// Shared memory of a block.
constexpr int kSharedAlone = 220 * 1024;
// Of one of more than 128 tokens, which then has five places of x with all types of weights (large.cuh).
constexpr int kSharedTwoRings = 222 * 1024;
// Of one of two blocks: of products that follow each other, the second of which begins when the first has asked for
// most of its weights, or of one product.
constexpr int kSharedHalf = 110 * 1024;
static_assert(kSharedAlone == narrow::shared_bytes(16) && kSharedHalf == narrow::shared_bytes(8));

// Tokens: columns of a tile, at most. Up to 16 are multiplied by mma.sync, with 16 warps, or with Workers = 8 in half
// of a multiprocessor; more by wgmma, with two warpgroups, of which each has the registers for 64 x 128 sums (64 x 256
// in large.cuh), or, with Workers = 8 and 32 or 64 tokens, in half of one too (wide_blocks.cuh). A warp takes 16 rows;
// with Parts = 2 the two warpgroups have the same 64 rows, and stages in turns (shared_rows.cuh). More warps help: one
// brings everything, others add up x.
template <int Tokens, int Workers = 16, int Parts = 1>
struct Tile {
  static constexpr int kTokens = Tokens, kColumns = Tokens / 8;
  static constexpr bool kWgmma = Tokens >= 32;
  static constexpr int kWarps = kWgmma ? 8 : Workers;
  static constexpr bool kHalf = Workers == 8;
  static constexpr int kParts = Parts;                               // of K in a block
  static constexpr bool kOneTask = kWgmma && (kHalf || kParts > 1);  // whether a block has no more than a part of one
  static constexpr bool kLarge = Tokens >= 144;                      // a kernel of its own, large.cuh
  // Bytes of shared memory of a block.
  static constexpr int kShared = kHalf ? kSharedHalf : kLarge ? kSharedTwoRings : kSharedAlone;
  static constexpr int kRowTiles = kWarps / kParts;
  static constexpr int kCluster = Tokens == 256 ? 2 : 1;  // most blocks of a task that have rows of their own
  // Whether there is one for every form of weights: for powers of two. Others have none for scales finer than 128 k,
  // and none for zeros that are no whole numbers. Why not: those are hardly slower, and all of a build is to take ten
  // minutes.
  static constexpr bool kAll = (Tokens & (Tokens - 1)) == 0;
};

// Columns side by side that come to the same block, or warpgroup, where sums of a task meet: two where y is written in
// lines (lines.cuh). Why not of fewer tokens, and of 64 to 128 not with fine groups: measured on an H200, us, by
// RowsOfY and in lines: n48 int2 12288 x 2048 8.0 and 8.3, n128 uint4 in groups of 64 4608 x 3584 12.2 and 12.5, of
// 128 (int4) 11.7 and 11.4.
template <class Tile>
constexpr int columns_together(bool fine) {
  return Tile::kLarge || (Tile::kTokens >= 64 && !Tile::kHalf && !fine) ? 2 : 1;
}

constexpr int kTableBytes = 32 * 1024 + 128;  // room for the table of a codebook (dequant/codebook.cuh)

// fuses_values of a tile, whose kernel for no zeros is then for even scales; and of a kernel, without turns or not.
template <class Weight, class Act, class Tile>
constexpr bool kEven = !Weight::kFloat && !Weight::kCodebook &&
                       fuses_values(Weight::kBits, Tile::kTokens, std::is_same<Act, __half>::value);
template <class Weight, class Act, class Tile, class Form>
constexpr bool kFuses = kEven<Weight, Act, Tile> && !Form::kFine && !Form::kZeros;
template <class Weight, class Act, class Tile, class Form>
constexpr bool kFlows = kFuses<Weight, Act, Tile, Form> && Tile::kTokens <= 96;
// Whether a kernel scales values of integers in long groups, each rounded.
template <class Weight, class Act, class Tile, class Form>
constexpr bool kRoundsValues =
    kFuses<Weight, Act, Tile, Form> || (!Weight::kFloat && !Weight::kCodebook &&
                                        rounds_values(Weight::kBits, Tile::kTokens, std::is_same<Act, __half>::value));

// What a block holds of W and x at once: a stage of some steps of 128 k, as the copy engine writes it.
//
//   x      [64 k][token][128 bytes], swizzled    codes   plane by plane, [row tile][step][tile of the plane]
//   scales [row tile][group][32 bytes], then zeros alike
//
// Up to 16 tokens x is last, and sums of it behind, both as often as a block has parts of K (narrow/split.cuh).
template <class Weight, class Tile, class Form>
struct Stage {
  static constexpr int kBits = Weight::kBits;
  static constexpr bool kFine = Form::kFine, kZeros = Form::kZeros, kNarrow = !Tile::kWgmma, kHalf = Tile::kHalf;
  static constexpr bool kWhole = Form::kWhole;
  static constexpr int kRowTiles = Tile::kRowTiles, kShared = Tile::kShared, kPartsOfK = Tile::kParts;
  static constexpr int kTogether = columns_together<Tile>(kFine);
  static constexpr int kXBox = Tile::kTokens * 128;  // bytes of 64 k
  // Whether x of one row comes alone, 128 bytes of 64 k. Why not always: family decode has the other weights' products
  // of one row.
  static constexpr bool kOneRow = kNarrow && Tile::kTokens == 8 && (Weight::kFloat || Weight::kCodebook || kFine);
  static constexpr int kStepBytes = 2 * kXBox + Tile::kRowTiles * 256 * kBits;
  // Why not more of wider tiles: the first products wait for all of a stage; 10240 x 8192, 32 rows, int1 18.9 us with
  // 4, 15.2 with 2.
  static constexpr int kWideSteps = kPartsOfK == 1 && !(kBits & 8) && Tile::kShared / 5 / kStepBytes >= 2 ? 2 : 1;
  static constexpr int kSteps = kNarrow ? narrow::stage_steps(Tile::kTokens, kBits, Tile::kWarps, kFine) : kWideSteps;
  static constexpr int kX = 2 * kXBox * kSteps;
  static constexpr int kCodes = Tile::kRowTiles * 256 * kBits * kSteps;
  // Whether scales may be of fp32, groups of 32 and more then. Why not always: stages of few bits would be larger, and
  // a ring would have fewer. Tiles of wgmma that scale values would lose digits of small scales, but for those of a
  // codebook, whose largest value is 1 or more.
  static constexpr bool kFloatScales =
      Tile::kWgmma ? Weight::kCodebook || (!kFine && (Weight::kFloat || kBits >= 5)) : kFine;
  static constexpr int kScales = Tile::kRowTiles * 32 * kSteps * (kFine ? 8 : kFloatScales ? 2 : 1);  // room for them
  static constexpr int kBytes = (kX + kCodes + kScales * (kZeros ? 2 : 1) + 1023) / 1024 * 1024;      // swizzles repeat
  // Of x, for zeros: narrow/x_sums.cuh.
  static constexpr int kSums = kZeros && !kWhole ? kSteps * Tile::kTokens * 4 * (kFine ? 8 : 1) : 0;
  static constexpr int kTable = Weight::kCodebook ? kTableBytes : 0;
  // What warps make of scales and zeros, up to 16 tokens: narrow/groups.cuh. Why only of fine groups: of others a lane
  // finds them sooner.
  static constexpr int kGroups = kFine && kNarrow ? Tile::kRowTiles * 32 * (kZeros ? 16 : 8) : 0;
  static constexpr int kWeights = (kCodes + kScales * (kZeros ? 2 : 1) + 1023) / 1024 * 1024;
  static constexpr int kXAt = kNarrow ? kWeights : 0, kCodesAt = kNarrow ? 0 : kX;
  static constexpr narrow::StageBytes kParts = {kXAt, kX, kSums, 1024};
};

constexpr int kMostStages = 12;  // in a ring

// Bytes of a column of a tile, 8 tokens, of a warp's 16 rows.
constexpr int kColumnBytes = 512;

// Room for what comes to a block of more than 16 tokens where a cluster shares a task (meeting.cuh): every so-manieth
// of its columns, `together` of them side by side, from each of the others.
constexpr int meeting_room(int row_tiles, int columns, int together, int most_blocks) {
  const int units = columns / together;
  int most = 0;
  for (int blocks = 2; blocks <= most_blocks; ++blocks) {
    const int room = (blocks - 1) * row_tiles * ((units + blocks - 1) / blocks) * together * kColumnBytes;
    most = room > most ? room : most;
  }
  return most;
}

// Room for what the two warpgroups of a block give each other where they share K, and behind it for what comes to each
// from another block (shared_rows.cuh).
constexpr int kMostMeetOfParts = 2;
constexpr int rooms_of_parts(int row_tiles, int columns, int together) {
  return row_tiles * columns * kColumnBytes + 2 * meeting_room(row_tiles, columns / 2, together, kMostMeetOfParts);
}

// Where things lie in shared memory, from the first multiple of 1024.
template <class Stage>
struct Map {
  static constexpr int kFixed = 2 * 1024;  // barriers, and what lies before the first multiple of 1024
  // Where sums of parts of K meet; of wider tiles that is room for stages where they don't.
  static constexpr int kColumns = Stage::kXBox / 1024;
  static constexpr int kSums = Stage::kNarrow ? Stage::kRowTiles * Stage::kXBox / 2
                               : Stage::kPartsOfK > 1
                                   ? rooms_of_parts(Stage::kRowTiles, kColumns, Stage::kTogether)
                                   : meeting_room(Stage::kRowTiles, kColumns, Stage::kTogether, kMostMeet);
  static constexpr int kRoom =
      Stage::kShared - kFixed - Stage::kTable - Stage::kGroups - (Stage::kNarrow ? kSums : 0);  // for stages
  static constexpr int kFit = kRoom / (Stage::kNarrow ? Stage::kParts.of(1) : Stage::kBytes);
  static constexpr int kDepth = Stage::kNarrow || kFit > kMostStages ? kMostStages : kFit;  // of narrow tiles at most
  static constexpr int kMeetFit = (kRoom - kSums) / Stage::kBytes;  // of wider tiles, where sums meet behind it
  // Why an even number of many, where warpgroups have stages in turns: they wait for all stages else (wide.cuh).
  static constexpr int kMeetPlaces = Stage::kPartsOfK > 1 && kMeetFit > 8 ? kMeetFit & ~1 : kMeetFit;
  static constexpr int kMeetDepth = kMeetPlaces > kMostStages ? kMostStages : kMeetPlaces;
  static constexpr int kMetEnd = kMeetDepth * Stage::kBytes + kSums;
  static constexpr int kStages = kDepth * Stage::kBytes > kMetEnd ? kDepth * Stage::kBytes : kMetEnd;
  static constexpr int kFull = Stage::kNarrow ? kRoom : kStages;  // barriers: a stage has come
  static constexpr int kSummed = kFull + 8 * kDepth;              // its sums of x are there, up to 16 tokens
  static constexpr int kSpare = kSummed;                          // of wider tiles: nobody waits for it
  static constexpr int kEmpty = kSummed + 8 * kDepth;             // all warps have read it
  static constexpr int kMet = kEmpty + 8 * kDepth;                // all sums of parts of K are there
  static constexpr int kExchanged = kMet + 8;  // where warpgroups share K: each has what the other gave
  static constexpr int kAfter = (kMet + (Stage::kPartsOfK > 1 ? 16 : 8) + 127) / 128 * 128;
  static constexpr int kMeeting = Stage::kNarrow ? kAfter : kMeetDepth * Stage::kBytes;  // those sums
  static constexpr int kGroups = Stage::kNarrow ? kAfter + kSums : kAfter;               // what warps make of groups
  static constexpr int kTable = kGroups + Stage::kGroups;                                // of a codebook
  static_assert(kFit >= 2 && kTable + Stage::kTable + 1024 <= Stage::kShared);
  static constexpr int kEarly = narrow::early_stages(Stage::kBits);  // of wider tiles
  static_assert(kEarly <= kFit && (Stage::kNarrow || (kEarly <= kMeetDepth && kMeetDepth <= kDepth)));
};

// Everything a kernel is told but where tensors lie, and all that add_parts is; sizes are those of the unpadded
// problem.
struct Problem {
  int n, m;
  Patches patches;      // a row block and a tile of tokens make a task
  int tile_tokens;      // of each, one, or a multiple of 8 for each block: what is less is not even asked for
  MeetingDeal deal;     // of tasks to workers: blocks, or clusters of them; stages: of all of K
  int group_steps;      // step >> group_steps is a group, of at least 128
  int group_fragments;  // fragment >> group_fragments is a group
  int stage_groups;     // groups in a stage
  int group_bytes;      // of a row tile's scales: 32, or 64 of fp32
  narrow::Stages ring;  // of wider tiles: the depth, and of the split early and next_after
  int box_steps;        // and a box of their codes: how many times 128 k, or all of a warp's steps
  bool deep_x;          // whether x of a stage is one box of them
  int x_box;            // bytes of 64 k of x up to 16 tokens: Stage::kXBox, or 128 of one row
  int late;             // blocks from this one on ask for one stage early: of two each those that begin second
  int repeated;         // a block b beyond the workers does what block b & repeated does (maps.cuh)
  float* parts;  // sums of parts of tasks: [worker][first, last][block of the cluster][row tile][column][lane][4]
  void* y;
  const void* bias;
  const float* row_scales;
  const float* codebook;
  int64_t y_stride;       // elements
  bool lines;             // whether y can be written in pieces of 16 bytes (lines.cuh)
  float step, zero_base;  // value = step * (code - zero_base)
  // Of a stored zero: what it takes from codes, what it adds to scaled values; one of them is 0, or both.
  float zero_on_code, zero_on_value;
  float factor[2];   // of a finished sum, by row half
  float fused_unit;  // of fused values; `step` is in units of it
  bool bf16_scales, fp32_scales;
  ZeroKind zero_kind;
  FloatType bias_type;
};

// The same and the tensors that the copy engine reads: x, scales, zeros if there are any, then codes of each plane,
// widest first [row tile][8 bytes of it along k]. Why as many as there are: the driver keeps what a kernel is told for
// every launch of a graph, and 128 bytes for each of six tensors were most of it. The host fills in kMostMaps of them;
// a kernel sees the first ones.
template <int Maps>
struct Posed : Problem {
  CUtensorMap maps[Maps];
};
constexpr int kMostMaps = 6;
static_assert(sizeof(Posed<kMostMaps>) == sizeof(Posed<3>) + 3 * sizeof(CUtensorMap));

constexpr int kMapOfX = 0, kMapOfScales = 1, kMapOfZeros = 2;
__host__ __device__ constexpr int first_plane(bool zeros) { return zeros ? 3 : 2; }

template <class Stage>
constexpr int kMaps = first_plane(Stage::kZeros) + planes::plane_count(Stage::kBits);
template <class Stage>
using PosedOf = Posed<kMaps<Stage>>;

// The ring as narrow/worker.cuh wants it, from `base` on; of wider tiles the size of stages is known here.
template <class Stage>
struct Ring {
  using Map = gemm_sm90::Map<Stage>;
  static constexpr bool kApart = false, kSplits = Stage::kNarrow;
  static constexpr bool kSumsLast = false, kByEngine = true, kOneTask = Stage::kHalf;

  const uint32_t base;
  const narrow::Stages& stages;

  __device__ __forceinline__ int depth() const { return stages.depth; }
  __device__ __forceinline__ narrow::Place first() const { return narrow::Place(stages.depth); }
  __device__ __forceinline__ uint32_t stage(uint32_t place) const {
    return base + place * (Stage::kNarrow ? stages.bytes : Stage::kBytes);
  }
  __device__ __forceinline__ uint32_t sums(uint32_t place) const { return stage(place) + stages.sums_at; }
  __device__ __forceinline__ uint32_t groups() const { return base + Map::kGroups; }
  __device__ __forceinline__ uint32_t met() const { return base + Map::kMet; }
  __device__ __forceinline__ uint32_t meeting() const { return base + Map::kMeeting; }
  __device__ __forceinline__ uint32_t full(uint32_t place) const { return base + Map::kFull + 8 * place; }
  __device__ __forceinline__ uint32_t summed(uint32_t place) const { return base + Map::kSummed + 8 * place; }
  __device__ __forceinline__ uint32_t empty(uint32_t place) const { return base + Map::kEmpty + 8 * place; }
};

}  // namespace lowbit::gemm_sm90
