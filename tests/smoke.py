"""Does an installed lowbit work here? Needs torch and numpy only, takes seconds, and is no part of the pytest run.

    python smoke.py        prints one line of facts; any failure is a traceback and exit status 1

Run from a folder without a lowbit/ beside it, so that the installed one is tested.
"""

from __future__ import annotations

import platform
import sys
import time


def main() -> None:
    started = time.perf_counter()
    import lowbit

    assert "torch" not in sys.modules, "import lowbit must not import torch"
    import torch

    from lowbit import extension
    from lowbit.dtypes import WEIGHT_TYPES

    torch.manual_seed(0)
    weight, bias = torch.randn(48, 160) / 12, torch.randn(48)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    checked = 0
    for wtype in WEIGHT_TYPES:
        qt = lowbit.quantize(weight, wtype.name, group_size=64)
        packed = lowbit.pack_weight(qt)
        assert packed.unpack() == qt, wtype
        exact = qt.dequantize(torch.float64)
        for isa in extension.isas():
            with extension.force_isa(isa):
                for dtype, allowed in tolerance.items():
                    for rows in (1, 9):
                        x = torch.randn(rows, 160).to(dtype)
                        expected = x.double() @ exact.T + bias.to(dtype).double()
                        y = lowbit.matmul(x, packed, bias.to(dtype))
                        error = ((y.double() - expected).norm() / expected.norm()).item()
                        assert y.dtype == dtype and error < allowed, (wtype.name, isa, dtype, rows, error)
                        checked += 1
                y = lowbit.matmul(x.float(), packed, act="int8")
                expected = x.double() @ exact.T
                assert (y - expected).norm() / expected.norm() < 0.05, (wtype.name, isa, "int8")
    for bad, error, words in (
        (lambda: lowbit.matmul(torch.ones(2, 7), packed), ValueError, "7"),
        (lambda: lowbit.matmul(torch.ones(2, 160, dtype=torch.int32), packed), TypeError, "int32"),
        (lambda: lowbit.quantize(weight, "int9"), ValueError, "int8"),
    ):
        try:
            bad()
        except error as reason:
            assert isinstance(reason, lowbit.LowbitError) and words in str(reason), reason
        else:
            raise AssertionError(f"expected {error.__name__} about {words}")
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, {' '.join(extension.isas())}: "
        f"{checked} products right in {time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
