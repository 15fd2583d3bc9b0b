"""From a float weight to a QuantTensor: methods without data, and methods that read what the layer reads."""

from .activation_aware import awq_scales, clip
from .data_free import CALIBRATED, quantize
from .hadamard import Rotation, block_hadamard, rotate_activations, rotate_weight, unrotate_weight
from .methods import METHODS
from .moments import Moments, output_error
from .second_order import gptq

__all__ = [
    "CALIBRATED",
    "METHODS",
    "Moments",
    "Rotation",
    "awq_scales",
    "block_hadamard",
    "clip",
    "gptq",
    "output_error",
    "quantize",
    "rotate_activations",
    "rotate_weight",
    "unrotate_weight",
]
