"""How the layers of a checkpoint are quantized: the ``quantization_config`` of its config.json (docs/format.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from ..convert_model import OPTIONS, Patterns, checked_dynamic, checked_skip
from ..errors import DtypeError, FormatError, SchemeError, nearest
from ..ops.schema import check_act
from ..quantizers import CALIBRATED
from ..quantizers.data_free import data_free
from ..quantizers.rule import Rule
from ..scheme import Scheme
from ..tensor import QuantTensor

FORMAT = 1
#: What ``dynamic`` may set for a layer of a stored checkpoint, beside the options of quantize_model.
_OF_A_LAYER = (*OPTIONS, "scale_dtype", "perm", "codebook")
#: How the experts of a mixture are stored: gate and up projection apart, or as one matrix.
LAYOUTS = ("split", "fused")


@dataclass(frozen=True)
class Settings:
    """Settings of all layers, and which of them differ; made and checked by :meth:`make`.

    dtype, group_size, method, zero_kind, act: as in :func:`lowbit.quantize_model`. scale_dtype: the name of the
    scales' type, or None while it is not known. perm, codebook: whether weights have an order of their columns, and a
    table of values. skip, dynamic: names or regular expressions, see :func:`lowbit.quantize_model`. lm_head: the
    weight type of the output layer, or None to leave it alone. experts: "split" or "fused".
    """

    dtype: str = "int4"
    group_size: int = 128
    method: str = "mse"
    zero_kind: str | None = None
    act: str | None = None
    scale_dtype: str | None = None
    perm: bool = False
    codebook: bool = False
    skip: tuple[str, ...] = ()
    dynamic: Mapping[str, dict | None] = field(default_factory=dict)
    lm_head: str | None = None
    experts: str = "fused"

    @classmethod
    def make(cls, **values) -> Settings:
        """Checked settings. Raises SchemeError, DtypeError, or FormatError for a format of a newer lowbit."""
        version = values.pop("format", FORMAT)
        values.pop("quant_method", None)
        if type(version) is not int or not 1 <= version <= FORMAT:
            raise FormatError(
                f"quantization_config: format {version!r} needs a newer lowbit, this one reads formats up to {FORMAT}"
            )
        known = tuple(cls.__dataclass_fields__)
        for name in values:
            if name not in (*known, "dynamic_order"):
                raise SchemeError(f"quantization_config has no setting {name!r}; expected {nearest(name, known)}")
        skip = tuple(checked_skip(values.pop("skip", None)))
        dynamic = checked_dynamic(values.pop("dynamic", None), _OF_A_LAYER)
        dynamic = _in_order(dynamic, values.pop("dynamic_order", None))
        made = cls(**values, skip=skip, dynamic=dynamic)
        made._check()
        return made

    def _check(self) -> None:
        if self.experts not in LAYOUTS:
            raise SchemeError(f"experts must be one of {', '.join(LAYOUTS)}, got {self.experts!r}")
        _ = self._skipped, self._changed  # compiles them
        head = {} if self.lm_head is None else self._of_head()
        if head and self.dynamic:
            head["scale_dtype"] = None  # Why: an entry may give it others than those of all layers
        for options in [{}, *self.dynamic.values(), head]:
            if options is not None:
                options = {**self.default(), **options}
                self.scheme(options)
                check_act(options["act"])
                for name in ("perm", "codebook"):
                    if type(options[name]) is not bool:
                        raise DtypeError(f"{name} must be true or false, got {options[name]!r}")

    @cached_property
    def _skipped(self) -> Patterns:
        return Patterns(list(self.skip), "skip")

    @cached_property
    def _changed(self) -> Patterns:
        return Patterns(list(self.dynamic), "dynamic")

    def default(self) -> dict:
        """The settings of a layer that nothing else is said of."""
        return {name: getattr(self, name) for name in _OF_A_LAYER}

    def _of_head(self) -> dict:
        return {**self.default(), "dtype": self.lm_head, "zero_kind": None}

    def of(self, names: list[str], head: bool = False) -> dict | None:
        """The settings of the layer with these names, or None when it stays as it is. head: it is the output layer."""
        if self._skipped.find(names) is not None:
            return None
        if head and self.lm_head is None:
            return None
        default = self._of_head() if head else self.default()
        pattern = self._changed.find(names)
        changed = {} if pattern is None else self.dynamic[pattern]
        return None if changed is None else {**default, **changed}

    @staticmethod
    def scheme(options: dict) -> Scheme:
        """The scheme of a layer's settings."""
        return Scheme.make(
            options["dtype"], options["group_size"], options["zero_kind"], options["scale_dtype"] or "float16"
        )

    def with_(self, **changes) -> Settings:
        """The same settings but for some."""
        return replace(self, **changes)

    def to_json(self) -> dict:
        """What config.json holds; without what is as by default and says nothing."""
        made = asdict(self)
        made |= {"skip": list(self.skip), "dynamic": dict(self.dynamic)}
        quiet = {
            "act": None,
            "zero_kind": None,
            "perm": False,
            "codebook": False,
            "dynamic": {},
            "lm_head": None,
            "experts": "fused",
        }
        kept = {name: value for name, value in made.items() if name not in quiet or value != quiet[name]}
        # Why: the first entry that matches wins, and JSON is written with sorted keys, by transformers too.
        if list(self.dynamic) != sorted(self.dynamic):
            kept["dynamic_order"] = list(self.dynamic)
        return {"quant_method": "lowbit", "format": FORMAT, **kept}


def expect_quantizable(options: dict, calibrated: bool = False) -> None:
    """Raises what :func:`lowbit.quantize` does for settings of a layer that it can't make, though one may be stored.

    calibrated: methods that need calibration have it.
    """
    Rule(Settings.scheme(options))
    if not (calibrated and options["method"] in CALIBRATED):
        data_free(options["method"])
    for name in ("perm", "codebook"):
        if options[name]:
            raise SchemeError(f"{name} must be false for a weight that is quantized here, got {options[name]!r}")


def _in_order(dynamic: dict, order) -> dict:
    """dynamic with its entries in this order, by default its own. Raises FormatError unless order has its keys."""
    if order is None:
        return dynamic
    if not isinstance(order, list) or not all(isinstance(p, str) for p in order) or sorted(order) != sorted(dynamic):
        raise FormatError(f"dynamic_order must list the entries of dynamic, {sorted(dynamic)}, got {order!r:.200}")
    return {pattern: dynamic[pattern] for pattern in order}


def described(qt: QuantTensor) -> dict:
    """What ``dynamic`` says of a layer that holds this weight."""
    return {
        "dtype": qt.dtype.name,
        "group_size": qt.group_size,
        "zero_kind": qt.zero_kind,
        "scale_dtype": qt.scheme.scale_type,
        "perm": qt.perm is not None,
        "codebook": qt.codebook is not None,
    }
