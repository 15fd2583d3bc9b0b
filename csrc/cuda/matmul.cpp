// The ops matmul_out and dequantize_out for CUDA: tensors to checked arguments, and the kernel for them.
//
// Rows of fp16 or bf16 go to a kernel of families decode, gemm_sm80 and gemm_sm90, most often that with the smallest
// tile that holds them (choice.h, plan.h); everything else (fp32 x, most codebooks), and what no tile holds, to
// family dequant and torch's own product. All of it is one op, so that a graph with a free batch size has one node.
#include "matmul.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <string_view>
#include <vector>

#include "check_product.h"
#include "choice.h"
#include "device.h"
#include "expanded.h"
#include "registry.h"

namespace lowbit::cuda {
namespace {

constexpr int64_t kFewest = 4;     // tokens of the largest tile of family decode
constexpr int64_t kMostParts = 4;  // tiles of them that are faster than expanding the weight

// What lowbit_cuda_force or lowbit_cuda_try chose: at most one of them.
std::atomic<const ProductRow*> forced_product{nullptr};
std::atomic<const DequantRow*> forced_dequant{nullptr};
// The thread whose products forced_product is for, by an address that no other one has; null: all. Written before
// forced_product, and read after it.
std::atomic<const void*> forced_thread{nullptr};
thread_local char this_thread;
// What lowbit_cuda_force_split chose: a byte for each number of a Split.
std::atomic<uint64_t> forced_split{0};
// What lowbit_cuda_batch_invariant chose.
std::atomic<bool> invariant{false};
// What lowbit_cuda_watch chose.
std::atomic<ProductWatcher> watcher{nullptr};

// What a thread's last product was, where a graph captured it. Why kept: a launch tells a kernel whether it follows
// one.
thread_local Captured last_product;

// Memory that kernels of one op ask for; the tensors live as long as this does.
struct Scratch {
  int device;
  std::vector<Tensor> tensors;

  static void* take(void* self, int64_t bytes) {
    auto& scratch = *static_cast<Scratch*>(self);
    scratch.tensors.push_back(empty_bytes(bytes, scratch.device));
    return scratch.tensors.back().mutable_data_ptr();
  }
};

Launch launch_on(int device, Scratch& scratch) {
  const Clusters most = most_clusters(device);
  const uint64_t forced = forced_split.load(std::memory_order_relaxed);
  const auto number = [forced](int i) { return static_cast<int>(forced >> 8 * i & 0xFF); };
  const int capability = compute_capability(device);
  void* stream = current_stream(device);
  const Captured before = captured_by(stream);
  return {device,
          capability,
          stream,
          {most[0], most[1], most[2], most[3], most[4]},
          capability >= 90,
          Scratch::take,
          &scratch,
          capability >= 90 ? tensor_map_encoder() : nullptr,
          plan_split,
          {number(0), number(1), number(2), number(3), number(4), number(5), number(6)},
          false,
          before.last && before == last_product};
}

bool aligned(const Input& x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (x.m == 1 || x.row_stride % 8 == 0);
}

template <class Row>
bool is_of(const Row* row, int weight, int act) {
  return row && row->weight == weight && row->act == act;
}

// Runs the kernel that is chosen for the product (choice.h), or else the fastest that holds it by the plan; no row, and
// nothing was launched, if none does. Why one may not: decode keeps x in shared memory, others a few stages.
Choice run_tile(const MatmulArgs& args, int weight, int act, const Launch& launch) {
  const Question q = question(args.w, weight, act, args.x.m, launch.capability, launch.clusters);
  const auto runs = [&](const ProductRow* row) { return !refused(row->run(args, launch), row->name); };
  const Choice first = choose(weight, act, q);
  if (!first.row || runs(first.row)) return first;
  for (const Candidate& next : candidates(weight, act, q))
    if (next.row != first.row && next.us < kNever && runs(next.row)) return {next.row, false};
  return {nullptr, false};
}

// The product of `count` rows of x from `first` on.
MatmulArgs rows_of(const MatmulArgs& whole, int64_t first, int64_t count) {
  constexpr int64_t kWidth = 2;  // bytes of a value
  MatmulArgs args = whole;
  args.x.m = std::min(count, whole.x.m - first);
  args.x.data = static_cast<const uint8_t*>(whole.x.data) + first * whole.x.row_stride * kWidth;
  args.y.data = static_cast<uint8_t*>(whole.y.data) + first * whole.y.row_stride * kWidth;
  return args;
}

// Some rows at a time, where no tile holds all of them: the weight is read several times, which costs less than
// expanding it. Returns the kernel of the first part.
const ProductRow* run_tile_in_parts(const MatmulArgs& whole, int weight, int act, const Launch& launch) {
  if (whole.x.m > kMostParts * kFewest) return nullptr;
  for (int64_t part = kFewest; part; part /= 2) {
    if (whole.x.m <= part) continue;
    const ProductRow* first = run_tile(rows_of(whole, 0, part), weight, act, launch).row;
    if (!first) continue;
    for (int64_t done = part; done < whole.x.m; done += part)
      STD_TORCH_CHECK(run_tile(rows_of(whole, done, part), weight, act, launch).row, "rows ", done,
                      " and on of a product were refused");
    return first;
  }
  return nullptr;
}

// The same bits for a row of x whatever rows come with it: by one tile, a tile's rows at a time, so that all that the
// split of K depends on is the weight and the device.
const ProductRow* run_invariant(const MatmulArgs& whole, int weight, int act, const Launch& launch) {
  const auto& tiles = product_tiles(weight, act);
  const auto fits = [&](const ProductRow* row) {
    return launch.capability == 90 ? row->family == Family::kGemmSm90 && row->tokens == 64
                                   : row->family == Family::kGemmSm80 && row->tokens == 32;
  };
  const auto found = std::find_if(tiles.begin(), tiles.end(), fits);
  const Question q = question(whole.w, weight, act, whole.x.m, launch.capability, launch.clusters);
  const bool possible = found != tiles.end() && has_kernel((*found)->family, (*found)->tokens, q);
  STD_TORCH_CHECK(possible, "batch-invariant products need a kernel for the weight on the device (",
                  launch.capability / 10, ".", launch.capability % 10,
                  "), which codebooks, zeros and scales of float32 may lack; "
                  "LOWBIT_BATCH_INVARIANT=0 allows others");
  Launch same = launch;
  same.same_sums = true;
  for (int64_t done = 0; done < whole.x.m; done += (*found)->tokens)
    STD_TORCH_CHECK(!refused((*found)->run(rows_of(whole, done, (*found)->tokens), same), (*found)->name),
                    (*found)->name, " can't hold a batch-invariant product with N ", whole.w.n, ", K ", whole.w.k);
  return *found;
}

// The kernel that multiplied, null if none did, and why it was that one: see struct WatchedProduct.
struct Ran {
  const ProductRow* row;
  const char* why;
};

// Runs kernels that hold the product, if there are; else nothing was launched, and args may name a copy of x instead.
Ran run_tiles(MatmulArgs& args, int weight, int act, const Launch& launch, const Tensor& x,
              std::optional<Tensor>& copy) {
  if (is_of(forced_dequant.load(std::memory_order_relaxed), weight, act)) return {nullptr, "forced"};
  const ProductRow* forced = forced_product.load(std::memory_order_acquire);
  const void* thread = forced ? forced_thread.load(std::memory_order_relaxed) : nullptr;
  if (thread && thread != &this_thread) forced = nullptr;
  if (!is_of(forced, weight, act) || (args.x.m > forced->tokens && !repeats(forced->family, forced->tokens)))
    forced = nullptr;
  if (!forced && invariant.load(std::memory_order_relaxed)) {
    STD_TORCH_CHECK(args.x.type != FloatType::kFloat32,
                    "batch-invariant products on CUDA need x in float16 or bfloat16, got float32");
    if (!aligned(args.x)) copy = align_rows(args.x, args.w.k, launch.device, x);
    return {run_invariant(args, weight, act, launch), "batch-invariant"};
  }

  if (!aligned(args.x)) copy = align_rows(args.x, args.w.k, launch.device, x);
  if (!forced) {
    const Choice ran = run_tile(args, weight, act, launch);
    if (ran.row) return {ran.row, ran.tuned ? "tuned" : "plan"};
    const ProductRow* row = run_tile_in_parts(args, weight, act, launch);
    return {row, row ? "parts" : "expanded"};
  }
  STD_TORCH_CHECK(
      !refused(forced->run(args, launch), forced->name), forced->name, " was forced and can't hold a product with M ",
      args.x.m, ", N ", args.w.n, ", K ", args.w.k,
      " on this device: x of family decode must fit into shared memory, most kernels take scales of 16 bits");
  return {forced, thread ? "tried" : "forced"};
}

const DequantRow& dequant_kernel(const Weight& w, int64_t weight, FloatType type) {
  const DequantRow* row = find_dequant(kernel_type(w, weight), static_cast<int>(type));
  STD_TORCH_CHECK(row != nullptr, "this build has no CUDA kernel for weight type ", weight,
                  w.codebook ? " and a codebook" : "", " with activation type ", static_cast<int>(type));
  return *row;
}

Weight check_cuda_weight(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
                         const std::optional<Tensor>& codebook, const std::optional<Tensor>& row_scales, int64_t n,
                         int64_t k, int64_t weight, int64_t group_size, int64_t zero_kind) {
  STD_TORCH_CHECK(codes.is_cuda(), "codes must be on a CUDA device");
  const Place place = {true, codes.get_device_index()};
  const Weight w = check_weight(Layout::kNvidia, place, codes, scales, zeros, codebook, row_scales, n, k, weight,
                                group_size, zero_kind);
  for (const void* data : {static_cast<const void*>(w.codes), w.scales, w.zeros})
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0,
                    "codes, scales and zeros must start at multiples of 16 bytes");
  return w;
}

}  // namespace

void matmul_out(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
                const std::optional<Tensor>& bias, int64_t n, int64_t k, int64_t weight, int64_t group_size,
                int64_t zero_kind, int64_t act, const Tensor& out, const std::optional<Tensor>& codebook,
                const std::optional<Tensor>& row_scales) {
  const Weight w = check_cuda_weight(codes, scales, zeros, codebook, row_scales, n, k, weight, group_size, zero_kind);
  const int device = codes.get_device_index();
  MatmulArgs args = check_product(w, {true, device}, x, bias, out);
  check_act(act, args.x.type);
  STD_TORCH_CHECK(act == static_cast<int64_t>(args.x.type),
                  "CUDA kernels take x as it comes: act must be the number of x's type, got ", act);
  if (args.x.m == 0) return;

  const DeviceScope scope(device);
  Scratch scratch{device, {}};
  Launch launch = launch_on(device, scratch);
  launch.follows &= aligned(args.x);  // else a copy of x comes between
  std::optional<Tensor> copy;
  const int kind = kernel_type(w, weight);
  const Ran ran = run_tiles(args, kind, static_cast<int>(act), launch, x, copy);
  last_product = ran.row ? captured_by(launch.stream) : Captured{};
  if (!ran.row) multiply_expanded(args, dequant_kernel(w, weight, args.x.type), launch, out, bias);
  if (const ProductWatcher watch = watcher.load(std::memory_order_relaxed)) {
    const char* name = ran.row ? ran.row->name : dequant_kernel(w, weight, args.x.type).name;
    const int64_t scale_type = static_cast<int64_t>(w.scale_type);
    const WatchedProduct product{name,
                                 ran.why,
                                 kind,
                                 act,
                                 args.x.m,
                                 n,
                                 k,
                                 group_size,
                                 zero_kind,
                                 scale_type,
                                 launch.capability,
                                 launch.clusters[0],
                                 launch.clusters[1],
                                 launch.follows};
    watch(&product);
  }
}

void dequantize_out(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros, int64_t n, int64_t k,
                    int64_t weight, int64_t group_size, int64_t zero_kind, int64_t row_begin, const Tensor& out,
                    const std::optional<Tensor>& codebook, const std::optional<Tensor>& row_scales) {
  const Weight w = check_cuda_weight(codes, scales, zeros, codebook, row_scales, n, k, weight, group_size, zero_kind);
  const int device = codes.get_device_index();
  check_place(out, "out", {true, device});
  const int64_t rows = check_rows(out, "out", k).count;
  STD_TORCH_CHECK(row_begin >= 0 && rows <= n && row_begin <= n - rows, "rows must be 0 to ", n, " at most, got ", rows,
                  " from ", row_begin, " on");
  const DequantRow& kernel = dequant_kernel(w, weight, float_type(out, "out"));
  if (rows == 0) return;
  const DeviceScope scope(device);
  Scratch scratch{device, {}};
  expand(w, row_begin, kernel, launch_on(device, scratch), out);
}

}  // namespace lowbit::cuda

static int force(const char* name, const void* thread) {
  using namespace lowbit::cuda;
  const ProductRow* product = nullptr;
  const DequantRow* dequant = nullptr;
  for (int weight = 0; name && weight < lowbit::kKernelTypes; ++weight)
    for (int act = 0; act < lowbit::kActTypes; ++act) {
      const DequantRow* row = find_dequant(weight, act);
      if (row && !thread && std::string_view(row->name) == name) dequant = row;
      for (const ProductRow* found : product_tiles(weight, act))
        if (std::string_view(found->name) == name) product = found;
    }
  if (name && !product && !dequant) return 1;
  if (name) forced_thread = thread;  // Why not without: a product that has just read forced_product comes here next
  forced_product = product;
  forced_dequant = dequant;
  return 0;
}

int lowbit_cuda_force(const char* name) { return force(name, nullptr); }

int lowbit_cuda_try(const char* name) { return force(name, &lowbit::cuda::this_thread); }

void lowbit_cuda_force_split(const int* split) {
  uint64_t packed = 0;
  for (int i = 0; i < 7; ++i) packed |= (static_cast<uint64_t>(split[i]) & 0xFF) << 8 * i;
  lowbit::cuda::forced_split = packed;
}

// Why no exception leaves it: its callers are not C++.
int lowbit_cuda_device(int device, int* numbers) try {
  using namespace lowbit::cuda;
  const DeviceScope scope(device);
  const Clusters most = most_clusters(device);
  numbers[0] = compute_capability(device), numbers[1] = most[0], numbers[2] = most[1];
  return 0;
} catch (const std::exception&) {
  return 1;
}

void lowbit_cuda_watch(lowbit::cuda::ProductWatcher watch) { lowbit::cuda::watcher = watch; }

int lowbit_cuda_batch_invariant(int on) { return lowbit::cuda::invariant.exchange(on != 0); }
