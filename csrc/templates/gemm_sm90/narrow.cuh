// Up to 16 tokens: the worker of narrow/worker.cuh at the ring that the copy engine fills.
#pragma once
#include "../narrow/worker.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm90 {

template <class Weight, class Act, class Tile, class Form>
using NarrowWorker = narrow::Worker<Weight, Act, Tile, Form, Stage<Weight, Tile, Form>,
                                    Ring<gemm_sm90::Stage<Weight, Tile, Form>>, Problem>;

template <class Weight, class Act, class Tile, class Form>
struct Narrow : NarrowWorker<Weight, Act, Tile, Form> {
  using Stage = gemm_sm90::Stage<Weight, Tile, Form>;
  using Map = gemm_sm90::Map<Stage>;

  __device__ Narrow(const Problem& p, uint32_t base, int warp, int lane)
      : NarrowWorker<Weight, Act, Tile, Form>(p, Ring<Stage>{base, p.ring}, base + Map::kTable, warp, lane) {}
};

}  // namespace lowbit::gemm_sm90
