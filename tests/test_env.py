"""Risk: a variable is misspelt and nobody notices, or importing and loading do more, or less, than they should."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lowbit
from lowbit import env, extension, kernel_list, libraries

ROOT = Path(lowbit.__file__).parents[1]


def python(code, root=ROOT, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOWBIT_")}
    environment.update(PYTHONPATH=str(root), **variables)
    # Why cwd: Python looks there before PYTHONPATH.
    options = {"env": environment, "cwd": root, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run([sys.executable, "-c", code], **options)


def last_line(done):
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_import_is_cheap_and_every_name_arrives():
    done = python(
        "import sys, lowbit; assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert set(lowbit.__all__) <= set(dir(lowbit)) and lowbit.LowbitError\n"
        "assert 'torch' not in sys.modules\n"
        "for name in lowbit.__all__: getattr(lowbit, name)\n"
        "assert 'torch' in sys.modules and not hasattr(lowbit, 'no_such_name'); print(lowbit.__version__)"
    )
    assert (done.stdout.strip(), done.returncode) == (lowbit.__version__, 0), done.stderr


def test_forced_instruction_set_is_used():
    code = "from lowbit import extension; print(extension.isa(), extension.isas()[0])"
    for name in extension.isas():
        assert python(code, LOWBIT_FORCE_ISA=name).stdout.split() == [name, extension.isas()[0]]
    assert python(code, LOWBIT_FORCE_ISA="").stdout.split() == [extension.isas()[0]] * 2


@pytest.mark.parametrize("code", ["from lowbit import extension; extension.load()", "import lowbit; lowbit.matmul"])
def test_misspelt_instruction_set_is_an_error_with_the_nearest(code):
    line = last_line(python(code, LOWBIT_FORCE_ISA="scaler"))
    assert line.startswith("lowbit.errors.EnvironmentVariableError: LOWBIT_FORCE_ISA") and "scalar" in line


def test_instruction_set_that_the_cpu_lacks_is_an_error():
    # Every CPU has the scalar kernels, so the library is asked with the ISAs that this CPU lacks, if any.
    rows = re.findall(r"_cpu_(\w+)", "\n".join(kernel_list.kernel_rows()))
    lacking = sorted(set(rows) - set(extension.isas()))
    if not lacking:
        pytest.skip("this CPU has every instruction set of the build")
    line = last_line(python("from lowbit import extension; extension.load()", LOWBIT_FORCE_ISA=lacking[0]))
    assert f"this CPU has no '{lacking[0]}'" in line


def test_error_at_load_is_raised_again_and_can_be_mended():
    done = python(
        "import os; from lowbit import extension, EnvironmentVariableError\n"
        "for _ in range(2):\n"
        "    try: extension.load()\n"
        "    except EnvironmentVariableError: print('refused')\n"
        "os.environ['LOWBIT_FORCE_ISA'] = 'scalar'; print(extension.isa())",
        LOWBIT_FORCE_ISA="nothing",
    )
    assert done.stdout.split() == ["refused", "refused", "scalar"], done.stderr


def test_variable_that_does_not_exist_is_named_once():
    done = python("from lowbit import extension; extension.load(); extension.load()", LOWBIT_FORCE_IAS="scalar")
    assert done.returncode == 0
    assert done.stderr.count("LOWBIT_FORCE_IAS is set, but lowbit reads LOWBIT_FORCE_ISA") == 1


def test_values_outside_a_fixed_list_are_refused(monkeypatch):
    monkeypatch.setenv("LOWBIT_PORTABLE", "yes")
    with pytest.raises(lowbit.EnvironmentVariableError, match="LOWBIT_PORTABLE does not know 'yes'; did you mean 1, 0"):
        env.get("LOWBIT_PORTABLE")
    monkeypatch.setenv("LOWBIT_PORTABLE", " 1 ")
    assert env.get("LOWBIT_PORTABLE") == "1"
    monkeypatch.setenv("LOWBIT_PORTABLE", "")
    assert env.get("LOWBIT_PORTABLE") is None
    with pytest.raises(KeyError):
        env.get("LOWBIT_NO_SUCH_VARIABLE")


def test_table_has_every_variable_that_the_sources_read():
    sources = [*(ROOT / "lowbit").rglob("*.py"), *(p for p in [ROOT / "setup.py"] if p.is_file())]
    read = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                read |= set(re.findall(r"^LOWBIT_[A-Z]+(?:_[A-Z]+)*$", node.value))
    assert {v.name for v in env.VARIABLES} >= read - {"LOWBIT_"}
    for variable in env.VARIABLES:
        assert f"| `{variable.name}` |" in env.table() and variable.meaning.endswith(".")


# ---- a library that is not as it should be ------------------------------------------------------------------------


@pytest.fixture
def installation(tmp_path):
    """A copy of the package without its library."""
    ignore = shutil.ignore_patterns("lib", "__pycache__", "data")
    shutil.copytree(ROOT / "lowbit", tmp_path / "lowbit", ignore=ignore)
    (tmp_path / "lowbit/lib").mkdir()
    return tmp_path


def test_missing_library_says_how_to_get_one(installation):
    line = last_line(python("import lowbit; lowbit.matmul", installation))
    assert line.startswith("lowbit.errors.ExtensionError") and "pip install --no-build-isolation ." in line
    assert "liblowbit_cpu.so" in line
    done = python("import lowbit; print(lowbit.info()); print(lowbit.SchemeError)", installation)
    assert done.returncode == 0 and "is missing" in done.stdout


@pytest.mark.parametrize("content", [b"", b"\x7fELF no library", b"#!/bin/sh\n" * 100])
def test_broken_library_says_what_it_needs(installation, content):
    (installation / "lowbit/lib/liblowbit_cpu.so").write_bytes(content)
    line = last_line(python("import lowbit; lowbit.matmul", installation))
    assert line.startswith("lowbit.errors.ExtensionError") and "torch 2.10 or newer, got torch" in line


def test_library_of_something_else_is_refused(installation):
    import _ctypes

    shutil.copy(_ctypes.__file__, installation / "lowbit/lib/liblowbit_cpu.so")
    line = last_line(python("import lowbit; lowbit.matmul", installation))
    assert "ExtensionError" in line and "does not load" in line


def test_second_copy_of_the_library_in_one_process_is_survived(tmp_path):
    copy = shutil.copy(libraries.LIBRARY, tmp_path / "liblowbit_cpu.so")
    done = python(
        f"import torch, lowbit; from lowbit import extension; extension.load(); torch.ops.load_library({str(copy)!r})\n"
        "pw = lowbit.pack_weight(lowbit.quantize(torch.ones(16, 32), 'int4', group_size=32))\n"
        "print(round(lowbit.matmul(torch.ones(1, 32), pw).mean().item()))"
    )
    assert done.stdout.strip() == "32", done.stderr


def test_manifest_that_does_not_fit_the_library_is_refused(monkeypatch, tmp_path):
    for text in ("", "{}", '{"kernels": []}'):
        (tmp_path / "manifest.json").write_text(text)
        monkeypatch.setattr(kernel_list, "MANIFEST", tmp_path / "manifest.json")
        with pytest.raises(lowbit.ExtensionError):
            kernel_list.manifest()
