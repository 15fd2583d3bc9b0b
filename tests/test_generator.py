"""The generator: what it writes is what the lists say, byte for byte the same every time, without torch."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from generator import __main__ as command
from generator import families, manifest
from generator.enumerate import rows
from generator.naming import CUDA_ACTS
from lowbit.dtypes import ACT_TYPES, KERNEL_TYPES, WEIGHT_TYPES
from lowbit.errors import SchemeError

ROOT = Path(__file__).resolve().parent.parent
KERNEL = re.compile(
    r"^void (\w+)\(const MatmulArgs& args\) \{ matmul<(\w+)<(\d)(?:, (\w+))?>, ActType::(\w+)>\(args, (.*)\);"
)
LAUNCHER = re.compile(
    r'extern "C" int (\w+)\(const lowbit::(\w+)& args, const lowbit::Launch& launch\) \{\s+'
    r"return lowbit::(\w+)::launch<lowbit::(Int|Float|Codebook)<([\d, ]+)>, (\w+)(?:, lowbit::(\w+)::Tile<(\d+)>)?>"
    r"\(args, launch, \{(\d+)\.0f, (\d+)\.0f\}\);"
)
BYTE_FORM = re.compile(r"ByteForm\{(\d+), (\d+)\}")
TABLE = re.compile(r"struct (\w+) \{\s+static constexpr (?:uint8_t kBytes|float kValues)\[(\d+)\] = \{([^}]*)\}")


def generate(out: Path, *options: str, **variables: str) -> subprocess.CompletedProcess:
    arguments = [sys.executable, "-m", "generator", "--out", str(out), *options]
    return subprocess.run(arguments, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gen")
    assert generate(folder, PYTHONHASHSEED="1").returncode == 0
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_runs_are_byte_equal(out, tmp_path):
    assert generate(tmp_path / "other", PYTHONHASHSEED="2").returncode == 0
    assert read(out) == read(tmp_path / "other")


def test_equal_files_keep_their_time_and_stale_ones_go(out, tmp_path):
    files = {name: text.decode() for name, text in read(out).items()}
    assert manifest.write(tmp_path, files) == list(files)
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    (tmp_path / "cpu_old_4.cpp").write_text("// generated, a unit of a family that was renamed")
    (tmp_path / "types.inc").write_text("somebody edited this")
    assert manifest.write(tmp_path, files) == ["types.inc", "cpu_old_4.cpp"]
    assert {p.name for p in tmp_path.iterdir() if p.stat().st_mtime == 1} == set(files) - {"types.inc"}
    assert read(tmp_path) == read(out)


def test_sources_that_are_not_generated_stay(tmp_path):
    for name in ("kernel.cu", "notes.json", "table.inc", "empty.cpp"):
        (tmp_path / name).write_text("" if name == "empty.cpp" else "somebody wrote this")
    (tmp_path / "folder.cpp").mkdir()
    assert manifest.write(tmp_path, {}) == []


def listed(out: Path, library: str) -> list[dict]:
    kernels = json.loads((out / "manifest.json").read_text())["kernels"]
    return [kernel for kernel in kernels if kernel["library"] == f"liblowbit_{library}.so"]


def test_every_legal_combination_is_in_manifest_registry_and_one_unit(out):
    kernels = listed(out, "cpu")
    isas = re.findall(r"^LOWBIT_ISA\((\w+)", (ROOT / "csrc/cpu_isa.inc").read_text(), re.MULTILINE)
    expected = {(i, w.name, a.name) for i in isas for w in WEIGHT_TYPES for a in ACT_TYPES}
    floats = [a.name for a in ACT_TYPES if not a.on_the_fly]
    expected |= {(i, f"codebook{bits}", a) for i in isas for bits in range(1, 9) for a in floats}
    assert {(k["isa"], k["weight"], k["act"]) for k in kernels} == expected
    assert len({k["name"] for k in kernels}) == len(kernels) == len(expected)
    lines = [
        f"LOWBIT_KERNEL({k['isa']}, {k['name']}, {[w.name for w in KERNEL_TYPES].index(k['weight'])}, "
        f"{[a.name for a in ACT_TYPES].index(k['act'])})"
        for k in kernels
    ]
    assert (out / "registry.inc").read_text().splitlines()[1:] == lines
    for kernel in kernels:
        holders = [p.name for p in out.glob("*.cpp") if f"void {kernel['name']}(" in p.read_text()]
        assert holders == [kernel["unit"]]
    compiled = {p.name for p in out.iterdir() if p.suffix in (".cpp", ".cu")}
    assert set(json.loads((out / "manifest.json").read_text())["files"]) == compiled


def test_every_cuda_kernel_is_in_manifest_registry_and_one_unit(out):
    kernels = listed(out, "cuda")
    floats = [a.name for a in ACT_TYPES if not a.on_the_fly]
    tiles = [("gemm_sm90", t) for t in (8, 16, 32, 64, 128, 256)]
    tiles += [("gemm_sm80", t) for t in (8, 16, 32, 64, 128)]
    expected = {(f, w.name, a, t) for w in WEIGHT_TYPES for a in floats[1:] for f, t in tiles}
    expected |= {("gemm_sm90", "codebook4", a, t) for a in floats[1:] for t in (8, 16, 32, 64, 128, 256)}
    some = [("gemm_sm90", t) for t in (48, 96, 144, 160, 192, 208)] + [("decode", t) for t in (1, 2, 4)]
    some += [("gemm_sm80", t) for t in (48, 96)]
    ints = [w for w in WEIGHT_TYPES if w.kind != "float"]
    expected |= {(f, w.name, a, t) for w in ints for a in floats[1:] for f, t in some}
    others = [w for w in WEIGHT_TYPES if w.kind == "float" and w.bits in (3, 4, 8)]
    expected |= {("decode", w.name, a, t) for w in others for a in floats[1:] for t in (1, 2, 4)}
    expected |= {("dequant", w.name, a, None) for w in KERNEL_TYPES for a in floats}
    keys = ("family", "weight", "act", "tokens")
    assert {tuple(map(kernel.get, keys)) for kernel in kernels} == expected
    assert len({kernel["name"] for kernel in kernels}) == len(kernels) == len(expected)
    weights, acts = ([t.name for t in types] for types in (KERNEL_TYPES, ACT_TYPES))
    lines = []
    for kernel in kernels:
        numbers = [weights.index(kernel["weight"]), acts.index(kernel["act"])]
        numbers += [kernel[key] for key in keys[3:] if key in kernel]
        lines.append(f"LOWBIT_{kernel['family'].upper()}({kernel['name']}, {', '.join(map(str, numbers))})")
    assert (out / "cuda_registry.inc").read_text().splitlines()[1:] == lines
    units = {kernel["name"]: kernel["unit"] for kernel in kernels}
    # For each type of x: a unit per C++ type for each family of products (decode has some floats alone), one for
    # dequant, one for the codebook of 4 bits.
    assert len(set(units.values())) == 18 * 2 * 2 + 12 * 2 + 3 + 2
    assert units["w4a16_decode_n1"] == units["wu4a16_decode_n4"] != units["wf4e2m1a16_decode_n1"]
    assert units["w4a16_gemm_sm90_n8"] == units["wu4a16_gemm_sm90_n128"] != units["w4a16_decode_n4"]


def test_what_kernels_of_all_weights_share_is_compiled_once_for_each_tile_and_type_of_x(out):
    """Else a library misses a kernel when it is loaded, or holds it many times."""
    wanted = {
        (k["family"], CUDA_ACTS[k["act"]], k["tokens"]) for k in listed(out, "cuda") if k["family"].startswith("gemm")
    }
    line = re.compile(r"^template struct lowbit::(\w+)::Shared<(\w+), lowbit::\w+::Tile<(\d+)>>;$", re.M)
    found = [parts for path in out.glob("*.cu") for parts in line.findall(path.read_text())]
    assert len(found) == len(wanted) and {(family, act, int(tile)) for family, act, tile in found} == wanted


def test_what_a_launcher_says_of_a_type_gives_back_its_values(out):
    """Numbers that pass from Python to CUDA: template arguments, and step and offset of the integer types."""
    kernels, weights = {k["name"]: k for k in listed(out, "cuda")}, {w.name: w for w in KERNEL_TYPES}
    floats = {"float": "float32", "__half": "float16", "__nv_bfloat16": "bfloat16"}
    seen = []
    for unit in out.glob("*.cu"):
        for name, args, family, kind, numbers, act, tile, tokens, step, offset in LAUNCHER.findall(unit.read_text()):
            kernel = kernels[name]
            weight, numbers = weights[kernel["weight"]], [int(n) for n in numbers.split(",")]
            seen.append(name)
            assert (family, floats[act], unit.name) == (kernel["family"], kernel["act"], kernel["unit"])
            assert args == ("DequantArgs" if family == "dequant" else "MatmulArgs")
            assert (tile, tokens) == ((family, str(kernel["tokens"])) if "tokens" in kernel else ("", ""))
            if kind == "Float":
                assert weight.name == f"float{1 + sum(numbers)}_e{numbers[0]}m{numbers[1]}"
            elif kind == "Codebook":
                assert numbers == [weight.bits] and weight.name == f"codebook{weight.bits}"
            else:
                assert numbers == [weight.bits] and weight.kind != "float"
                values = [int(step) * code - int(offset) for code in range(2**weight.bits)]
                assert values == [expected_value(weight, code) for code in range(2**weight.bits)]
    assert sorted(seen) == sorted(kernels)


def decoded_float(name: str, code: int) -> float:
    """The value of a code by the definition of the formats, apart from lowbit.dtypes: through half precision bits."""
    exponent, mantissa = map(int, re.fullmatch(r"float\d_e(\d)m(\d)", name).groups())
    sign, rest = code >> (exponent + mantissa), code & ((1 << (exponent + mantissa)) - 1)
    bits = sign << 15 | rest << (10 - mantissa)  # the same fields in a half, whose exponent is biased by 15
    return struct.unpack("<e", struct.pack("<H", bits))[0] * 2.0 ** (15 - ((1 << (exponent - 1)) - 1))


def expected_value(weight, code: int) -> float:
    if weight.kind == "uint":
        return code
    if weight.kind == "int":
        return (-1, 1)[code] if weight.bits == 1 else code - 2 ** (weight.bits - 1)
    return decoded_float(weight.name, code)


def test_what_a_unit_says_of_a_type_gives_back_its_values(out):
    """The one place where numbers pass from Python to C++: tables, multipliers and byte forms."""
    kernels = {k["name"]: k for k in listed(out, "cpu")}
    weights, seen = {w.name: w for w in KERNEL_TYPES}, 0
    for unit in out.glob("cpu_*_[1-8].cpp"):
        text = unit.read_text()
        tables = {name: [float(v.rstrip("f")) for v in body.split(",")] for name, _, body in TABLE.findall(text)}
        for line in text.splitlines():
            if not (match := KERNEL.match(line)):
                continue
            name, kind, bits, second, act, form = match.groups()
            weight, seen = weights[kernels[name]["weight"]], seen + 1
            shift, offset = map(int, BYTE_FORM.match(form).groups())
            assert int(bits) == weight.bits and act.lower() == "k" + kernels[name]["act"]
            if weight.kind == "codebook":  # its values come with the weight
                assert (kind, second, form) == ("Codebook", None, "ByteForm{0, 0}")
                continue
            for code in range(2**weight.bits):
                if code in weight.invalid_codes:
                    assert tables[second][code] == 0
                elif kind == "Floats":
                    assert tables[second][code] == expected_value(weight, code), (weight.name, code)
                else:
                    byte = int(second) * code if kind == "Codes" else tables[second][code]
                    assert 0 <= byte <= 255 and byte == int(byte)
                    assert (byte - offset) / 2**shift == expected_value(weight, code), (weight.name, code)
    assert seen == len(kernels)


def test_standard_headers_stay_outside_the_target_region(out):
    for variant in families.cpu_variants():
        for unit in out.glob(f"cpu_{variant.name}_*.cpp"):
            lines = unit.read_text().splitlines()
            opening = lines.index("#pragma GCC push_options") if variant.target else len(lines)
            includes = {line: i for i, line in enumerate(lines) if line.startswith("#include")}
            assert includes.pop('#include "templates/cpu/prelude.h"') < opening
            assert ("#pragma GCC pop_options" in lines) == bool(variant.target)
            assert all(i > opening for i in includes.values()) or not variant.target
            assert all(line.startswith('#include "templates/cpu/') for line in includes)


def test_filters(out, tmp_path):
    assert {r.name for r in rows(only="w3a8_*,*e4m3a32_cpu_scalar")} == {
        *(f"w3a8_cpu_{v.name}" for v in families.cpu_variants()),
        "wf8e4m3a32_cpu_scalar",
    }
    assert rows(only="none") == [] and len(rows(arch="cpu")) + len(rows(arch="cuda")) == len(rows(arch="cpu,cuda"))
    assert len(rows(arch="cpu,cuda")) == len(rows()) and {r.family.device for r in rows(arch="cuda")} == {"cuda"}
    with pytest.raises(SchemeError, match="no kernel's name matches 'w9'"):
        rows(only="w9")
    with pytest.raises(SchemeError, match="expected devices out of cpu, cuda, got 'cpu,x'"):
        rows(arch="cpu,x")
    assert generate(tmp_path, "--only", "w9*").returncode == 2
    assert generate(tmp_path, "--only", "w3a32_cpu_scalar").returncode == 0
    assert {p.name for p in tmp_path.glob("*.cpp")} == {"cpu_scalar_3.cpp", "cpu_scalar_shared.cpp"}
    assert generate(tmp_path, "--arch", "cpu").returncode == 0
    assert not list(tmp_path.glob("*.cu")) and "LOWBIT_" not in (tmp_path / "cuda_registry.inc").read_text()


@pytest.mark.parametrize(
    ("archs", "sm80", "narrow", "wide"),
    [
        ("90a", None, ["90a"], ["90a"]),
        ("80;90a", ["80"], ["90a"], ["90a"]),
        ("80", ["80"], None, None),
        ("90", ["90"], ["90"], None),
        ("86;89;120", ["86", "89", "120"], None, None),
        ("80;90a;100;120", ["80", "100", "120"], ["90a", "100"], ["90a"]),
    ],
)
def test_a_kernel_is_built_where_it_is_worth_compiling(tmp_path, archs, sm80, narrow, wide):
    done = generate(tmp_path, "--cuda-archs", archs, "--only", "w4a16_*")
    assert done.returncode == 0, done.stderr
    found = {kernel["name"]: kernel["archs"] for kernel in listed(tmp_path, "cuda")}
    assert {
        "w4a16_gemm_sm80_n64": sm80,
        "w4a16_gemm_sm90_n16": narrow,
        "w4a16_gemm_sm90_n64": wide,
        "w4a16_decode_n4": archs.split(";"),
        "w4a16_dequant_rows": archs.split(";"),
    } == {f"w4a16_{kernel}": found.get(f"w4a16_{kernel}") for kernel in (
        "gemm_sm80_n64", "gemm_sm90_n16", "gemm_sm90_n64", "decode_n4", "dequant_rows"
    )}  # fmt: skip
    registry = (tmp_path / "cuda_registry.inc").read_text()
    assert sorted(re.findall(r"^LOWBIT_\w+\((\w+)", registry, re.MULTILINE)) == sorted(found)


def test_explain_prints_the_reason_of_why_not(monkeypatch, capsys):
    assert command.main(["--explain", "w3a8"]) == 0
    said = capsys.readouterr().out
    assert "w3a8_cpu_scalar: built" in said
    assert "w3a8_dequant_rows: no: family 'dequant' takes x of float32, float16, bfloat16, got int8" in said
    for module in (command, sys.modules["generator.enumerate"]):
        monkeypatch.setattr(module, "why_not", lambda *args, **fields: "three is a crowd")
    assert command.main(["--explain", "w3a8"]) == 0
    assert "w3a8_cpu_scalar: no: three is a crowd" in capsys.readouterr().out
    assert command.main(["--explain", "w3b8"]) == 2
    assert "such as w3a8, got 'w3b8'" in capsys.readouterr().err


def test_table_names_every_weight_type_once(capsys):
    assert command.main(["--table"]) == 0
    names = re.findall(r"`(u?int\d|float\w+)`", capsys.readouterr().out)
    floats = [w.name for w in WEIGHT_TYPES if w.kind == "float"]
    assert names == [
        "int1",
        "int8",
        "uint1",
        "uint8",
        *floats,
        "uint1",
        "uint3",
        "uint4",
        "uint5",
        "uint8",
    ]  # with a codebook


def test_needs_neither_torch_nor_numpy_and_stays_small():
    program = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\nimport generator.__main__ as g\n"
    done = subprocess.run(
        [sys.executable, "-c", program + "sys.exit(g.main(['--list']))"], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert sum(len(p.read_text().splitlines()) for p in (ROOT / "generator").glob("*.py")) <= 600
