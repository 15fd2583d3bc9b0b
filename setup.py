"""Builds the libraries of lowbit/lib: asks the generator for the kernels, writes a ninja file, runs it.

Variables: MAX_JOBS (compilers at a time), LOWBIT_ONLY (only kernels whose names match these globs, or "none"), CXX,
LOWBIT_PORTABLE (1: the library must run wherever manylinux_2_28 does; 0: link plainly, for this machine; unset: the
first if it can be had, else the second), LOWBIT_CUDA_ARCHS (such as "80;90a", or "none"; unset: the GPUs of this
machine when nvcc is on PATH), LOWBIT_LINEINFO (1: CUDA kernels tell profilers their source lines). Metadata stands in
pyproject.toml; docs/wheel.md tells how the wheel is made.
"""

import fcntl
import functools
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
from tools import cuda
from tools.build_graph import CUDA_LIBRARY, GEN, LIBRARY, ROOT, ninja_file, unit_archs

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


@functools.cache
def find_cuda():
    """The CUDA toolkit, or None for a build without CUDA."""
    try:
        return cuda.find(cuda.wanted_archs())
    except ValueError as error:
        stop(error)


def generate(toolkit):
    """Write the kernels to build/gen; what ninja_file is told of sources. Files that stay equal keep their time."""
    command = [sys.executable, "-m", "generator", "--out", GEN, "--arch", "cpu,cuda" if toolkit else "cpu"]
    command += ["--cuda-archs", ";".join(toolkit.archs)] if toolkit else []
    if os.environ.get("LOWBIT_ONLY"):
        command += ["--only", os.environ["LOWBIT_ONLY"]]
    if subprocess.call(command, cwd=ROOT):
        stop("the generator failed, see above")
    manifest = json.loads((ROOT / GEN / "manifest.json").read_text())
    folders = ["csrc/*.cpp", *(["csrc/cuda/*.cpp", "csrc/cuda/*.cu"] if toolkit else [])]
    own = [str(path.relative_to(ROOT)) for pattern in folders for path in sorted(ROOT.glob(pattern))]
    return {"sources": own + [f"{GEN}/{name}" for name in manifest["files"]], "archs": unit_archs(manifest)}


def build():
    """Build the libraries; (their paths, "portable" or "plain")."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        stop(f"there are kernels for Linux on x86-64 only, this is {sys.platform} on {platform.machine()}")
    wanted = os.environ.get("LOWBIT_PORTABLE", "")
    kinds = LINKS.get(wanted) or stop(f"expected LOWBIT_PORTABLE to be 0, 1 or unset, got {wanted!r}")
    toolkit, (cxx, ninja) = find_cuda(), find_tools()
    print("lowbit: " + (f"CUDA kernels for {';'.join(toolkit.archs)}" if toolkit else "no CUDA kernels in this build"))
    (ROOT / "build").mkdir(exist_ok=True)
    lock = open(ROOT / "build/lock", "w")  # closed, and so released, when build() returns
    fcntl.flock(lock, fcntl.LOCK_EX)
    (ROOT / "build/build.ninja").write_text(ninja_file(cxx, torch_headers(), cuda=toolkit, **generate(toolkit)))
    command = [ninja, "-f", "build/build.ninja", f"-j{os.environ.get('MAX_JOBS') or len(os.sched_getaffinity(0))}"]
    if subprocess.call([*command, "objects"], cwd=ROOT):
        stop("a source does not compile, see above; the oldest compiler that knows every instruction set is g++ 11")
    for kind in kinds:
        made = [f"build/{kind}/{name}" for name in ((LIBRARY, CUDA_LIBRARY) if toolkit else (LIBRARY,))]
        if subprocess.call([*command, *made], cwd=ROOT) == 0:
            return [ROOT / path for path in made], kind
        print(f"lowbit: the {kind} link failed, see above")
    stop("the library does not link, see above")


class BuildLibrary(build_ext):
    """Puts the libraries and the manifest into lowbit/lib, in the source tree for a developer's build."""

    def outputs(self):
        base = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        names = (LIBRARY, CUDA_LIBRARY, "manifest.json") if find_cuda() else (LIBRARY, "manifest.json")
        return [base / "lowbit/lib" / name for name in names]

    def get_outputs(self):
        return list(map(str, self.outputs()))

    def get_output_mapping(self):
        return {}

    def run(self):
        libraries, self.kind = build()
        targets = self.outputs()
        if len(libraries) == 1:  # that of an earlier build with CUDA would not fit the manifest of one without
            (targets[0].parent / CUDA_LIBRARY).unlink(missing_ok=True)
        for source, target in zip((*libraries, ROOT / GEN / "manifest.json"), targets):
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
