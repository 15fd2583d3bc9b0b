"""lowbit itself: every weight type with every activation type."""

from __future__ import annotations

import torch

from .side import Problem, Side, Unavailable

DEFAULT_TYPES = [f"int{bits}" for bits in range(1, 9)]
ACTS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "int8": torch.float32}


class _Packed:
    """The packed copies of one weight type, shared by the sides that differ in the activations only."""

    def __init__(self, dtype: str, group: int):
        self.dtype, self.group, self.users = dtype, group, 0
        self.weights, self.quantized = [], None

    def acquire(self, problem: Problem, copies: int) -> None:
        self.users += 1
        if self.weights:
            return
        import lowbit

        self.quantized = lowbit.quantize(problem.weight, self.dtype, group_size=self.group, method="rtn")
        self.weights = [lowbit.pack_weight(self.quantized, device="cpu") for _ in range(copies)]

    def release(self) -> None:
        self.users -= 1
        if not self.users:
            self.weights, self.quantized = [], None


class LowbitSide(Side):
    family = "lowbit"

    def __init__(self, packed: _Packed, act: str, bits: float):
        super().__init__(f"{packed.dtype} {act}", bits, ACTS[act])
        self.packed = packed
        self.option = "int8" if act == "int8" else None

    def open(self, problem, copies, threads):
        torch.set_num_threads(threads)
        self.packed.acquire(problem, copies)

    def bind(self, x):
        from lowbit import matmul

        weights, option = self.packed.weights, self.option
        return lambda i: matmul(x, weights[i], act=option)

    def dequantized(self, rows):
        from lowbit import QuantTensor, reference

        # Why a slice: the reference is slow on purpose.
        q = self.packed.quantized
        zeros = None if q.zeros is None else q.zeros[rows]
        part = QuantTensor(
            q.codes[rows], q.scales[rows], zeros, dtype=q.dtype, shape=(len(rows), q.shape[1]),
            group_size=q.group_size, zero_kind=q.zero_kind, perm=q.perm, codebook=q.codebook,
        )  # fmt: skip
        return reference.dequantize(part, torch.float64)

    def close(self):
        self.packed.release()


def sides(types: list[str], acts: list[str], group: int) -> list[Side]:
    """One side for each weight type and activation. Raises Unavailable when lowbit does not import or multiply."""
    try:
        import lowbit
        from lowbit.dtypes import WEIGHT_TYPES, weight_type

        weight = lowbit.pack_weight(lowbit.quantize(torch.ones(16, 32), "int4", method="rtn"), device="cpu")
        lowbit.matmul(torch.ones(1, 32), weight)
    except Exception as why:  # Why so wide: a half-built library fails in many ways, and the peers can still be timed.
        raise Unavailable(f"{type(why).__name__}: {why}") from why
    found = []
    for name in [t.name for t in WEIGHT_TYPES] if types == ["all"] else types:
        kind = weight_type(name)
        packed = _Packed(name, group)
        parts = 2 if kind.kind == "uint" else 1  # a zero point has the size of a scale
        bits = kind.bits + (16 * parts / group if group > 0 else 0)
        found += [LowbitSide(packed, act, bits) for act in acts]
    return found


def isa() -> str | None:
    """The instruction set that lowbit's kernels run with here (LOWBIT_FORCE_ISA picks another); None without lowbit."""
    try:
        from lowbit import extension

        return extension.isa()
    except Exception:  # Why so wide: as above.
        return None
