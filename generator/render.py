"""The text of the generated files. It only names things: arithmetic belongs to the templates."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from lowbit.dtypes import ACT_TYPES, KERNEL_TYPES, WEIGHT_TYPES, WeightType, act_id, kernel_type, weight_id
from lowbit.scheme import SCALE_TYPES, ZERO_KINDS

from .enumerate import Row, byte_table, decoder, units
from .families import Variant
from .naming import CUDA_ACTS, cpp_weight, enumerator, table_name

COMMAND = "python -m generator --out build/gen"


def banner(template: str) -> str:
    return f"// generated, do not edit; template {template}; {COMMAND}\n"


def _cpu_frame(variant: Variant, headers: Iterable[str], body: str) -> str:
    """A unit for one instruction set: standard headers outside its target region, everything else inside.

    Why: an inline function of a standard header compiled inside the region could be the copy that the linker keeps,
    and would then run on a CPU that lacks the instructions.
    """
    includes = "".join(f'#include "{h.format(variant=variant.name)}"\n' for h in headers)
    opening = closing = ""
    if variant.target:
        clang = f'#pragma clang attribute push(__attribute__((target("{variant.target}"))), apply_to = function)'
        gcc = f'#pragma GCC push_options\n#pragma GCC target("{variant.target}")'
        opening = f"#ifdef __clang__\n{clang}\n#else\n{gcc}\n#endif\n"
        closing = "#ifdef __clang__\n#pragma clang attribute pop\n#else\n#pragma GCC pop_options\n#endif\n"
    prelude = f'#define LOWBIT_ISA_NS {variant.name}\n#include "templates/cpu/prelude.h"\n'
    return f"{prelude}{opening}{includes}{body}{closing}"


def _literal(value: float) -> str:
    # Why: codes that mean NaN or infinity never reach a kernel; 0 keeps pad bits harmless.
    return f"{value!r}f" if abs(value) < float("inf") else "0.0f"


def _table(weight: WeightType) -> str:
    """The struct with a type's bytes or values; none for a decoder that computes them or is given them."""
    kind, _ = decoder(weight)
    if kind in ("codes", "codebook"):
        return ""
    if kind == "bytes":
        member, items = "uint8_t kBytes", map(str, byte_table(weight))
    else:
        member, items = "float kValues", map(_literal, weight.values)
    lines = textwrap.fill(", ".join(items), 116, initial_indent="      ", subsequent_indent="      ")
    head = f"struct {table_name(weight)} {{\n  static constexpr {member}[{len(weight.values)}] = {{"
    return f"{head}\n{lines}}};\n}};\n"


def _cpu_kernel(row: Row) -> str:
    weight = row.weight
    kind, multiplier = decoder(weight)
    second = {"codes": f", {multiplier}", "codebook": ""}.get(kind, f", {table_name(weight)}")
    shift, offset = weight.byte_form or (0, 0)
    types = f"{kind.capitalize()}<{weight.bits}{second}>, ActType::{enumerator(row.act.name)}"
    call = f"matmul<{types}>(args, ByteForm{{{shift}, {offset}}});"
    return f"void {row.name}(const MatmulArgs& args) {{ {call} }}\n"


def _cpu_unit(found: Sequence[Row]) -> str:
    """The tables its kernels need, then the kernels. All rows are of one variant."""
    family, variant = found[0].family, found[0].variant
    tables = "".join(map(_table, dict.fromkeys(row.weight for row in found)))
    tables = f"namespace {{\n{tables}}}  // namespace\n" if tables else ""
    body, space = "".join(map(_cpu_kernel, found)), f"lowbit::cpu::{variant.name}"
    return _cpu_frame(variant, family.template, f"namespace {space} {{\n{tables}{body}}}  // namespace {space}\n")


def _cuda_kernel(row: Row) -> str:
    """The host function that launches a kernel. Why in its unit: nvcc keeps instantiations of kernels to their file."""
    space = f"lowbit::{row.family.name}"
    tile = f", {space}::{row.variant.target}" if row.variant.target else ""
    types = f"{cpp_weight(row.weight)}, {CUDA_ACTS[row.act.name]}{tile}"
    step, offset = row.affine
    return (
        f'extern "C" int {row.name}(const lowbit::{row.family.args}& args, const lowbit::Launch& launch) {{\n'
        f"  return {space}::launch<{types}>(args, launch, {{{step}.0f, {offset}.0f}});\n}}\n"
    )


def _cuda_frame(headers: Iterable[str], lines: Iterable[str]) -> str:
    return "".join(f'#include "{header}"\n' for header in headers) + "".join(lines)


def unit(found: Sequence[Row]) -> str:
    """One file of kernels. All rows are of one family."""
    family = found[0].family
    body = _cpu_unit(found) if family.device == "cpu" else _cuda_frame(family.template, map(_cuda_kernel, found))
    return banner(family.template[-1]) + body


def shared_unit(found: Sequence[Row]) -> str:
    """The file with what kernels of all weights call; ``found``: those that call it."""
    family, space = found[0].family, f"lowbit::{found[0].family.name}"
    if family.device == "cpu":
        return banner(family.shared[-1]) + _cpu_frame(found[0].variant, family.shared, "")
    types = (f"{CUDA_ACTS[row.act.name]}, {space}::{row.variant.target}" for row in found)
    named = dict.fromkeys(f"template struct {space}::Shared<{one}>;\n" for one in types)
    return banner(family.shared[-1]) + _cuda_frame(family.shared, named)


def registry(found: Sequence[Row]) -> str:
    """The CPU's rows, for csrc/registry.cpp."""
    text = banner("registry.cpp")
    for row in found:
        if row.family.device == "cpu":
            text += f"LOWBIT_KERNEL({row.variant.name}, {row.name}, {weight_id(row.weight)}, {act_id(row.act)})\n"
    return text


def cuda_registry(found: Sequence[Row]) -> str:
    """CUDA's rows, for csrc/cuda/registry.cpp: one macro a family, with the sizes of the variant at the end."""
    text = banner("cuda/registry.cpp")
    for row in found:
        if row.family.device == "cuda":
            numbers = (weight_id(row.weight), act_id(row.act), *(size for _, size in row.variant.sizes))
            text += f"LOWBIT_{row.family.name.upper()}({', '.join((row.name, *map(str, numbers)))})\n"
    return text


def types() -> str:
    """What C++ must know of the Python lists, and the assertions that its enumerators agree with them."""
    acts = [a.name for a in ACT_TYPES]
    lists = {"ScaleType": SCALE_TYPES, "ZeroKind": ZERO_KINDS, "ActType": acts, "FloatType": acts[:3]}
    lines = [
        f"static_assert(static_cast<int>({enum}::{enumerator(name)}) == {i});\n"
        for enum, names in lists.items()
        for i, name in enumerate(names)
    ]
    counts = f"constexpr int kWeightTypes = {len(WEIGHT_TYPES)};\nconstexpr int kActTypes = {len(ACT_TYPES)};\n"
    counts += f"constexpr int kKernelTypes = {len(KERNEL_TYPES)};\n"
    counts += f"constexpr int kWeightBits[] = {{{', '.join(str(w.bits) for w in KERNEL_TYPES)}}};\n"
    counts += f"constexpr bool kWeightIsFloat[] = {{{', '.join(str(int(w.kind == 'float')) for w in KERNEL_TYPES)}}};\n"
    books = ", ".join(str(weight_id(kernel_type(w, True)) if w.kind == "uint" else -1) for w in WEIGHT_TYPES)
    counts += f"constexpr int kCodebookTypes[] = {{{books}}};  // by weight type; -1: none goes with it\n"
    return f"{banner('args.h')}namespace lowbit {{\n{counts}{''.join(lines)}}}  // namespace lowbit\n"


def sources(found: Sequence[Row]) -> dict[str, str]:
    """Every generated source: file name -> text."""
    files = {"registry.inc": registry(found), "cuda_registry.inc": cuda_registry(found), "types.inc": types()}
    files |= {name: unit(members) for name, members in units(found).items()}
    sharing = units([row for row in found if row.family.shared], "shared_unit")
    return files | {name: shared_unit(members) for name, members in sharing.items()}
