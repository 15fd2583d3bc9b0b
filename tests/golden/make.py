"""Writes the golden files of file format 1. They are committed and never written again: later versions must read them.

    python -m tests.golden.make FOLDER

Every weight type has one file that holds each of its finite codes; scale types, group sizes and zero kinds take turns.
``expected.npz`` holds the values, by weight name, as tests' reference computes them in float64. Files that came later
(ADDED) have an ``.npz`` of their own.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from lowbit import reference
from lowbit.checkpoint import native
from lowbit.dtypes import WEIGHT_TYPES
from lowbit.tensor import QuantTensor

N, K = 8, 37  # 296 codes: each 8-bit code at least once, and rows that end inside a byte at most widths
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
GROUP_SIZES = (16, 32, 128, -1)
ADDED = ("scales_of_8_bits",)


def weight(wtype, number: int, group_size=None, zero_kind=None, **fields) -> QuantTensor:
    legal = [code for code in range(1 << wtype.bits) if code not in wtype.invalid_codes]
    codes = torch.tensor([legal[i * 7 % len(legal)] for i in range(N * K)], dtype=torch.uint8).view(N, K)
    group_size = group_size or GROUP_SIZES[number % 4]
    groups = 1 if group_size == -1 else -(-K // group_size)
    steps = torch.arange(N * groups).view(N, groups)
    scales = ((1 + steps * 5 % 16 / 16) / 64).to(SCALE_TYPES[number % 3])
    zero_kind = zero_kind or ("none" if wtype.kind != "uint" else ("zero", "min")[number % 2])
    zeros = None if zero_kind == "none" else (steps * 3 % 11 / 4 - 1).to(scales.dtype)
    return QuantTensor.from_codes(
        codes, scales, zeros, dtype=wtype, group_size=group_size, zero_kind=zero_kind, **fields
    )


def narrow(wtype, scale_type, **fields) -> QuantTensor:
    """85 rows of 3 groups: every finite number of a type of scales of 8 bits, and its first one again for the rest."""
    last = (0xFF,) if scale_type == torch.float8_e8m0fnu else (0x7F, 0xFF)  # NaN
    legal = [byte for byte in range(256) if byte not in last]
    scales = torch.tensor([*legal, *legal[:1]][:255], dtype=torch.uint8).view(85, 3).view(scale_type)
    codes = torch.tensor([i * 7 % (1 << wtype.bits) for i in range(85 * K)], dtype=torch.uint8).view(85, K)
    return QuantTensor.from_codes(codes, scales, dtype=wtype, group_size=16, **fields)


def files() -> dict[str, dict[str, QuantTensor]]:
    """The weights of each file."""
    made = {t.name: {f"{t.name}.weight": weight(t, i)} for i, t in enumerate(WEIGHT_TYPES)}
    types = {t.name: t for t in WEIGHT_TYPES}
    cubes = torch.tensor([(i - 7) ** 3 / 512 for i in range(16)])
    made["extras"] = {
        "perm": weight(types["uint4"], 0, perm=torch.arange(K, dtype=torch.int32) * 5 % K),
        "codebook": weight(types["uint4"], 1, zero_kind="none", codebook=cubes),
        "int_with_zero": weight(types["int4"], 2, zero_kind="zero"),
        "float_with_min": weight(types["float4_e2m1"], 3, group_size=16, zero_kind="min"),
        "uint_without_zero": weight(types["uint3"], 4, zero_kind="none"),
    }
    rows = torch.tensor([[(1 + i * 3 % 32 / 32) * 2.0 ** (i - 50)] for i in range(85)])
    made["scales_of_8_bits"] = {
        "e8m0": narrow(types["float4_e2m1"], torch.float8_e8m0fnu),
        "e4m3": narrow(types["float4_e2m1"], torch.float8_e4m3fn, row_scales=rows),
    }
    return made


def main(folder: Path) -> None:
    folder.mkdir(parents=True)  # Why no exist_ok: what is committed stays
    expected = {}
    for name, weights in files().items():
        native.save(folder / f"{name}.safetensors", weights)
        values = {key: reference.dequantize(qt).numpy() for key, qt in weights.items()}
        if name in ADDED:
            np.savez_compressed(folder / f"{name}.npz", **values)
        else:
            expected.update(values)
    np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
