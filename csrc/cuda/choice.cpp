#include "choice.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "check_product.h"
#include "matmul.h"

namespace lowbit::cuda {
namespace {

// What lines of a table have in common: all that a question has but m and the pairs of blocks.
using Key = std::array<int64_t, 9>;

Key key_of(int weight, int act, const Question& q) {
  const int64_t zeros = q.whole_zeros ? kWholeZeros : static_cast<int64_t>(q.zero_kind);
  return {weight, act, q.n, q.k, q.group_size, zeros, q.fp32_scales, q.capability, q.clusters[0]};
}

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t mixed = 0;
    for (const int64_t part : key) mixed = (mixed ^ static_cast<uint64_t>(part)) * 0x9E3779B97F4A7C15u;
    return mixed ^ mixed >> 32;
  }
};

struct Range {
  int64_t least, most;
  const ProductRow* row;
};
using Table = std::unordered_map<Key, std::vector<Range>, Hash>;

// The lines in use; null: none. A table never changes once it is here, and is never deleted: a product may be reading.
std::atomic<const Table*> tuned_table{nullptr};

const ProductRow* find(const Table& table, const Key& key, int64_t m) {
  const auto found = table.find(key);
  if (found == table.end()) return nullptr;
  const auto& ranges = found->second;
  const auto holds = [m](const Range& range) { return m >= range.least && m <= range.most; };
  const auto last = std::find_if(ranges.rbegin(), ranges.rend(), holds);
  return last == ranges.rend() ? nullptr : last->row;
}

const std::unordered_map<std::string_view, const ProductRow*>& rows_by_name() {
  static const auto* rows = [] {
    auto* made = new std::unordered_map<std::string_view, const ProductRow*>;
    for (int weight = 0; weight < kKernelTypes; ++weight)
      for (int act = 0; act < kActTypes; ++act)
        for (const ProductRow* row : product_tiles(weight, act)) made->emplace(row->name, row);
    return made;
  }();
  return *rows;
}

bool is_whole(int64_t value, int64_t least, int64_t most) { return value >= least && value <= most; }

// The kernel of a line; null where it may not run what the line is for.
const ProductRow* row_of(const TunedChoice& line) {
  if (!line.kernel || !is_whole(line.weight, 0, kWeightTypes - 1) || !is_whole(line.zero_kind, 0, kWholeZeros) ||
      !(line.group_size == -1 || is_whole(line.group_size, 16, 256)) || !is_whole(line.n, 1, kSizeLimit - 1) ||
      !is_whole(line.k, 1, kSizeLimit - 1) || !is_whole(line.least, 1, line.most) ||
      !is_whole(line.capability, 0, 1000) || !is_whole(line.blocks, 0, 1 << 20))
    return nullptr;
  const auto found = rows_by_name().find(line.kernel);
  if (found == rows_by_name().end()) return nullptr;
  const ProductRow* row = found->second;
  if (row->weight != line.weight || row->act != line.act) return nullptr;
  Weight w{};
  w.n = line.n, w.k = line.k, w.group_size = line.group_size;
  // Why even: a line is for all weights of a kind, and with these more tiles round values.
  set_zero_kind(w, line.zero_kind == 0 ? kEvenScales : line.zero_kind);
  const int clusters[] = {static_cast<int>(line.blocks), 0}, capability = static_cast<int>(line.capability);
  const Question q = question(w, row->weight, row->act, line.least, capability, clusters);
  const bool fits = line.most <= row->tokens || repeats(row->family, row->tokens);
  const bool runs = is_for(row->family, row->tokens, capability) && has_kernel(row->family, row->tokens, q);
  return fits && runs && !rounds_few(row->tokens, q) ? row : nullptr;
}

Choice choose_anew(int weight, int act, const Question& q, const Table* table) {
  if (table)
    if (const ProductRow* row = find(*table, key_of(weight, act, q), q.m)) return {row, true};
  const ProductRow* best = nullptr;
  float least = kNever;
  for (const ProductRow* row : product_tiles(weight, act)) {
    if (!is_for(row->family, row->tokens, q.capability)) continue;
    const float us = tile_us(row->family, row->tokens, q);
    if (us < least) least = us, best = row;
  }
  return {best, false};
}

// A question that a thread had before, and the answer.
struct Answer {
  Key key;
  bool even;
  int64_t m, pairs;
  const Table* table;
  Choice choice;
};
constexpr size_t kAnswers = 64;

}  // namespace

Question question(const Weight& w, int weight, int act, int64_t m, int capability, const int* clusters) {
  Question q{};
  q.m = m, q.n = w.n, q.k = w.k;
  q.bits = kWeightBits[weight], q.is_float = kWeightIsFloat[weight], q.codebook = weight >= kWeightTypes;
  q.fp32_scales = w.scale_type == ScaleType::kFloat32;
  q.bf16_x = act == static_cast<int>(ActType::kBFloat16);
  q.group_size = w.group_size, q.zero_kind = w.zero_kind, q.whole_zeros = w.whole_zeros;
  q.even_scales = w.even_unit >= 0;
  q.capability = capability, q.clusters = clusters;
  return q;
}

std::vector<Candidate> candidates(int weight, int act, const Question& q) {
  std::vector<Candidate> found;
  for (const ProductRow* row : product_tiles(weight, act))
    if (is_for(row->family, row->tokens, q.capability)) found.push_back({tile_us(row->family, row->tokens, q), row});
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.us < b.us; });
  return found;
}

Choice choose(int weight, int act, const Question& q) {
  // Why kept: a plan takes 0.3 us (measured on a Xeon at 14 kernels), with what is kept some 20 ns. Why by thread: no
  // other one can be writing. All 0 is no answer, as m is at least 1.
  static thread_local Answer answers[kAnswers];
  const Table* table = tuned_table.load(std::memory_order_acquire);
  const Key key = key_of(weight, act, q);
  const int64_t pairs = q.clusters[1];
  Answer& kept = answers[(Hash{}(key) + static_cast<size_t>(q.m) * 0x9E3779B1u) % kAnswers];
  if (kept.m != q.m || kept.table != table || kept.pairs != pairs || kept.even != q.even_scales || kept.key != key)
    kept = {key, q.even_scales, q.m, pairs, table, choose_anew(weight, act, q, table)};
  return kept.choice;
}

}  // namespace lowbit::cuda

int64_t lowbit_cuda_tune(const lowbit::cuda::TunedChoice* lines, int64_t count) {
  using namespace lowbit::cuda;
  static std::mutex mutex;
  static auto* tables = new std::vector<std::unique_ptr<const Table>>;
  auto made = std::make_unique<Table>();
  int64_t used = 0;
  for (int64_t i = 0; i < count; ++i) {
    const TunedChoice& line = lines[i];
    const ProductRow* row = row_of(line);
    if (!row) continue;
    // 0: lines are for scales of 16 bits.
    (*made)[{line.weight, line.act, line.n, line.k, line.group_size, line.zero_kind, 0, line.capability, line.blocks}]
        .push_back({line.least, line.most, row});
    ++used;
  }
  const std::lock_guard lock(mutex);
  tuned_table.store(used ? made.get() : nullptr, std::memory_order_release);
  if (used) tables->push_back(std::move(made));
  return used;
}

// Whether a plan can be asked for: beyond these sizes its numbers overflow.
static bool can_be_asked(int weight, int64_t m, int64_t n, int64_t k) {
  return weight >= 0 && weight < lowbit::kKernelTypes && std::min({m, n, k}) >= 1 &&
         std::max({m, n, k}) < lowbit::kSizeLimit;
}

// Of a weight that is nowhere but in a question.
static lowbit::Weight asked_weight(int64_t n, int64_t k, int64_t group_size, int zero_kind, int scale_type) {
  lowbit::Weight w{};
  w.n = n, w.k = k, w.group_size = group_size, w.scale_type = static_cast<lowbit::ScaleType>(scale_type);
  lowbit::set_zero_kind(w, zero_kind);
  return w;
}

const char* lowbit_cuda_choice(int weight, int act, int64_t m, int64_t n, int64_t k, int64_t group_size, int zero_kind,
                               int scale_type, int capability, int blocks, int pairs, int* tuned) {
  using namespace lowbit::cuda;
  *tuned = 0;
  if (!can_be_asked(weight, m, n, k)) return "";
  const int clusters[] = {blocks, pairs};
  const lowbit::Weight w = asked_weight(n, k, group_size, zero_kind, scale_type);
  const Choice found = choose(weight, act, question(w, weight, act, m, capability, clusters));
  *tuned = found.tuned;
  return found.row ? found.row->name : "";
}

const char* lowbit_cuda_plan(int weight, int act, int64_t m, int64_t n, int64_t k, int64_t group_size, int zero_kind,
                             int scale_type, int capability, int blocks, int pairs) {
  using namespace lowbit::cuda;
  static thread_local std::string text;
  text.clear();
  if (!can_be_asked(weight, m, n, k)) return text.c_str();
  const int clusters[] = {blocks, pairs};
  const lowbit::Weight w = asked_weight(n, k, group_size, zero_kind, scale_type);
  const Question q = question(w, weight, act, m, capability, clusters);
  for (const Candidate& one : candidates(weight, act, q)) {
    const bool timed = is_timed(one.row->family, q) && one.us < kLast;
    const char* place = one.us < kLast ? "untimed" : one.us < kNever ? "later" : "never";
    text += std::string(one.row->name) + " " + (timed ? std::to_string(one.us) : place) + "\n";
  }
  return text.c_str();
}
