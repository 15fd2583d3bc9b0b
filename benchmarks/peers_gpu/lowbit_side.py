"""lowbit itself: a weight type, or codes with a table of values, and, if asked for, one of its kernels by force."""

from __future__ import annotations

import contextlib
import copy
import functools

import torch

from .side import Problem, Ready, Side, Unavailable, timed_type

#: Tokens of the smallest tile of gemm_sm90 that takes any number of rows of x; of gemm_sm80 all do.
REPEATED = 32


class LowbitSide(Side):
    family = "lowbit"
    judged = True

    def __init__(
        self,
        dtype: str,
        act: str,
        group: int,
        zeros: str | None = None,
        tile: str | None = None,
        scales: str | None = None,
    ):
        super().__init__(dtype, act, group, tile)
        self.scales = None if scales is None else getattr(torch, scales)
        self.zeros = (zeros or "zero") if timed_type(dtype).kind == "uint" else "none"

    def serves(self, m: int) -> bool:
        # Why: a forced kernel that neither holds nor repeats them is passed over: another would be timed as it.
        if self.variant is None:
            return True
        tokens = int(self.variant.rpartition("n")[2])
        return m <= tokens or tokens >= REPEATED or self.variant.startswith("gemm_sm80")

    def open(self, problem: Problem) -> Ready:
        import lowbit
        from lowbit import extension

        key = (self.dtype, self.act, self.group, self.zeros, self.scales)
        if problem.kept.get("key") != key:
            problem.kept.clear()
            qt = self._quantized(problem.weight.to(self.x_type))
            first = lowbit.pack_weight(qt, problem.weight.device)
            weights = [first, *(copy.deepcopy(first) for _ in range(problem.copies(first.nbytes) - 1))]
            assert len({pw.codes.data_ptr() for pw in weights}) == len(weights)
            if problem.weight.is_cuda:
                torch.cuda.synchronize()  # Why: a kernel may read a packed weight before it waits for who wrote it.
            problem.kept.update(key=key, weights=weights, reference=qt.dequantize(torch.float32))
        weights = problem.kept["weights"]
        kernel = self._kernel()
        forced = contextlib.nullcontext if kernel is None else functools.partial(extension.force_cuda_kernel, kernel)

        def call(pw):
            def product(x):
                with forced():
                    return lowbit.matmul(x, pw)

            return product

        return Ready([call(pw) for pw in weights], weights[0].nbytes, problem.kept["reference"])

    def _quantized(self, weight: torch.Tensor):
        """A weight of this type; of a codebook the codes of an integer, read by a table as even as that integer is."""
        import lowbit

        wtype = timed_type(self.dtype)
        options = {"group_size": self.group, "method": "rtn", "zero_kind": self.zeros, "scale_dtype": self.scales}
        if wtype.kind != "codebook":
            return lowbit.quantize(weight, wtype, **options)
        qt = lowbit.quantize(weight, f"int{wtype.bits}", **options)
        values = torch.arange(2**wtype.bits, device=weight.device) - 2 ** (wtype.bits - 1)
        of = {"dtype": f"uint{wtype.bits}", "shape": qt.shape, "group_size": qt.group_size, "zero_kind": "none"}
        return lowbit.QuantTensor(qt.codes, qt.scales, codebook=values.to(self.x_type), **of)

    def _kernel(self) -> str | None:
        """The name of the kernel to force. Raises Unavailable when this build has none such."""
        if self.variant is None:
            return None
        from lowbit import kernel_list

        wanted = (self.dtype, self.act)
        rows = [row for row in kernel_list.manifest() if (row["weight"], row["act"]) == wanted]
        found = [row["name"] for row in rows if row["name"].endswith(f"_{self.variant}")]
        if found:
            return found[-1]  # of n16 alone that of gemm_sm90, where the build has it; gemm_sm80_n16 names the other
        raise Unavailable(f"this build has no kernel for {self.dtype}, {self.act} and tile {self.variant}")
