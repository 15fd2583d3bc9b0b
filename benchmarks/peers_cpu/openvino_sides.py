"""OpenVINO: int4 weights, decompressed in the product; with a dynamic group the activations become int8."""

from __future__ import annotations

import numpy as np
import torch

from .side import Side, Unavailable, group_codes


class Int4(Side):
    family = "openvino"
    warms_each_copy = True

    def __init__(self, group: int, dynamic: int, precision: str):
        super().__init__(f"i4_g{group}_d{dynamic}_{precision}", 4 + 16 / group)
        self.group, self.dynamic, self.precision = group, dynamic, precision
        self.requests, self.kept, self.opened_for = [], [], 0

    def open(self, problem, copies, threads):
        if self.requests and self.opened_for == threads:
            return
        self.close()
        import openvino

        codes, scales = group_codes(problem.weight, 4, self.group)
        codes, scales = codes.numpy().astype(np.int8), scales.numpy().astype(np.float16)
        grouped = torch.from_numpy(codes).unflatten(1, (-1, self.group))
        self.values = (grouped * torch.from_numpy(scales)[..., None].double()).flatten(1)
        core = openvino.Core()
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": self.precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": self.dynamic,
        }
        try:
            for i in range(copies):
                # Why rolled: equal constants are stored once for all models of a process.
                packed, scale = self._packed(np.roll(codes, i, 0)), np.roll(scales, i, 0)
                self.kept.append(packed)  # Why: a constant of 4 bits refers to this memory.
                model = self._model(packed, scale)
                self.requests.append(core.compile_model(model, "CPU", options).create_infer_request())
        except RuntimeError as why:
            self.close()
            raise Unavailable(str(why).splitlines()[0]) from why
        self.opened_for = threads

    @staticmethod
    def _packed(codes: np.ndarray) -> np.ndarray:
        """Two codes a byte, the first in the low half."""
        nibbles = (codes & 15).view(np.uint8)
        return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)

    def _model(self, packed: np.ndarray, scales: np.ndarray):
        import openvino
        from openvino import Model, Tensor, Type, opset13

        n, k = packed.shape[0], packed.shape[1] * 2
        weight = openvino.op.Constant(Tensor(packed, [n, k // self.group, self.group], Type.i4))
        scaled = opset13.multiply(opset13.convert(weight, "f16"), opset13.constant(scales[..., None]))
        flat = opset13.reshape(scaled, opset13.constant(np.array([n, k], np.int64)), False)
        x = opset13.parameter([-1, k], np.float32, name="x")
        return Model([opset13.matmul(x, opset13.convert(flat, "f32"), False, True)], [x], "product")

    def bind(self, x):
        import openvino

        given = openvino.Tensor(x.numpy(), shared_memory=True)
        for request in self.requests:
            request.set_input_tensor(given)
        requests = self.requests

        def call(i):
            requests[i].infer(share_outputs=True)
            return requests[i]

        return call

    def read(self, result):
        return torch.from_numpy(result.get_output_tensor().data.copy())

    def dequantized(self, rows):
        return self.values[rows]

    def close(self):
        self.requests, self.kept, self.opened_for = [], [], 0


def sides() -> list[Side]:
    """Raises Unavailable when openvino is not installed."""
    try:
        import openvino  # noqa: F401
    except ImportError as why:
        raise Unavailable(str(why)) from why
    return [Int4(128, 0, "f32"), Int4(128, 0, "bf16"), Int4(128, 128, "f32"), Int4(32, 32, "f32")]
