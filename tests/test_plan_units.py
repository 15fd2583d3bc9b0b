"""Risk: units of a library that include the plan share its inline functions, but have tables of their own."""

import ctypes
import os
import shutil
import subprocess

import pytest

from native.build import CSRC, HERE

SHAPES = ((4608, 3584), (6144, 4096), (8192, 8192), (28672, 4096))
TILES = (32, 48, 64, 96, 128, 144, 160, 192, 208, 256)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The plan in one unit, and in two, of which the first has the times and the second the splits."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("units that include the plan need a C++ compiler")
    folder = tmp_path_factory.mktemp("units")

    def library(name: str, units: list[list[str]]) -> ctypes.CDLL:
        # Why -O0: nothing is inlined, so that a function of one unit calls the other one's.
        command = [compiler, "-std=c++17", "-O0", "-fPIC", f"-I{CSRC}", "-Wno-unknown-pragmas", "-c"]
        objects = [str(folder / f"{name}{i}.o") for i in range(len(units))]
        for macros, target in zip(units, objects, strict=True):
            subprocess.run([*command, *macros, str(HERE / "plan_in_units.cpp"), "-o", target], check=True)
        subprocess.run([compiler, "-shared", *objects, "-o", str(folder / f"{name}.so")], check=True)
        loaded = ctypes.CDLL(str(folder / f"{name}.so"))
        loaded.tile_us.restype = ctypes.c_float
        for function in (loaded.tile_us, loaded.split_of):
            function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
        return loaded

    return library("one", [["-DTIMES", "-DSPLITS"]]), library("two", [["-DTIMES"], ["-DSPLITS"]])


def test_every_unit_has_the_same_times_and_splits(libraries):
    one, two = libraries
    kinds = set()
    for product in ((tokens, bits, n, k) for n, k in SHAPES for tokens in TILES for bits in range(1, 9)):
        assert one.tile_us(*product) == two.tile_us(*product) and 1 < one.tile_us(*product) < 1000, product
        assert one.split_of(*product) == two.split_of(*product), product
        kinds.add(one.split_of(*product) // 10000)
    assert kinds == {0, 4, 8}, "whole blocks, those of 64 rows, halves"
