"""From a float weight to a QuantTensor: methods without data, and with the moments of what a layer reads."""

from .data_free import CALIBRATED, quantize
from .methods import METHODS

__all__ = ["CALIBRATED", "METHODS", "quantize"]
