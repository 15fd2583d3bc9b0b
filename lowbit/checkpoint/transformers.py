"""lowbit as a quantization method of transformers (5.17 to 5.23): ``LowbitConfig`` and the quantizer behind it.

Importing this module registers both; it is imported by :func:`lowbit.register_transformers`, by the first use of
``lowbit.LowbitConfig``, and by itself where lowbit and transformers are both imported (hook.py).
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import FormatError, LowbitError, SchemeError
from ..fusing import unfuse
from ..nn import Linear
from . import experts, layers
from .names import has_split_experts, renamings_of_experts
from .on_the_fly import Quantize, quantize_tied_head
from .parallel import ShardedLinear, shard
from .settings import Settings, expect_quantizable
from .validate import expect_described, expect_shapes, settle

_NAME = "lowbit"


class LowbitConfig(QuantizationConfigMixin):
    """``quantization_config`` of :meth:`from_pretrained`: quantizes a float checkpoint while it is loaded.

    dtype, group_size, method, zero_kind, act, skip, dynamic: as in :func:`lowbit.quantize_model`. scale_dtype: name of
    the scales' type, by default that of the model ("float16" for a float32 model); also "float32", and without zeros
    "float8_e8m0fnu" and "float8_e4m3fn". lm_head: weight type of the output layer, which by default stays as it is; one
    that is tied to the embedding is untied. Experts of a mixture are quantized one matrix at a time, named
    ``...experts.3.down_proj`` (patterns may also say ``experts.down_proj``).

    Raises SchemeError, DtypeError, or FormatError for the config of a newer lowbit.
    """

    def __init__(self, dtype="int4", group_size=128, method="mse", **settings):
        stored = "quant_method" in settings
        dtype = getattr(dtype, "name", dtype)
        made = Settings.make(dtype=dtype, group_size=group_size, method=method, **settings)
        if not stored:
            # Why not else: weights that are there already may have what no method here makes.
            expect_quantizable(made.default())
        self.__dict__.update(made.to_json())

    @property
    def settings(self) -> Settings:
        """The same, checked again: attributes may have been set since."""
        return Settings.make(**self.__dict__)

    def take(self, settings: Settings) -> None:
        """Become these settings."""
        self.__dict__.clear()
        self.__dict__.update(settings.to_json())


class LowbitHfQuantizer(HfQuantizer):
    """What transformers calls while it loads and saves a model with a :class:`LowbitConfig`."""

    requires_calibration = False

    def __init__(self, quantization_config, **kwargs):
        # Why a copy: it becomes what is saved with this model, and the user's may be for other models too.
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        self.layers: dict[str, Linear] = {}  # what was put in, by full name
        self.pending: dict[str, layers.Choice] = {}  # float parameters to quantize as they arrive, by full name
        self.tied_head = ""
        self.experts: dict[str, nn.Module] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.failed: LowbitError | None = None  # the first error of a weight, raised when loading has ended

    def is_serializable(self, *_, **__) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters: gradients reach x through packed weights

    @property
    def is_compileable(self) -> bool:
        return True

    def update_dtype(self, dtype):
        return dtype

    def param_element_size(self, model, param_name, param):
        # Why: the placeholder of a weight that is quantized on arrival will be gone.
        return 0 if param_name in self.pending and param_name.endswith(".weight") else param.element_size()

    def param_needs_quantization(self, model, param_name, **_) -> bool:
        return param_name in self.pending

    def get_quantize_ops(self):
        return Quantize(self)

    # ---- before loading: everything is on meta --------------------------------------------------------------------

    def _process_model_before_weight_loading(self, model, dtype=None, checkpoint_files=None, **_):
        settings = self.quantization_config.settings
        if self.pre_quantized and has_split_experts(checkpoint_files or ()):
            # Why read from the files: a config that another program wrote need not say it.
            settings = settings.with_(experts="split")
            self.quantization_config.take(settings)
        dtype = dtype or model.config.dtype or torch.get_default_dtype()
        if not self.pre_quantized:
            scale = settings.scale_dtype or ("bfloat16" if dtype == torch.bfloat16 else "float16")
            settings = settings.with_(experts="fused", scale_dtype=scale)
        chosen, left = layers.choose(model, settings)
        if not self.pre_quantized:
            layers.expect_possible(model, settings, chosen)
        self._find_tied_head(model, settings, chosen, left)
        if not chosen:
            raise SchemeError(
                f"expected layers to quantize, got none: {type(model).__name__} has {len(left)} left alone"
            )
        for name, choice in chosen.items():
            if choice.kind == "experts":
                self._put_experts(name, choice, dtype, settings)
            else:
                self._put_linear(model, name, choice, dtype)
        if self.experts:
            _keep_experts_whole(model)
        if self.pre_quantized:
            expect_described(model, self.layers, checkpoint_files or ())
        self.shapes = {name: p.shape for name, p in model.named_parameters() if name not in self.pending}
        if not self.pre_quantized:
            # Why: the saved config then says by itself what is quantized, whatever a later version would leave alone.
            plain = [name for name in left if name != layers.output_layer(model)[0]]
            skip = [*settings.skip, *layers.as_patterns(plain, [*self.layers])]
            settings = settings.with_(skip=tuple(dict.fromkeys(skip)))
            self.quantization_config.take(settings)
        return model

    def _find_tied_head(self, model, settings: Settings, chosen: dict, left: list[str]) -> None:
        head, _ = layers.output_layer(model)
        if settings.lm_head is None or head not in left or f"{head}.weight" not in layers.tied_parameters(model):
            return
        if self.pre_quantized:
            raise FormatError(
                f"{head} cannot be {settings.lm_head} and tied; config.json needs tie_word_embeddings false"
            )
        options = settings.of(layers.aliases(model, head), head=True)
        if options is not None:
            expect_quantizable(options)
            self.tied_head = head

    def _put_linear(self, model, name: str, choice: layers.Choice, dtype) -> None:
        layer = layers.empty_linear(choice, name, dtype)
        layer.lowbit_conv1d = choice.kind == "conv1d"
        # Why: tensor parallelism then hands the layer plain local tensors, which kernels need.
        layer._hf_quantized_needs_local_tp = True
        layer.__class__ = ShardedLinear  # until it is known whether the layer is cut
        if not self.pre_quantized:
            layer._parameters["weight"] = nn.Parameter(torch.empty_like(choice.module.weight, dtype=dtype), False)
            self.pending[f"{name}.weight"] = choice
        self.layers[name] = layer
        model.set_submodule(name, layer)

    def _put_experts(self, name: str, choice: layers.Choice, dtype, settings: Settings) -> None:
        module, whole = choice.module, dict(choice.module._parameters)
        self.layers |= experts.swap(name, choice, dtype, settings.experts)
        self.experts[name] = module
        if not self.pre_quantized:
            for part in set(whole) - set(module._parameters):
                module._parameters[part] = whole[part]
                self.pending[f"{name}.{part}"] = choice

    # ---- names -----------------------------------------------------------------------------------------------------

    def update_weight_conversions(self, weight_conversions, *_):
        """Where experts lie on disk as they do in older versions of the model, their quantized matrices do too."""
        made = []
        if self.pre_quantized and self.experts and self.quantization_config.settings.experts == "split":
            made = renamings_of_experts(weight_conversions)
        return [*weight_conversions, *made]

    def update_tp_plan(self, config):  # 5.17
        return config

    # ---- after loading ---------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model, **_):
        if self.failed is not None:
            raise self.failed
        settle(self.layers)
        expect_shapes(model, self.shapes)
        for name in self.pending:
            owner, _, part = name.rpartition(".")
            model.get_submodule(owner)._parameters.pop(part, None)
            if part == "weight":
                model.get_submodule(owner)._parameters["weight"] = None
        if self.tied_head:
            quantize_tied_head(model, self.tied_head, self.quantization_config)
        shard(self.layers)
        for layer in self.layers.values():
            layer.prepare()
        self.pending, self.layers, self.experts, self.shapes = {}, {}, {}, {}
        return model

    def _dequantize(self, model, dtype=None):
        # Why: config.json has the name of a type, which transformers passes on in some of its versions.
        dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype or model.dtype
        unfuse(model)
        for name, module in list(model.named_modules()):
            if hasattr(module, "lowbit_experts"):
                module.dequantize_(dtype)
            elif isinstance(module, Linear) and ".experts." not in f".{name}":
                model.set_submodule(name, _float_layer(module, dtype))
        return model


def _float_layer(layer: Linear, dtype: torch.dtype) -> nn.Module:
    weight, shape = layer.dequantize(dtype), {"device": "meta", "dtype": dtype}
    if getattr(layer, "lowbit_conv1d", False):
        from transformers.pytorch_utils import Conv1D

        made = Conv1D(layer.out_features, layer.in_features)
        made.weight = nn.Parameter(weight.T.contiguous())
    else:
        made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, **shape)
        made.weight = nn.Parameter(weight)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().to(dtype), layer.bias.requires_grad)
    return made.train(layer.training)


def _keep_experts_whole(model) -> None:
    """Take the experts out of a model's plans: every process holds a quantized mixture whole.

    Why: a plan for their old parameters would cut weights on arrival, or add the same sums twice. Raises SchemeError
    where experts are to lie in different processes.
    """
    asked = getattr(model.config, "distributed_config", None)
    if getattr(asked, "enable_expert_parallel", False) or (getattr(asked, "ep_size", None) or 1) > 1:
        raise SchemeError("quantized experts lie whole in every process: expert parallelism must be off (ep_size=1)")
    for plan in (getattr(model, "_tp_plan", None), getattr(model, "_ep_plan", None)):
        for key in [key for key in plan or () if "experts" in key.split(".") or key.endswith(".gate")]:
            del plan[key]


def register() -> None:
    """Make "lowbit" known to transformers; done once, however often it is called."""
    configs, quantizers = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    if configs.setdefault(_NAME, LowbitConfig) is not LowbitConfig:
        warnings.warn("another package has registered the quantization method 'lowbit' with transformers", stacklevel=2)
    quantizers.setdefault(_NAME, LowbitHfQuantizer)


register()
