// Times one tile of family gemm_sm90 straight from its template, without torch: for trying versions of a kernel.
// Compiles in ten seconds, so that several source trees can be compared in one run on a GPU:
//
//     nvcc -std=c++17 -O3 -arch=sm_90a -Icsrc -DTOKENS=64 -DWEIGHT='Int<4>' -o base benchmarks/one_kernel.cu
//     ./base base 8192,8192,64 28672,4096,48      N,K,M each; y is kept in /tmp
//     ./other other 8192,8192,64 28672,4096,48    "off": ||y - y of base|| / ||y of base||
//
// A graph launches copies of the weight (200 MB in all) one after the other; the median of 9 trials.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "templates/gemm_sm90.cuh"
#include "templates/types.cuh"

#ifndef WEIGHT
#define WEIGHT Int<4>
#endif
#ifndef GROUP
#define GROUP 128
#endif
#ifndef SCALE  // or float
#define SCALE __half
#endif
#ifndef TOKENS
#define TOKENS 64
#endif

using namespace lowbit;

namespace {

void check(int error, const char* what) {
  if (!error) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

__device__ uint32_t hash(uint64_t i, uint32_t seed) {
  uint32_t v = static_cast<uint32_t>(i) * 2654435761u + seed;
  v ^= v >> 16, v *= 0x85ebca6bu, v ^= v >> 13, v *= 0xc2b2ae35u;
  return v ^ v >> 16;
}
__global__ void fill(uint32_t* to, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) to[i] = hash(i, seed);
}
template <class Value>
__global__ void fill(Value* to, size_t count, uint32_t seed, float low, float high) {
  for (size_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256)
    to[i] = __half2float(__float2half(low + (high - low) * (hash(i, seed) * (1.0f / 4294967296.0f))));
}

template <class T>
T* memory(size_t count) {
  void* made = nullptr;
  check(cudaMalloc(&made, count * sizeof(T)), "memory");
  return static_cast<T*>(made);
}

// Every launch of a graph has scratch of its own.
struct Pool {
  static constexpr size_t kBytes = 512u << 20;
  char* data = memory<char>(kBytes);
  size_t used = 0;
  static void* take(void* self, int64_t bytes) {
    Pool& pool = *static_cast<Pool*>(self);
    return pool.data + pool.used % (kBytes - bytes);
  }
};

void run(const std::string& name, const char* sizes, void* encode, cudaStream_t stream, Pool& pool) {
  constexpr int kBits = WEIGHT::kBits;
  int n = 0, k = 0, m = 0;
  if (std::sscanf(sizes, "%d,%d,%d", &n, &k, &m) != 3) return void(std::printf("expected N,K,M, got %s\n", sizes));
  const size_t codes = size_t(n) * k * kBits / 8, scales = size_t(n) * (k / GROUP);
  const int copies = std::max(3, int((200u << 20) / codes + 1)), turns = std::max(copies, m > 3000 ? 4 : 24);
  std::vector<uint32_t*> w(copies);
  std::vector<SCALE*> s(copies);
  __half *x = memory<__half>(size_t(m) * k), *y = memory<__half>(size_t(m) * n);
  for (int i = 0; i < copies; ++i) {
    w[i] = memory<uint32_t>(codes / 4), s[i] = memory<SCALE>(scales);
    fill<<<1024, 256>>>(w[i], codes / 4, i * 977);
    fill<<<256, 256>>>(s[i], scales, 7 + i, 0.005f, 0.02f);
  }
  fill<<<256, 256>>>(x, size_t(m) * k, 99, -1.0f, 1.0f);
  check(cudaDeviceSynchronize(), "filling");
  const Launch launch{0, 90, stream, {132, 66, 30, 15}, true, Pool::take, &pool, encode};
  constexpr ScaleType kScaleType = sizeof(SCALE) == 4 ? ScaleType::kFloat32 : ScaleType::kFloat16;
  float* book = nullptr;  // of a codebook: what the codes of int4 mean
  if (WEIGHT::kCodebook) {
    float values[16];
    for (int i = 0; i < 16; ++i) values[i] = static_cast<float>(i - 8);
    book = memory<float>(16);
    check(cudaMemcpy(book, values, sizeof values, cudaMemcpyHostToDevice), "book");
  }
  const auto product = [&](int i) {
    MatmulArgs args{};
    args.w = {reinterpret_cast<uint8_t*>(w[i]), s[i], nullptr, n, k, GROUP, kScaleType, ZeroKind::kNone, false, book};
    args.x = {x, m, k, FloatType::kFloat16}, args.y = {y, n, nullptr, FloatType::kFloat32};
    pool.used += 32u << 20;
    check(gemm_sm90::launch<WEIGHT, __half, gemm_sm90::Tile<TOKENS>>(args, launch, {1.0f, float(1 << (kBits - 1))}),
          "launch");
  };

  product(0);
  check(cudaStreamSynchronize(stream), "product");
  std::vector<__half> own(std::min(size_t(m) * n, size_t{40} << 20)), other(own.size());
  check(cudaMemcpy(own.data(), y, own.size() * 2, cudaMemcpyDeviceToHost), "y");
  const std::string file = "/tmp/y_" + std::to_string(kBits) + "_" + sizes;
  double off = -1;
  if (std::FILE* kept = std::fopen(file.c_str(), name == "base" ? "wb" : "rb")) {
    if (name == "base") std::fwrite(own.data(), 2, own.size(), kept);
    if (name != "base" && std::fread(other.data(), 2, other.size(), kept) == other.size()) {
      double apart = 0, all = 0;
      for (size_t i = 0; i < own.size(); ++i) {
        const double a = __half2float(own[i]), b = __half2float(other[i]);
        apart += (a - b) * (a - b), all += b * b;
      }
      off = std::sqrt(apart / all);
    }
    std::fclose(kept);
  }

  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cudaEvent_t begin, end;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "graph");
  for (int i = 0; i < turns; ++i) product(i % copies);
  check(cudaStreamEndCapture(stream, &graph), "graph");
  check(cudaGraphInstantiate(&replay, graph, 0), "graph");
  cudaEventCreate(&begin), cudaEventCreate(&end);
  std::vector<float> us;
  for (int trial = 0; trial < 9; ++trial) {
    constexpr int kReplays = 4;
    cudaEventRecord(begin, stream);
    for (int i = 0; i < kReplays; ++i) check(cudaGraphLaunch(replay, stream), "replay");
    cudaEventRecord(end, stream);
    check(cudaEventSynchronize(end), "replay");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    us.push_back(ms * 1000 / kReplays / turns);
  }
  std::sort(us.begin(), us.end());
  std::printf("%-12s w%d n%d %-18s %9.2f us  off %.1e\n", name.c_str(), kBits, TOKENS, sizes, us[4], off);
  cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
  for (int i = 0; i < copies; ++i) cudaFree(w[i]), cudaFree(s[i]);
  cudaFree(x), cudaFree(y);
}

}  // namespace

int main(int count, char** given) {
  if (count < 3) return std::printf("usage: %s NAME N,K,M ...\n", given[0]), 2;
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found),
        "driver");
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  Pool pool;
  for (int i = 2; i < count; ++i) run(given[1], given[i], encode, stream, pool);
}
