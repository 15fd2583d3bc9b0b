// The cheapest way in which blocks of family decode share a product, by costs measured on an H200. Plain arithmetic
// that compiles for the host too.
#pragma once
#include <algorithm>
#include <cstdint>

#include "sharing.cuh"

namespace lowbit::decode {

inline int64_t weight_bytes(const Sharing& p, int bits) { return int64_t{p.tiles} * p.steps * (256 * bits + 32); }

// What a product takes by a split, about, in us: a start; the greater of products and memory, and more where the other
// is nearly as much; x of a block; sums of tiles, passes and clusters. Warps multiply whole turns and row tiles side by
// side, also where some are not there; memory brings less where multiprocessors stay idle, or read many places at once.
// Fitted by benchmarks/fit_decode_costs.py to products on an H200 (660 of 1, 2 and 4 rows by all tiles that hold them,
// 30 shapes from 1024 x 4096 to 152064 x 3584, int1 to int8; nvidia-h200/sweep_splits_20261128_decode*.json,
// _passes*.json, 20261129_two_each.json); products of 6 bits by halves and two each, and of 3 bits, one and two tokens,
// by hand to sweep_splits_20261129_int6.json and 20261130_int3.json. kCostsTwo: of two blocks of half of a
// multiprocessor on each.
struct Costs {
  float start[3];                 // by tokens: 1, 2, 4
  float product[3][8];            // of a row tile x 128 k, by bits, where each scheduler has a warp
  float memory;                   // bytes of all weights in a us
  float idle, groups;             // what they take more: by half of the multiprocessors, by twice the row groups
  float both;                     // of the lesser of products and memory, times its share of the greater
  float x, row;                   // of 128 k: of a token that there may be, of a row that is there
  float sums, pass;               // of a tile, of each pass but the first
  float cluster[kMostShift + 1];  // of 1, 2, 4, 8 blocks; the less the longer a product takes, by `fades`
  float fades;
};
constexpr Costs kCostsHalf = {{1.06f, 1.07f, 1.05f},
                              {{0.0407f, 0.0441f, 0.0698f, 0.0696f, 0.0962f, 0.132f, 0.151f, 0.123f},
                               {0.0464f, 0.0475f, 0.0773f, 0.0723f, 0.0946f, 0.148f, 0.140f, 0.137f},
                               {0.0513f, 0.0535f, 0.0792f, 0.0953f, 0.120f, 0.145f, 0.162f, 0.172f}},
                              5.11e6f,
                              0.128f,
                              0.0202f,
                              0.306f,
                              0.00151f,
                              0.00797f,
                              0.0666f,
                              0.345f,
                              {1.02f, 0.893f, 5.89f, 6.70f},
                              9.30f};
constexpr Costs kCostsWhole = {{0.345f, 0.172f, 0.106f},
                               {{0.0344f, 0.0304f, 0.0474f, 0.0384f, 0.0663f, 0.0593f, 0.0877f, 0.0538f},
                                {0.0398f, 0.0348f, 0.0554f, 0.0466f, 0.0578f, 0.0734f, 0.0991f, 0.0505f},
                                {0.0472f, 0.0430f, 0.0552f, 0.0494f, 0.0623f, 0.0630f, 0.0837f, 0.0827f}},
                               4.78e6f,
                               0.149f,
                               0.0153f,
                               0.426f,
                               0.00103f,
                               0.00588f,
                               0.0706f,
                               0.276f,
                               {1.54f, 1.99f, 2.48f, 2.67f},
                               0.0938f};
constexpr Costs kCostsTwo = {{0.205f, 0.0431f, 0.0678f},
                             {{0.0385f, 0.0360f, 0.0533f, 0.0446f, 0.0720f, 0.0669f, 0.0912f, 0.0586f},
                              {0.0414f, 0.0391f, 0.0627f, 0.0499f, 0.0725f, 0.0900f, 0.0935f, 0.0601f},
                              {0.0482f, 0.0373f, 0.0597f, 0.0612f, 0.0696f, 0.0757f, 0.102f, 0.118f}},
                             5.13e6f,
                             0.223f,
                             0.0528f,
                             0.350f,
                             0.00229f,
                             0.0131f,
                             0.129f,
                             0.213f,
                             {2.27f, 2.68f, 2.94f, 4.94f},
                             0.576f};

// By kinds of blocks: of half of a multiprocessor, of all of it, two of half of it on each.
constexpr Costs kCosts[3] = {kCostsHalf, kCostsWhole, kCostsTwo};

// What other weights cost beside integers without zeros in groups of 128 k or more: of a row tile x 128 k, by kinds of
// blocks as in kCosts, and tokens; x times so much; at the start. Why added, not times: scales and zeros take as many
// instructions whatever the width is. Fitted by benchmarks/fit_kind_costs.py beside n8 (sweep_splits_20261128_kinds*,
// of two each 20261129_two_each_of_kinds); of 486 products, large N measured again (_large_kinds.json), 1.2% lost to
// the fastest tile and split, 20% at worst. The start of float4_e2m1 in groups of 32 and 64 is less than what was
// fitted, 0.87, by which n8 took 4096 x 4096 in groups of 32 (4.5 us for 4.2).
struct KindCosts {
  float product[3][3], x, start;
};
constexpr KindCosts kKindCosts[] = {
    // zeros
    {{{0.00689f, 0.00493f, 0.00742f}, {0.00286f, 0.00561f, 0.00811f}, {0.00849f, 0.00655f, 0.00700f}},
     1.05f,
     -0.000647f},
    // short groups of one row
    {{{0.0242f, 0.0f, 0.0f}, {0.0203f, 0.0f, 0.0f}, {0.0407f, 0.0f, 0.0f}}, 0.393f, 0.153f},
    // and zeros
    {{{0.0334f, 0.0f, 0.0f}, {0.0306f, 0.0f, 0.0f}, {0.0235f, 0.0f, 0.0f}}, 1.12f, 0.188f},
    // floats of 3 bits, which with integers of 3 bits come to what was fitted before these had stages of two steps
    {{{0.0438f, 0.0374f, 0.0298f}, {0.0446f, 0.0428f, 0.0400f}, {0.0596f, 0.0511f, 0.0539f}}, 1.12f, 0.0596f},
    // of 4 bits
    {{{0.0437f, 0.0479f, 0.0246f}, {0.0423f, 0.0477f, 0.0436f}, {0.0596f, 0.0612f, 0.0468f}}, 0.695f, 0.727f},
    // in groups of 32 and 64
    {{{0.0556f, 0.0f, 0.0f}, {0.0616f, 0.0f, 0.0f}, {0.0815f, 0.0f, 0.0f}}, 0.890f, 0.500f},
    // of 16
    {{{0.0739f, 0.0f, 0.0f}, {0.0715f, 0.0f, 0.0f}, {0.0935f, 0.0f, 0.0f}}, 0.608f, 0.511f},
    // of more bits
    {{{0.0494f, 0.0353f, 0.0141f}, {0.0367f, 0.0482f, 0.0194f}, {0.0745f, 0.0468f, 0.0154f}}, 0.445f, 1.59f},
};
constexpr KindCosts kPlain = {{}, 1.0f, 0.0f};

// The row of kKindCosts, -1 of weights that cost what such integers do.
constexpr int kind_row(const WeightForm& weight) {
  if (!weight.is_float) return weight.units > 1 ? 1 + weight.zeros : weight.zeros ? 0 : -1;
  return weight.bits == 3 ? 3 : weight.bits > 4 ? 7 : weight.units == 1 ? 4 : weight.units == 4 ? 5 : 6;
}
constexpr const KindCosts& kind_costs(const WeightForm& weight) {
  const int row = kind_row(weight);
  return row < 0 ? kPlain : kKindCosts[row];
}

// Of a split, what these cost: work: of the busiest scheduler, row tiles x 128 k; others: idle blocks over busy ones;
// doubled: log2 of the row groups of a multiprocessor, or of a half that is alone; steps: of 128 k that a block has x
// of.
struct Work {
  int work;
  float idle;
  int doubled, steps, passes;
};
inline Work work_of(const Traits& traits, const Sharing& p, int blocks) {
  const int steps = p.slices.each + (p.slices.more > 0);
  const int turns = (steps + traits.turn - 1) / traits.turn, tiles = (p.most_tiles + traits.rows - 1) / traits.rows;
  return {turns * traits.turn * tiles * traits.rows * (traits.warps / 4 << p.two_each),
          static_cast<float>(blocks << p.two_each) / static_cast<float>(p.grid) - 1.0f,
          (traits.whole() ? 4 : 3) + p.two_each - p.warps_k_shift, steps << p.warps_k_shift,
          (p.most_tiles + p.pass_tiles - 1) / p.pass_tiles - 1};
}

// Of 3 bits in short groups, whose stages have one step still, what they take more than kCosts says: one row, by kinds
// of blocks.
constexpr float kOneStep[3] = {0.0062f, -0.0031f, 0.0027f};

inline float cost(const Traits& traits, const Sharing& p, int blocks) {
  const int kind_of_blocks = traits.whole() ? 1 : 2 * p.two_each;
  const Costs& costs = kCosts[kind_of_blocks];
  const Work found = work_of(traits, p, blocks);
  const int own = traits.tokens / 2;
  const float memory = static_cast<float>(weight_bytes(p, traits.weight.bits)) / costs.memory *
                       (1.0f + costs.idle * found.idle) * (1.0f + costs.groups * static_cast<float>(found.doubled));
  const KindCosts& kind = kind_costs(traits.weight);
  float product = costs.product[own][traits.weight.bits - 1] + kind.product[kind_of_blocks][own];
  if (traits.weight.bits == 3 && traits.weight.units > 1) product += kOneStep[kind_of_blocks];
  const float products = static_cast<float>(found.work) * product;
  const float most = std::max(products, memory), least = std::min(products, memory);
  const float x = (costs.x * static_cast<float>(traits.tokens) + costs.row * static_cast<float>(p.m)) * kind.x;
  return costs.start[own] + kind.start + most + costs.both * least * least / most +
         x * static_cast<float>(found.steps) + costs.sums * static_cast<float>(p.most_tiles) +
         costs.pass * static_cast<float>(found.passes) + costs.cluster[p.cluster_shift] / (1.0f + costs.fades * most);
}

// Whether K is so long that clusters of 4 and 8 blocks are thought of: x of all of it takes a block's time, and its
// memory. Why not always: nothing gains with fewer k, and each is one more split to look at. Why not of floats that are
// no bytes: not timed.
inline bool has_many_steps(const Traits& traits, const Sharing& p) { return p.steps >= 40 && traits.weight.by_bytes(); }
// The most row groups of a block.
constexpr int kMostGroups = 8;

// How many stages a warp asks for early, and when the next kernel may begin (Split::early, next_after).
struct When {
  int early, next_after;
};
// Where a ring holds all of a warp's weights, or nearly, they are all asked for early, and the next kernel begins at
// once: the time of small products is that of one launch after the other. Else the weights of the next one are to come
// when most of these have; x stands behind what is asked for early. Measured on an H200: of 465 splits of half of a
// multiprocessor, each by 7 to 28 pairs of these, this is 1.0% slower than the best pair on average
// (nvidia-h200/sweep_splits_20261128_decode.json, _decode_when.json); by what came before 1.9%; us before and now: one
// row, 8192 x 8192 W2 6.0 and 5.5, 4096 x 4096 W6 4.8 and 4.5, 8192 x 3584 W4 5.4 and 4.7.
inline When when(const Traits& traits, const Sharing& p, int blocks) {
  const int bits = traits.weight.bits;
  if (traits.whole()) {
    const bool two = bits == 3 ? !traits.by_two_steps() : bits == 5 || bits == 6;
    return {traits.weight.by_bytes() && two ? 2 : 1, 0};
  }
  const int64_t bytes = weight_bytes(p, bits) / blocks;  // of a multiprocessor
  if (p.two_each) {
    // By all that a ring holds and by three (two) stages (sweep_splits_20261129_two_each.json), the best splits, one
    // row, us: 3584 x 14336 int7 12.2 and 13.0, 4096 x 4096 int8 5.4 and 5.0, 8192 x 8192 int2 6.4 and 6.0.
    // Of 6 bits, whose rings hold six stages of one row tile (sweep_splits_20261129_int6.json), by 2, 3, 4 and all:
    // 4608 x 3584 4.64, 4.81, 5.02, 5.09; 6144 x 4096 5.75, 5.66, 5.91, 6.13; 8192 x 8192 13.6, 13.4, 13.3, 13.4.
    // Of 3 bits, whose stages have two steps, one: by two, one row, 8192 x 8192 7.77 us for 7.33, 4096 x 14336 7.84
    // for 7.23 (sweep_splits_20261130_int3.json).
    if (traits.by_two_steps()) return {1, 0};
    if (bits == 6 && traits.tokens <= 2) return {bytes <= 120'000 ? 2 : bytes <= 200'000 ? 3 : 4, 0};
    const bool few = bits == 3 || bits == 5 || bytes <= (traits.tokens == 4 ? 350'000 : 180'000);
    return {!few ? kAllEarly : traits.tokens == 1 ? 3 : 2, 0};
  }
  // Why late: clusters of a next launch that begins early take the places of this one's, two blocks on a
  // multiprocessor. 3584 x 14336, two rows, W1 by (8, 6) 7.3 us, by this 5.5; 2560 x 9728 5.9 and 4.6.
  if (p.cluster_shift > 1) return {2, 8};
  const int tiles = (p.most_tiles + traits.rows - 1) / traits.rows, steps = p.slices.each + (p.slices.more > 0);
  const int stages = tiles * ((steps + traits.stage_steps - 1) / traits.stage_steps);
  // Why one of 3 bits: of 260 splits of one and two rows (sweep_splits_20261130_int3.json) it is 0.5% slower than the
  // best pair on average, others 2.4 to 3.7; but where a ring holds all, 4096 x 4096, it takes 3.2 us and (4, 0) 2.9.
  if (traits.by_two_steps() && stages >= traits.depth) return {1, 0};
  // Why as many stages as a ring has, too: all of them are asked for then (resident.cuh).
  if (stages < traits.depth + (bits == 5 && traits.tokens <= 2) || bytes <= 61'000) return {4, 0};
  if (traits.tokens == 4) return {bytes <= 97'000 ? 2 : 1, 0};
  if (bytes > 270'000) return {1, 0};
  return {2, bytes <= 90'000 ? 0 : bytes <= 145'000 ? 5 : 7};
}

// Stages where the launch does not follow one of lowbit's; early: where it does. Why three of two each with one row and
// more bytes, by one, three and all: int4 at 10240 x 8192 14.1, 13.8, 13.9 us, at 6144 x 4096 6.1, 7.3, 7.6.
inline int early_alone(const Traits& traits, const Sharing& p, int blocks, int early) {
  const bool many = p.two_each && traits.tokens == 1 && weight_bytes(p, traits.weight.bits) / blocks > 180'000;
  return many ? std::min(early, 3) : kEarlyAlone;
}

// Whether a product that the plan gives two blocks on each multiprocessor takes one of all of it where the launch does
// not follow one of lowbit's: then there is no launch before it that they overlap with. The slices of K, and with them
// the bits, are the same. Measured on an H200 behind a small kernel of torch, us (two_each_alone_20261129.json,
// integers in groups of 128, 124 products; _kinds, other weights, 83): int4 with one row, 4096 x 14336 10.4 and 10.1,
// 28672 x 4096 18.2 and 17.9; uint4 in groups of 32 there 21.7 and 20.9. Why not four rows, or 5 to 7 bits with zeros:
// int2 at 34816 x 5120 with four 17.4 and 18.2, uint7 at 4096 x 14336 16.5 and 16.7. Why not floats: few have two each.
inline bool is_whole_alone(const Traits& traits, const Sharing& p) {
  const WeightForm& weight = traits.weight;
  // Why not these, n from k to 5.5 k: they look like queries and gates, whose keys and up projections may follow at
  // once, with nothing to overlap with then. A layer of Llama 3 with all of these apart, one row: 8B, int4, 48.9 us, by
  // whole blocks 49.8; 70B, int8, 217.1 and 218.4. Those of down projections, and of gates and ups in one, are others.
  const bool may_go_on = p.tiles >= 8 * p.steps && p.tiles < 44 * p.steps;
  const bool slower = weight.is_float || (weight.zeros && weight.bits >= 5 && weight.bits <= 7) || may_go_on;
  return p.two_each && traits.tokens <= 2 && !slower;
}

// What is known of a device: clusters as of Launch; overlap: whether launches do; follows: as of Launch. forced: a
// split by hand.
struct Room {
  const int* clusters;
  bool overlap, follows;
  Split forced{};
};

// A product as it is shared, what it takes of a block's shared memory (0: nothing fits), and what that costs.
struct Spread {
  Sharing sharing;
  int bytes;
  float price;  // us, about
};

// The cheapest split, or as it is forced. Three rows are shared as four are. Why: what has room for three alone was not
// timed; 2560 x 9728 W4 by 2 x 4 x 8 7.1 us, by n8 5.8.
inline Spread spread(const Traits& traits, Sharing p, const Room& room) {
  const Split& forced = room.forced;
  Spread best{};
  if (forced.parts && (forced.warps != traits.warps || forced.row_tiles * forced.parts != traits.warps)) return best;
  const int m = p.m;
  if (m == 3 && !forced.parts) p.m = 4;
  // Clusters came with compute capability 9.0, like launches that overlap.
  const bool many = has_many_steps(traits, p);
  const int most_shift = !room.overlap ? 0 : many || forced.parts ? kMostShift : 1;
  // Why not fewer rows of x than make a tile worth it: these were not timed. 8192 x 8192, int6, one row by n2 13.8 us,
  // by all of a multiprocessor 13.3.
  const bool may_have_two =
      room.overlap && !traits.whole() && (forced.parts ? forced.two_each : p.m > traits.tokens / 2);
  for (int cluster_shift = most_shift; cluster_shift >= 0; --cluster_shift) {
    const int clusters = room.clusters[cluster_shift];
    if (!clusters || (forced.parts && forced.blocks != 1 << cluster_shift)) continue;
    for (int warps_k_shift = 0; (1 << warps_k_shift) <= traits.warps; ++warps_k_shift) {
      const int groups = traits.warps >> warps_k_shift;
      if (forced.parts ? forced.parts != 1 << warps_k_shift : groups > kMostGroups) continue;
      for (const bool two_each : {false, true}) {
        if (two_each ? !may_have_two : forced.two_each) continue;
        Sharing found = p;
        const int need = share(traits, found, cluster_shift, warps_k_shift, clusters, two_each);
        if (!need) continue;
        const float price = cost(traits, found, room.clusters[0]);
        if (best.bytes && price >= best.price) continue;
        best = {found, need, price};
      }
    }
  }
  if (!best.bytes) return best;
  Sharing& sharing = best.sharing;
  sharing.m = m;
  best.bytes = share(traits, sharing, sharing.cluster_shift, sharing.warps_k_shift,
                     room.clusters[sharing.cluster_shift], sharing.two_each);
  When own = forced.parts ? When{forced.early, forced.next_after} : when(traits, sharing, room.clusters[0]);
  if (!forced.parts && !room.follows) own.early = early_alone(traits, sharing, room.clusters[0], own.early);
  sharing.early = own.early, sharing.next_after = own.next_after;
  return best;
}

// The same by blocks of one of two kinds: the cheaper one. Whole ones gain by twice as many warps what it costs them
// that the next launch can't start early.
struct Found {
  bool whole;
  Spread spread;
};
inline Found spread_either(const Traits& half, const Traits& whole, const Sharing& p, const Room& room) {
  const Spread by_half = spread(half, p, room), by_whole = spread(whole, p, room);
  const bool is_whole = !by_half.bytes || (by_whole.bytes && by_whole.price < by_half.price);
  if (!is_whole && !room.follows && !room.forced.parts && is_whole_alone(half, by_half.sharing)) {
    Room alone = room;
    const int parts = 1 << by_half.sharing.warps_k_shift;
    alone.forced = {whole.warps / parts, parts, 1 << by_half.sharing.cluster_shift, kEarlyAlone, whole.warps, 0, 0};
    if (const Spread found = spread(whole, p, alone); found.bytes) return {true, found};
  }
  return {is_whole, is_whole ? by_whole : by_half};
}

// What a weight takes by a tile of so many tokens, for a plan.
template <int Tokens>
inline Found spread_by(const WeightForm& weight, const Sharing& p, const Room& room) {
  return spread_either(traits_of<Tile<Tokens>>(weight), traits_of<Tile<Tokens, Kind::kWhole>>(weight), p, room);
}
inline Found spread_by(int tokens, const WeightForm& weight, const Sharing& p, const Room& room) {
  return tokens == 1   ? spread_by<1>(weight, p, room)
         : tokens == 2 ? spread_by<2>(weight, p, room)
                       : spread_by<4>(weight, p, room);
}

}  // namespace lowbit::decode
