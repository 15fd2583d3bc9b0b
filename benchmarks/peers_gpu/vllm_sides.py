"""Marlin and Machete out of vLLM's compiled library, without vLLM itself.

The variable PEERS names a folder that holds ``vllm_C.so``, the library, and ``vllm/scalar_type.py``, its list of types.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import gpu_timing
import torch

from .side import Problem, Ready, Side, Unavailable, symmetric_codes

_TYPES = {"int4": (4, "uint4b8"), "int8": (8, "uint8b128")}


@functools.cache
def library():
    """``(ops, types)`` of vLLM. Raises Unavailable when the folder has no library that loads here."""
    folder = Path(os.environ.get("PEERS", ".peers"))
    for part in ("vllm_C.so", "vllm/scalar_type.py"):
        if not (folder / part).is_file():
            raise Unavailable(f"the folder that PEERS names has no {part}")
    try:
        torch.ops.load_library(str(folder.resolve() / "vllm_C.so"))
        spec = importlib.util.spec_from_file_location("scalar_type", folder / "vllm" / "scalar_type.py")
        types = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(types)
    except (OSError, RuntimeError) as why:
        reason = str(why).splitlines()[0].replace(f"{folder.resolve()}/", "")
        raise Unavailable(f"vLLM's library does not load here ({reason})") from why
    return torch.ops._C, types.scalar_types


def words_along_k(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K] as int32 [K * bits / 32, N]: code k of a word at bit ``bits * k``, as GPTQ files have it."""
    per_word = 32 // bits
    parts = codes.t().contiguous().unflatten(0, (-1, per_word))
    words = torch.zeros_like(parts[:, 0])
    for i in range(per_word):
        words |= parts[:, i] << (bits * i)
    return words


class _VllmSide(Side):
    def __init__(self, dtype: str, act: str, group: int):
        super().__init__(dtype, act, group)
        if dtype not in _TYPES:
            raise Unavailable("it has kernels for int4 and int8")
        self.ops, types = library()
        self.type_id = getattr(types, _TYPES[dtype][1]).id

    def _quantized(self, problem: Problem):
        codes, scales, meant = symmetric_codes(problem.weight, self.bits, self.group)
        return words_along_k(codes, self.bits), scales.to(self.x_type), meant


class MarlinSide(_VllmSide):
    family = "marlin"

    def open(self, problem: Problem) -> Ready:
        words, scales, meant = self._quantized(problem)
        n, k, device = problem.n, problem.k, problem.weight.device
        no_order = torch.empty(0, dtype=torch.int32, device=device)
        packed = self.ops.gptq_marlin_repack(words, no_order, k, n, self.bits, False)
        # Marlin reads 64 scales in the order of its fragments: an 8 x 8 transposition.
        scales = scales.t().reshape(-1, 8, 8).transpose(1, 2).reshape(-1, n).contiguous()
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        nbytes = packed.nbytes + scales.nbytes

        def call(b, s):
            locks = torch.zeros(blocks, dtype=torch.int32, device=device)
            return lambda x: self.ops.marlin_gemm(
                x, None, b, None, s, None, None, None, None, None, locks, self.type_id, x.shape[0], n, k,
                True, False, True, False,
            )  # fmt: skip

        calls = [call(packed.clone(), scales.clone()) for _ in range(problem.copies(nbytes))]
        return Ready(calls, nbytes, meant)


class MacheteSide(_VllmSide):
    """Tuned for each number of tokens over all of its schedules."""

    family = "machete"

    def open(self, problem: Problem) -> Ready:
        words, scales, meant = self._quantized(problem)
        scales, form = scales.t().contiguous(), self.x_type
        by_column = words.t().contiguous().t()
        packed = self.ops.machete_prepack_B(by_column, form, self.type_id, form)
        nbytes = packed.nbytes + scales.nbytes
        schedules: dict[int, str] = {}

        def product(x, b, s, schedule):
            return self.ops.machete_mm(x, b, self.type_id, None, s, None, self.group, None, None, schedule)

        copies = [(packed.t().clone().t(), scales.clone()) for _ in range(problem.copies(nbytes))]

        def tune(x):
            found = []
            for schedule in self.ops.machete_supported_schedules(form, self.type_id, form, None, None, None, None):
                calls = [lambda c=c, schedule=schedule: product(x, *c, schedule) for c in copies[:4]]
                try:
                    found.append((gpu_timing.graph_us(calls, least_ms=2, trials=3).us, schedule))
                except RuntimeError:  # Why passed over: some schedules do not take every shape.
                    torch.cuda.synchronize()
            schedules[len(x)] = min(found)[1] if found else None

        calls = [lambda x, c=c: product(x, *c, schedules.get(len(x))) for c in copies]
        return Ready(calls, nbytes, meant, tune)
