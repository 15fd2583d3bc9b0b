"""ONNX Runtime's MatMulNBits: fp32 in and out; accuracy level 0 multiplies in fp32, level 4 in int8."""

from __future__ import annotations

import numpy as np
import torch

from .side import Side, Unavailable, group_codes

_pool_threads: list[int] = []


class MatMulNBits(Side):
    family = "onnxruntime"
    warms_each_copy = True

    def __init__(self, bits: int, group: int, level: int):
        super().__init__(f"b{bits}_g{group}_a{level}", bits + 32 / group)
        self.width, self.group, self.level = bits, group, level
        self.sessions, self.opened_for = [], 0

    def open(self, problem, copies, threads):
        if self.sessions and self.opened_for == threads:
            return
        self.close()
        import onnxruntime

        codes, scales = group_codes(problem.weight, self.width, self.group)
        self.values = (codes.unflatten(1, (-1, self.group)) * scales[..., None].double()).flatten(1)
        self.shape = problem.weight.shape
        model = self._model(codes, scales)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads == 1:
            options.intra_op_num_threads = 1
        else:
            # Why one pool for all copies: each session's own would keep spinning while the next copy is timed.
            if not _pool_threads:
                onnxruntime.set_global_thread_pool_sizes(threads, 1)
                _pool_threads.append(threads)
            if _pool_threads != [threads]:
                raise Unavailable(f"onnxruntime's thread pool has {_pool_threads[0]} threads for this whole process")
            options.use_per_session_threads = False
        try:
            make, providers = onnxruntime.InferenceSession, ["CPUExecutionProvider"]
            self.sessions = [make(model, options, providers=providers) for _ in range(copies)]
        except Exception as why:  # Why so wide: onnxruntime's exceptions share no public base.
            raise Unavailable(str(why).splitlines()[0]) from why
        self.opened_for = threads

    def _model(self, codes: torch.Tensor, scales: torch.Tensor) -> bytes:
        from onnx import TensorProto, helper, numpy_helper

        n, k = codes.shape
        unsigned = (codes + 2 ** (self.width - 1)).numpy().astype(np.uint8)
        each = 8 // self.width  # codes in a byte, the first in its low bits
        packed = np.zeros((n, k // each), np.uint8)
        for j in range(each):
            packed |= unsigned[:, j::each] << (self.width * j)
        node = helper.make_node(
            "MatMulNBits", ["x", "codes", "scales"], ["y"], domain="com.microsoft",
            K=k, N=n, bits=self.width, block_size=self.group, accuracy_level=self.level,
        )  # fmt: skip
        weights = [
            numpy_helper.from_array(packed.reshape(n, k // self.group, -1), "codes"),
            numpy_helper.from_array(scales.numpy().reshape(n, -1), "scales"),
        ]
        value = helper.make_tensor_value_info
        ends = [value("x", TensorProto.FLOAT, ["M", k])], [value("y", TensorProto.FLOAT, ["M", n])]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(
            helper.make_graph([node], "product", *ends, initializer=weights), opset_imports=opsets, ir_version=9
        )
        return model.SerializeToString()

    def bind(self, x):
        import onnxruntime

        y = torch.empty(len(x), self.shape[0])
        into = onnxruntime.OrtValue.ortvalue_from_numpy
        given, taken = into(x.numpy()), into(y.numpy())
        bindings = []
        for session in self.sessions:
            binding = session.io_binding()
            binding.bind_ortvalue_input("x", given)
            binding.bind_ortvalue_output("y", taken)
            bindings.append(binding)
        runs = [session.run_with_iobinding for session in self.sessions]

        def call(i):
            runs[i](bindings[i])
            return taken

        return call

    def read(self, result):
        return torch.from_numpy(result.numpy())

    def dequantized(self, rows):
        return self.values[rows]

    def close(self):
        self.sessions, self.opened_for = [], 0


def sides() -> list[Side]:
    """Raises Unavailable when onnxruntime or onnx is not installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as why:
        raise Unavailable(str(why)) from why
    return [MatMulNBits(4, 32, 4), MatMulNBits(4, 128, 4), MatMulNBits(4, 32, 0), MatMulNBits(4, 128, 0)]
