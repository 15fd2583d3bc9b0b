"""A peer in a shared library, behind eight C functions (benchmarks/README.md has the contract)."""

from __future__ import annotations

import ctypes
import os

import torch

from .side import Problem, Side, Unavailable

_SIGNATURES = {
    "peer_name": (ctypes.c_char_p, []),
    "peer_formats": (ctypes.c_char_p, []),
    "peer_prepare": (ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]),
    "peer_clone": (ctypes.c_void_p, [ctypes.c_void_p]),
    "peer_bytes": (ctypes.c_longlong, [ctypes.c_void_p]),
    "peer_dequantize": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p]),
    "peer_matmul": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]),
    "peer_free": (None, [ctypes.c_void_p]),
}
_SMALL = Problem.make(64, 512)  # what a format's bits are counted on


class Plugin(Side):
    def __init__(self, library: ctypes.CDLL, version: str, form: str):
        self.family, self.version = version.split()[0], version
        small = library.peer_prepare(form.encode(), _SMALL.weight.data_ptr(), _SMALL.n, _SMALL.k)
        if not small:
            raise Unavailable(f"the library can't prepare {form} on this CPU")
        bits = library.peer_bytes(small) * 8 / _SMALL.weight.numel()
        library.peer_free(small)
        super().__init__(form, bits)
        self.library, self.form, self.handles, self.threads = library, form, [], 1

    def open(self, problem, copies, threads):
        self.threads = threads
        if self.handles:
            return
        self.shape = problem.weight.shape
        first = self.library.peer_prepare(self.form.encode(), problem.weight.data_ptr(), *self.shape)
        if not first:
            raise Unavailable(f"the library can't prepare {self.form} for {self.shape[0]}x{self.shape[1]}")
        self.handles = [first]
        while len(self.handles) < copies:
            self.handles.append(self.library.peer_clone(first))
        values = torch.empty(self.shape)
        known = self.library.peer_dequantize(first, values.data_ptr()) == 0
        self.values = values if known else None

    def bind(self, x):
        y = torch.empty(len(x), self.shape[0])
        matmul, handles, threads, m = self.library.peer_matmul, self.handles, self.threads, len(x)
        given, taken = x.data_ptr(), y.data_ptr()

        def call(i):
            matmul(handles[i], given, m, taken, threads)
            return y

        call.keeps = x  # Why: the library sees an address only.
        return call

    def dequantized(self, rows):
        return None if self.values is None else self.values[rows].double()

    def close(self):
        for handle in self.handles:
            self.library.peer_free(handle)
        self.handles, self.values = [], None


def sides(path: str) -> tuple[list[Side], dict[str, str]]:
    """The sides of one library, and why for each format it can't run. Raises Unavailable when it does not load."""
    try:
        library = ctypes.CDLL(os.path.abspath(path))
        for name, (returns, takes) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = returns, takes
    except (OSError, AttributeError) as why:
        raise Unavailable(str(why)) from why
    version = library.peer_name().decode()
    found, skipped = [], {}
    for form in library.peer_formats().decode().split():
        try:
            found.append(Plugin(library, version, form))
        except Unavailable as why:
            skipped[f"{version.split()[0]} {form}"] = str(why)
    return found, skipped
