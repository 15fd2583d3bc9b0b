// What a warp of a warpgroup does with its 16 rows of a stage and 32 to 128 tokens: wgmma on exact or on scaled values.
#pragma once
#include "../dequant/codebook.cuh"
#include "../dequant/fused.cuh"
#include "../dequant/load.cuh"
#include "../ptx/async.cuh"
#include "../ptx/wgmma.cuh"
#include "meeting.cuh"
#include "parts.cuh"
#include "shape.cuh"
#include "shared_rows.cuh"
#include "warpgroup.cuh"

namespace lowbit::gemm_sm90 {

template <class Weight, class Act, class Tile, class Form>
struct Wide {
  using Stage = gemm_sm90::Stage<Weight, Tile, Form>;
  using Map = gemm_sm90::Map<Stage>;
  static_assert(Stage::kTogether == 1 || LinesOfStages::kBytes <= Stage::kBytes);
  // Where scales go: to values (rounds_values, and where they change within 128 k), or values stay exact numbers. With
  // few tokens there are registers for sums of 128 k of their own (struct Open); with more, sums are counted in units
  // of a scale.
  static constexpr bool kExact = !Form::kFine && !kRoundsValues<Weight, Act, Tile, Form>;
  static constexpr bool kOpen = kExact && Tile::kTokens <= 48;
  static constexpr bool kFused = kFuses<Weight, Act, Tile, Form>, kFlowing = kFlows<Weight, Act, Tile, Form>;
  static constexpr bool kTurns = !kOpen && !kFlowing;
  // Whether a factor for each fragment takes the place of shifts: it costs registers for what is left out of units.
  static constexpr bool kPlaced = kExact && !Weight::kFloat && !Weight::kCodebook && Weight::kBits <= (kOpen ? 3 : 1);
  using Decoder = std::conditional_t<
      kPlaced, PlacedDecoder<Weight, Act, Form::kZeroForm>,
      std::conditional_t<kFused, FusedDecoder<Weight>, ScaledDecoder<Weight, Act, Form::kZeroForm, kExact>>>;
  using Words = typename Decoder::Words;
  using Group = typename Decoder::Group;
  static constexpr int kColumns = Tile::kColumns;
  static constexpr int kBits = Weight::kBits;
  // Whether the last stage of a task is given back only when y has gone through it.
  static constexpr bool kLate = Stage::kTogether > 1 && !Tile::kOneTask;
  static constexpr bool kSums = false;
  // Whether warpgroups that have every second stage use the same places, and wait for each other's stages. Why: who
  // waits for a phase must have waited for the one before, or that before it is taken for the one that it waits for.
  static constexpr bool kWaitsForAll = Tile::kParts > 1 && Map::kMeetDepth % 2 == 1;

  const Problem& p;
  const uint32_t base;
  const int warp, part_of_k, lane;  // warp: its row tile
  const Decoder decoder;
  const LanePlaces<Stage> places;

  __device__ Wide(const Problem& problem, uint32_t shared, int own_warp, int own_lane)
      : p(problem),
        base(shared),
        warp(Tile::kParts == 1 ? own_warp : own_warp % Tile::kRowTiles),
        part_of_k(Tile::kParts == 1 ? 0 : own_warp / Tile::kRowTiles),
        lane(kOpen ? own_lane : __shfl_sync(~0u, own_lane, own_lane)),  // Why: else it is read anew in every step
        decoder(make_decoder<Weight, Decoder>(shared + Map::kTable, own_lane, problem.step, problem.zero_base,
                                              problem.zero_on_code)),
        places(problem, warp, own_lane) {}

  static constexpr float unit(int /*h*/) { return 1.0f; }
  static __device__ __forceinline__ int meeting_bytes(const Problem& p) {
    return Meeting<Tile, Stage::kTogether>::bytes(p.deal.meet);
  }

  using Fragments = uint32_t[2][4][4];  // of 64 k each
  using Sums = float[Tile::kTokens / 2];
  // Sums of 128 k, whose products may still run, and their scales.
  struct Open {
    Sums sum = {};
    float scale[2] = {};
  };
  using State = std::conditional_t<kOpen, Open, Units>;

  __device__ __forceinline__ Words load_words(uint32_t codes, int step) const {
    Words words;
    lowbit::load_words<Stage, Tile>(codes, step, [&](int log) { return places.words[log]; }, words);
    return words;
  }

  // Of a step.
  __device__ __forceinline__ Group load_group(uint32_t codes, int step) const {
    const int group = step >> p.group_steps;
    const int bytes = kFused ? 32 : group_bytes<Stage>(p);  // fused ones have scales of 16 bits
    return lowbit::load_group<Stage>(p, decoder, codes + places.scales + group * bytes);
  }

  // Groups of a step: lane 8 i + g finds those of fragments 2 i and 2 i + 1.
  __device__ __forceinline__ void find_groups(uint32_t codes, int step, Group (&own)[2]) const {
    const auto find = [&](int i) {
      const int group = (step * 8 + lane / 8 * 2 + i) >> p.group_fragments;
      return load_own_group<Stage>(p, decoder, codes, warp, group, lane);
    };
    own[0] = own[1] = find(0);
    if (p.group_fragments == 0) own[1] = find(1);
  }

  // Products of fragments of 64 k; they begin sums if `begin`.
  __device__ __forceinline__ void multiply(const uint32_t (&a)[4][4], uint64_t tokens, Sums& sum,
                                           bool begin = false) const {
    ptx::begin_products();
    ptx::wgmma<Act, Tile::kTokens>(sum, a, tokens, begin ? 0 : 1);
    ptx::commit_products();
  }

  // Fragments of 64 k are made while the products of the 64 before still run, also those of the stage before:
  // finished() is called when the latter are done. The last 64 still run when this returns.
  template <class Finished>
  __device__ __forceinline__ void run_stage(uint32_t stage, const Turns& turns, Fragments& a, State& units, Sums& sum,
                                            const Finished& finished) const {
    const uint32_t codes = stage + Stage::kX;
    const uint64_t tokens = ptx::describe_tokens(stage);
#pragma unroll
    for (int step = 0; step < Stage::kSteps; ++step) {
      Words words = load_words(codes, step);
      Group group;
      float ratio[2];
      if constexpr (!Form::kFine) group = load_group(codes, step);
      if constexpr (kExact) {
        units.move_on(group, ratio);
        if constexpr (kPlaced) Decoder::leave_out(group, words);
      }
      Group own[2];
      if constexpr (Form::kFine) find_groups(codes, step, own);
      const auto make_half = [&](int half) {
#pragma unroll
        for (int f = 0; f < 4; ++f) {
          if constexpr (Form::kFine) group = Decoder::of_lane(own[f % 2], (half * 2 + f / 2) * 8 + lane / 4);
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

  // The same where values are scaled and nothing is done to sums between products: half of a step is made while the
  // products of the half before run, without turns.
  template <class Finished>
  __device__ __forceinline__ void run_stage_flowing(uint32_t stage, Fragments& a, Sums& sum,
                                                    const Finished& finished) const {
    const uint32_t codes = stage + Stage::kX;
    const uint64_t tokens = ptx::describe_tokens(stage);
#pragma unroll
    for (int step = 0; step < Stage::kSteps; ++step) {
      const Words words = load_words(codes, step);
      const Group group = load_group(codes, step);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::wait_products<1>();
        if (step == 0 && half == 1) finished();
#pragma unroll
        for (int f = 0; f < 4; ++f) decoder.fragment(words, half * 4 + f, group, a[half][f]);
        multiply(a[half], tokens + (step * 2 + half) * Stage::kXBox / 16, sum);
      }
    }
  }

  // The same with open sums: those of a step are added when all its products are done.
  template <class Finished>
  __device__ __forceinline__ void run_stage_open(uint32_t stage, Fragments& a, State& open, Sums& sum,
                                                 const Finished& finished) const {
    const uint32_t codes = stage + Stage::kX;
    const uint64_t tokens = ptx::describe_tokens(stage);
#pragma unroll
    for (int step = 0; step < Stage::kSteps; ++step) {
      const Words words = load_words(codes, step);
      const Group group = load_group(codes, step);
      ptx::wait_products<1>();
#pragma unroll
      for (int f = 0; f < 4; ++f) decoder.fragment(words, f, group, a[0][f]);
      ptx::wait_products<0>();
      if (step == 0) finished();
      add_open(open, sum);
      multiply(a[0], tokens + step * 2 * Stage::kXBox / 16, open.sum, true);
#pragma unroll
      for (int f = 0; f < 4; ++f) decoder.fragment(words, 4 + f, group, a[1][f]);
      multiply(a[1], tokens + (step * 2 + 1) * Stage::kXBox / 16, open.sum);
      open.scale[0] = group.on_sums[0], open.scale[1] = group.on_sums[1];
    }
  }

  // Of products that are done.
  static __device__ __forceinline__ void add_open(State& open, Sums& sum) {
    ptx::settle(open.sum);
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 2; ++i) sum[i] = fmaf(open.scale[i / 2 % 2], open.sum[i], sum[i]);
  }

  __device__ __forceinline__ void run(const Parts& parts) const {
    const Turns turns(Tile::kParts == 1 ? warp : 4 * part_of_k);
    if (kTurns) turns.begin();
    auto place = Ring<Stage>{base, p.ring}.first(), between = place;  // between: that of the stage before
    if (part_of_k) place.next();
    uint32_t before = 0, used;  // the place whose products may still run; where its barriers begin
    const int count = Tile::kOneTask ? 1 : parts.count;
    const auto release = [&] {
      if (lane == 0) ptx::arrive(used + Map::kEmpty);
    };
#pragma unroll 1
    for (int turn = 0; turn < count; ++turn) {
      const Part part = parts[turn];
      Sums sum = {};
      State state;
      Fragments a;
      used = base + Map::kSpare - Map::kEmpty;  // Why a spare barrier: so much less is asked in every step
#pragma unroll 1
      for (int at = part.begin + part_of_k; at < part.end; at += Tile::kParts) {
        const uint32_t own = base + 8 * place.index;
        if (kWaitsForAll && at > part.begin) ptx::wait_arrivals(base + Map::kFull + 8 * between.index, between.parity);
        ptx::wait_arrivals(own + Map::kFull, place.parity);
        const uint32_t stage = base + place.index * Stage::kBytes;
        const auto& finished = release;
        if constexpr (kFlowing) {
          run_stage_flowing(stage, a, sum, finished);
        } else if constexpr (kOpen) {
          run_stage_open(stage, a, state, sum, finished);
        } else {
          run_stage(stage, turns, a, state, sum, finished);
        }
        before = place.index, used = own;
        place.next();
        between = place;
        if (Tile::kParts > 1) place.next();
      }
      // What of the end does not depend on products: they still run. Why the ring: all that came to it is used by then.
      int own_lane = lane;
      ptx::hold_below<32>(own_lane);  // Why: else what follows from it would be found before all tasks, and kept
      const Spot spot = p.patches(part.task);
      const int first_tile = spot.row_block * Tile::kRowTiles + (Tile::kParts == 1 ? warp / 4 * 4 : 0);
      auto rows = rows_of_y<Act, Tile, Stage::kTogether>(p, Tile::kParts == 1 ? base + before * Stage::kBytes : base,
                                                         first_tile * 16, spot.token_tile * p.tile_tokens,
                                                         4 * part_of_k + warp, own_lane);
      ptx::wait_products<0>();
      // Why early: without it ptxas runs open products one after the other.
      if (!kLate) release();
      float unit[2] = {1.0f, 1.0f};  // that sums are counted in
      if constexpr (kOpen) {
        add_open(state, sum);
        unit[0] = unit[1] = decoder.factor();
      } else if constexpr (kExact) {
        unit[0] = state.now[0] * decoder.factor(), unit[1] = state.now[1] * decoder.factor();
      } else if constexpr (kFused) {
        ptx::settle(sum);
        unit[0] = unit[1] = p.fused_unit;
      }
      if constexpr (Tile::kParts > 1) {
        count_out(unit, sum);
        if (kTurns) turns.end(parts.stages % 2);
        finish_shared_rows<Tile, Stage>(p, base, rows, warp, part_of_k, lane, sum);
      } else if (!Tile::kOneTask && p.deal.meet == 1 && part.end - part.begin < p.deal.stages) {
        count_out(unit, sum);
        keep_part<Tile>(p, blockIdx.x, part.place, 0, warp, lane, [&](int c, int i) { return sum[4 * c + i]; });
      } else {
        finish_task<Tile, Stage::kTogether>(p, part, base + Map::kMeeting, base + Map::kMet, rows, warp, lane, unit,
                                            sum);
      }
      if constexpr (kLate) {
        ptx::end_reads();
        __syncwarp();
        release();
      }
    }
    if (kTurns && Tile::kParts == 1) turns.end();
  }
};

}  // namespace lowbit::gemm_sm90
