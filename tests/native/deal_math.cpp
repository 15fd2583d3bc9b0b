// Test module: csrc/templates/deal.cuh, patches.cuh, best_patch.cuh and csrc/cuda/plan.h, for tests/test_deal.py,
// tests/test_patches.py and tests/test_cuda_plan.py.
#include "templates/deal.cuh"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "cuda/plan.h"
#include "templates/best_patch.cuh"
#include "templates/decode/spread.cuh"
#include "templates/narrow/split.cuh"

namespace py = pybind11;
using lowbit::Cut;

// [worker, task, begin, end, place] of every part, in the order of each worker.
template <class AnyDeal>
static std::vector<std::array<int, 5>> parts_of(const AnyDeal& deal) {
  std::vector<std::array<int, 5>> found;
  for (int worker = 0; worker < deal.workers; ++worker) {
    const lowbit::Parts parts(deal, worker);
    for (int turn = 0; turn < parts.count; ++turn) {
      const lowbit::Part part = parts[turn];
      found.push_back({worker, part.task, part.begin, part.end, part.place});
    }
  }
  return found;
}

// workers, rounds, left, sharers, in_parts, longest; each and more of the cut; workers of a cluster.
static std::array<int, 9> numbers_of(const lowbit::MeetingDeal& d) {
  return {d.workers, d.rounds, d.left(), d.sharers, d.in_parts(), d.longest(), d.cut.each, d.cut.more, d.meet};
}

using MostOf = std::array<int, lowbit::kMostMeet + 1>;

static lowbit::MostClusters clusters_of(const MostOf& most) {
  lowbit::MostClusters clusters{};
  std::copy(most.begin(), most.end(), clusters.of);
  return clusters;
}

// is_float, codebook, fine, whole_zeros, any_zeros, shorter.
using KindNumbers = std::array<int, 6>;

static lowbit::WeightKind weight_kind(const KindNumbers& k) {
  return {k[0] != 0, k[1] != 0, k[2] != 0, k[3] != 0, k[4] != 0, k[5]};
}

namespace decode = lowbit::decode;
constexpr int kClusters[] = {132, 66, 30, 15};  // of an H200

static decode::Sharing shared(int m, int64_t n, int64_t k) {
  decode::Sharing p{};
  p.m = m, p.tiles = static_cast<int>((n + 15) / 16), p.steps = static_cast<int>((k + 127) / 128);
  return p;
}

// Of a weight beside its bits: whether it is one of floats, has zeros, how many parts of a step have scales.
using Other = std::array<int, 3>;
constexpr Other kNothing = {0, 0, 1};

static decode::WeightForm kind_of(int bits, const Other& other) {
  return {bits, other[0] != 0, other[1] != 0, other[2]};
}

template <int Tokens>
static decode::Traits traits_of(const decode::WeightForm& weight, int warps) {
  return warps == 8 ? decode::traits_of<decode::Tile<Tokens>>(weight)
                    : decode::traits_of<decode::Tile<Tokens, decode::Kind::kWhole>>(weight);
}
static decode::Traits traits_of(const decode::WeightForm& weight, int tokens, int warps) {
  return tokens == 1   ? traits_of<1>(weight, warps)
         : tokens == 2 ? traits_of<2>(weight, warps)
                       : traits_of<4>(weight, warps);
}

// Those of a Split.
using Seven = std::array<int, 7>;
static Seven numbers_of(const lowbit::Split& s) {
  return {s.row_tiles, s.parts, s.blocks, s.early, s.warps, s.next_after, s.two_each};
}
static lowbit::Split split_of(const Seven& by) { return {by[0], by[1], by[2], by[3], by[4], by[5], by[6]}; }
static Seven split_of(const decode::Sharing& p, int warps) {
  return {
      warps >> p.warps_k_shift, 1 << p.warps_k_shift, 1 << p.cluster_shift, p.early, warps, p.next_after, p.two_each};
}

// Of a weight alone. kind: 0 no zeros and even scales, 1 zero, 2 min, 3 whole, 4 no zeros and uneven scales, 5 those
// and a codebook.
static lowbit::cuda::Question question_of(int bits, bool is_float, int64_t group_size, int kind) {
  lowbit::cuda::Question q{};
  q.bits = bits, q.is_float = is_float, q.group_size = group_size, q.whole_zeros = kind == 3;
  q.even_scales = kind == 0, q.codebook = kind == 5;
  q.zero_kind = kind >= 4       ? lowbit::ZeroKind::kNone
                : q.whole_zeros ? lowbit::ZeroKind::kZero
                                : static_cast<lowbit::ZeroKind>(kind);
  return q;
}

PYBIND11_MODULE(deal_math, m) {
  m.def("parts",
        [](int tasks, int stages, int most, bool even) { return parts_of(lowbit::deal(tasks, stages, most, even)); });
  m.def("stages_of", [](int tasks, int stages, int most, bool even, int worker) {
    const lowbit::Deal deal = lowbit::deal(tasks, stages, most, even);
    return lowbit::Parts(deal, worker).stages;
  });
  m.def("deal", [](int tasks, int stages, int most, bool even) {
    return numbers_of({lowbit::deal(tasks, stages, most, even)});
  });
  m.def("deal_to_clusters", [](int tasks, int stages, int clusters, int meet) {
    return numbers_of(lowbit::deal_to_clusters(tasks, stages, clusters, meet));
  });
  m.def("parts_of_clusters", [](int tasks, int stages, int clusters, int meet) {
    return parts_of(lowbit::deal_to_clusters(tasks, stages, clusters, meet));
  });
  // most: clusters of 0 (none), 1, 2, 3, 4 blocks.
  m.def("best_deal", [](int tasks, int stages, const MostOf& most, int most_meet, int allowance) {
    return numbers_of(lowbit::best_deal(tasks, stages, clusters_of(most), most_meet, allowance));
  });
  m.def("best_deal_of_pairs", [](int pairs, int rows, int stages, const MostOf& most, int most_meet) {
    return numbers_of(lowbit::best_deal_of_pairs(pairs, rows, stages, clusters_of(most), most_meet));
  });
  m.attr("kMostMeet") = lowbit::kMostMeet;
  m.attr("kMeetSaves") = lowbit::kMeetSaves;
  m.def("spot_of", [](int task, int row_blocks, int token_tiles, int patch) {
    const lowbit::Spot spot = lowbit::Patches(row_blocks, token_tiles, patch)(task);
    return std::array<int, 2>{spot.row_block, spot.token_tile};
  });
  m.def("patch_of", lowbit::patch_of);
  // weights, x: bytes of a stage.
  m.def("best_patch", [](int row_blocks, int token_tiles, int stages, int most, float weights, float x) {
    return lowbit::best_patch({lowbit::deal(row_blocks * token_tiles, stages, most, true)}, row_blocks, token_tiles,
                              {weights, x});
  });
  // The same of clusters that share tasks left over.
  m.def("best_patch_of_clusters",
        [](int row_blocks, int token_tiles, int stages, int clusters, int meet, float weights, float x) {
          return lowbit::best_patch(lowbit::deal_to_clusters(row_blocks * token_tiles, stages, clusters, meet),
                                    row_blocks, token_tiles, {weights, x});
        });
  m.def("columns_of_each", lowbit::columns_of_each);
  m.attr("kByColumns") = lowbit::cuda::kByColumns;
  // family: 0 decode, 1 gemm_sm80, 2 gemm_sm90. kind: as of question_of.
  m.def("tile_us", [](int family, int tokens, std::array<int64_t, 3> mnk, int bits, bool is_float, bool bf16_x,
                      int64_t group_size, int kind, int capability, std::array<int, 2> clusters) {
    lowbit::cuda::Question q = question_of(bits, is_float, group_size, kind);
    q.m = mnk[0], q.n = mnk[1], q.k = mnk[2], q.bf16_x = bf16_x;
    q.capability = capability, q.clusters = clusters.data();
    return lowbit::cuda::tile_us(static_cast<lowbit::cuda::Family>(family), tokens, q);
  });
  // What a step of integers beside fp16 takes of that of exact values.
  m.def("rounded_work", [](int bits, int tokens, bool even) {
    return lowbit::cuda::rounded_work({1, 1, 1, bits, {}, nullptr, 0.0f, 1.0f, false, even}, tokens);
  });
  // What of a weight tiles of gemm_sm90 for up to 16 tokens depend on (KindNumbers), and its row of costs; of decode.
  m.def("narrow_kind", [](int bits, bool is_float, int64_t group_size, int kind) {
    const lowbit::WeightKind found = lowbit::cuda::narrow_kind(question_of(bits, is_float, group_size, kind));
    const KindNumbers numbers = {found.is_float,    found.codebook,  found.fine,
                                 found.whole_zeros, found.any_zeros, found.shorter};
    return std::tuple(numbers, lowbit::cuda::narrow_row(found));
  });
  m.def("decode_kind", [](int bits, bool is_float, int64_t group_size, int kind) {
    const decode::WeightForm found = lowbit::cuda::decode_form(question_of(bits, is_float, group_size, kind));
    return std::tuple(Other{found.is_float, found.zeros, found.units}, decode::kind_row(found));
  });
  m.def("has_kernel", [](int family, int tokens, int bits, bool is_float, bool codebook, int64_t group_size, int kind,
                         bool fp32_scales) {
    lowbit::cuda::Question q = question_of(bits, is_float, group_size, kind);
    q.codebook = codebook, q.fp32_scales = fp32_scales, q.even_scales &= !fp32_scales;
    return lowbit::cuda::has_kernel(static_cast<lowbit::cuda::Family>(family), tokens, q);
  });
  m.attr("kLast") = lowbit::cuda::kLast;
  m.attr("kNever") = lowbit::cuda::kNever;
  m.def("is_for", [](int family, int tokens, int capability) {
    return lowbit::cuda::is_for(static_cast<lowbit::cuda::Family>(family), tokens, capability);
  });
  m.def("part_of", [](int each, int more, int at) { return Cut{each, more}.part_of(at); });
  m.def("quotient", [](int all, int by) { return lowbit::quotient(all, by, lowbit::inverse_of(by)); });
  // [worker, task, begin, end, place] of every part where tasks are never cut, or by two blocks of a cluster.
  m.def("parts_of_whole", [](int tasks, int stages, int most, int blocks) {
    return parts_of(lowbit::narrow::deal_whole(tasks, stages, most, blocks));
  });
  m.def("split_of", [](int64_t tiles, int64_t steps, int tokens, int bits, int warps, std::array<int, 2> clusters,
                       uint32_t fits, KindNumbers kind) {
    const lowbit::Split split =
        lowbit::cuda::split_of({tiles, steps, tokens, bits, warps, clusters.data(), fits, weight_kind(kind)});
    return numbers_of(split);
  });
  // The same for a launch; the split of a tile of 8 tokens and half of a multiprocessor that stands where there is
  // none.
  m.def("split_for",
        [](int64_t tiles, int64_t steps, std::array<int, 2> clusters, bool planned, bool follows, const Seven& forced) {
          lowbit::Launch launch{};
          if (planned) launch.split = lowbit::cuda::plan_split;
          launch.follows = follows, launch.forced = split_of(forced);
          return numbers_of(
              lowbit::narrow::split_for(launch, {tiles, steps, 8, 4, 8, clusters.data(), ~0u}, {8, 1, 1, 1, 8, 0, 0}));
        });
  m.def("has_room", lowbit::narrow::has_room);
  // Stages that the first of two blocks each asks for early.
  m.def("half_early", [](int64_t tiles, int64_t steps, int tokens, int bits, int row_tiles,
                         std::array<int, 2> clusters) {
    return lowbit::cuda::half_of({row_tiles, 1, 1, 1, 8, 0, 1}, {tiles, steps, tokens, bits, 8, clusters.data(), ~0u})
        .early;
  });
  m.def("step_bytes", [](int bits, KindNumbers kind) { return lowbit::cuda::step_bytes(bits, weight_kind(kind)); });
  // Of split_us: steps, busy, turns, whether in parts.
  m.def("split_work", [](int64_t tiles, int64_t steps, int tokens, int bits, const Seven& split,
                         std::array<int, 2> clusters, KindNumbers kind) {
    const auto found = lowbit::cuda::work_of(
        split_of(split), {tiles, steps, tokens, bits, split[4], clusters.data(), ~0u, weight_kind(kind)});
    return std::tuple(found.steps, found.busy, found.turns, found.in_parts);
  });
  m.def("split_us", [](int64_t tiles, int64_t steps, int tokens, int bits, const Seven& split,
                       std::array<int, 2> clusters, KindNumbers kind) {
    return lowbit::cuda::split_us(split_of(split),
                                  {tiles, steps, tokens, bits, split[4], clusters.data(), ~0u, weight_kind(kind)});
  });
  m.def("start", [](int each, int more, int part) { return Cut{each, more}(part); });
  // By tiles of family decode on an H200. The split, and whether a block that is launched beyond those that share the
  // product repeats none of them, or one of another rank.
  m.def(
      "decode_split",
      [](int bits, int tokens, int m, int64_t n, int64_t k, Other other, bool follows) {
        const decode::WeightForm weight = kind_of(bits, other);
        const decode::Found found = decode::spread_by(tokens, weight, shared(m, n, k), {kClusters, true, follows});
        if (!found.spread.bytes) throw std::runtime_error("no split holds x");
        const int warps = found.whole ? 16 : 8;
        decode::Sharing p = found.spread.sharing;
        lowbit::Launch launch{};
        std::copy_n(kClusters, 4, launch.clusters), launch.overlap = true;
        const int blocks = decode::launched_blocks(traits_of(weight, tokens, warps), p, launch);
        bool lost = blocks < p.grid;
        for (int block = p.grid; block < blocks; ++block) {
          const int repeated = block & p.repeated;
          lost |= repeated >= p.grid || (block - repeated) % (1 << p.cluster_shift) != 0;
        }
        return std::tuple(split_of(p, warps), lost);
      },
      py::arg("bits"), py::arg("tokens"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("other") = kNothing,
      py::arg("follows") = true);
  // When blocks of a split by hand ask for weights, and the next kernel may begin.
  m.def("decode_when", [](int bits, int tokens, int m, int64_t n, int64_t k, const Seven& by) {
    const decode::Traits traits = traits_of(kind_of(bits, kNothing), tokens, by[4]);
    const decode::Room room{kClusters, true, true, split_of(by)};
    const decode::When found =
        decode::when(traits, decode::spread(traits, shared(m, n, k), room).sharing, kClusters[0]);
    return std::tuple(found.early, found.next_after);
  });
  // Of a split by hand: us; what it costs (struct Work), the most row tiles; none where it can't hold x.
  m.def(
      "decode_work",
      [](int bits, int tokens, int m, int64_t n, int64_t k, const Seven& by, Other other) {
        const decode::Traits traits = traits_of(kind_of(bits, other), tokens, by[4]);
        const decode::Room room{kClusters, true, true, split_of(by)};
        const decode::Spread found = decode::spread(traits, shared(m, n, k), room);
        using Numbers = std::tuple<float, int, float, int, int, int, int>;
        if (!found.bytes) return std::optional<Numbers>();
        const decode::Work work = decode::work_of(traits, found.sharing, kClusters[0]);
        return std::optional<Numbers>(
            {found.price, work.work, work.idle, work.doubled, work.steps, work.passes, found.sharing.most_tiles});
      },
      py::arg("bits"), py::arg("tokens"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("split"),
      py::arg("other") = kNothing);
}
