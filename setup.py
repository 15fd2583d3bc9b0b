"""Builds lowbit/lib/liblowbit_cpu.so: asks the generator for the kernels, writes a ninja file, runs it.

Variables: MAX_JOBS (compilers at a time), LOWBIT_ONLY (only kernels whose names match these globs, or "none"), CXX,
LOWBIT_PORTABLE (1: the library must run wherever manylinux_2_28 does; 0: link plainly, for this machine; unset: the
first if it can be had, else the second). Metadata stands in pyproject.toml; docs/wheel.md tells how the wheel is made.
"""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"lowbit: building needs setuptools 77, found {setuptools.__version__}: run `pip install -U setuptools`")
from setuptools.command.bdist_wheel import bdist_wheel

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tools.build_graph import GEN, LIBRARY, ROOT, ninja_file

LINKS = {"1": ["portable"], "0": ["plain"], "": ["portable", "plain"]}


def stop(sentence):
    sys.exit(f"lowbit: {sentence}")


def torch_headers():
    """The folder of torch's headers. Why: find_spec does not import torch, which takes seconds and may fail."""
    spec = find_spec("torch")
    folder = Path(spec.submodule_search_locations[0], "include") if spec else None
    if folder is None or not (folder / "torch/csrc/stable/c/shim.h").is_file():
        found = f"one without them in {folder.parent}" if folder else f"no torch for {sys.executable}"
        stop(
            f"building needs the headers of torch 2.10 or newer (its CPU build will do), found {found}: "
            "run `pip install torch`, then `pip install --no-build-isolation .`"
        )
    return folder


def find_tools():
    """(compiler, ninja)."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    cxx = next(filter(shutil.which, names), None)
    if cxx is None:
        stop(f"building needs a C++17 compiler, found none called {', '.join(names)}: install g++, or set CXX")
    # Why: `pip install ninja` puts it beside this Python, which need not be on PATH.
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    return cxx, shutil.which("ninja", path=places) or stop("building needs ninja, found none: run `pip install ninja`")


def generate():
    """Write the kernels to build/gen and return all sources. Files that stay equal keep their time."""
    command = [sys.executable, "-m", "generator", "--out", GEN]
    if os.environ.get("LOWBIT_ONLY"):
        command += ["--only", os.environ["LOWBIT_ONLY"]]
    if subprocess.call(command, cwd=ROOT):
        stop("the generator failed, see above")
    generated = json.loads((ROOT / GEN / "manifest.json").read_text())["files"]
    return [f"csrc/{p.name}" for p in sorted((ROOT / "csrc").glob("*.cpp"))] + [f"{GEN}/{name}" for name in generated]


def build():
    """Build the library; (its path, "portable" or "plain")."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        stop(f"there are kernels for Linux on x86-64 only, this is {sys.platform} on {platform.machine()}")
    if os.environ.get("LOWBIT_CUDA_ARCHS"):
        print("lowbit: LOWBIT_CUDA_ARCHS is set, but this version has no CUDA kernels: only the CPU part is built")
    wanted = os.environ.get("LOWBIT_PORTABLE", "")
    kinds = LINKS.get(wanted) or stop(f"expected LOWBIT_PORTABLE to be 0, 1 or unset, got {wanted!r}")
    cxx, ninja = find_tools()
    (ROOT / "build").mkdir(exist_ok=True)
    lock = open(ROOT / "build/lock", "w")  # closed, and so released, when build() returns
    fcntl.flock(lock, fcntl.LOCK_EX)
    (ROOT / "build/build.ninja").write_text(ninja_file(cxx, torch_headers(), generate()))
    command = [ninja, "-f", "build/build.ninja"] + [f"-j{n}" for n in [os.environ.get("MAX_JOBS")] if n]
    if subprocess.call([*command, "objects"], cwd=ROOT):
        stop("a source does not compile, see above; the oldest compiler that knows every instruction set is g++ 11")
    for kind in kinds:
        if subprocess.call([*command, f"build/{kind}/{LIBRARY}"], cwd=ROOT) == 0:
            return ROOT / f"build/{kind}/{LIBRARY}", kind
        print(f"lowbit: the {kind} link failed, see above")
    stop("the library does not link, see above")


class BuildLibrary(build_ext):
    """Puts the library and the manifest into lowbit/lib, in the source tree for a developer's build."""

    def outputs(self):
        base = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        return [base / "lowbit/lib" / name for name in (LIBRARY, "manifest.json")]

    def get_outputs(self):
        return list(map(str, self.outputs()))

    def get_output_mapping(self):
        return {}

    def run(self):
        library, self.kind = build()
        for source, target in zip((library, ROOT / GEN / "manifest.json"), self.outputs()):
            target.parent.mkdir(parents=True, exist_ok=True)
            # Why: a new file, not new contents; a process that has the old library mapped must keep it.
            shutil.copy2(source, f"{target}.new")
            os.replace(f"{target}.new", target)


class Wheel(bdist_wheel):
    """A wheel for every Python 3: no file of it depends on the version of Python or torch."""

    def run(self):
        # Why: setuptools never deletes there, and a module that was renamed would stay in the wheel.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self):
        kind = getattr(self.get_finalized_command("build_ext"), "kind", "plain")
        return "py3", "none", "manylinux_2_28_x86_64" if kind == "portable" else "linux_x86_64"


COMMANDS = {"build_ext": BuildLibrary, "bdist_wheel": Wheel}
setuptools.setup(ext_modules=[setuptools.Extension("lowbit.lib", [])], cmdclass=COMMANDS)
