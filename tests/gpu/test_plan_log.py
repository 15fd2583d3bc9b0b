"""Risk: the log of plans misses products of compiled or captured graphs, or names a kernel that did not run."""

import logging
import re

import pytest
import torch

import lowbit
from lowbit import extension
from lowbit.autotune import log

from . import oracle
from .kernels import kernels_launched, needs_kernels, product_rows, ran

pytestmark = needs_kernels


@pytest.fixture
def said(caplog):
    """The lines of new products, while every product is watched."""
    library = extension.cuda()
    log.watch(library)
    with caplog.at_level(logging.INFO, "lowbit"):
        yield lambda: [record.getMessage() for record in caplog.records]
    library.lowbit_cuda_watch(None)


def test_each_bucket_is_told_once_with_the_kernel_that_ran(said):
    weight = oracle.make("int4", (512, 1024))
    for m in (1, 3, 4, 20, 24, 1, 3):
        x, before = oracle.normal(m, 1024, dtype=torch.float16), len(said())
        launched = kernels_launched(lambda x=x: lowbit.matmul(x, weight.pw))
        for line in said()[before:]:
            kernel = re.search(r"w4a16_\w+", line)[0]  # the first one named
            assert f"M {m}" in line and ran(launched, kernel), (line, launched)
    assert len(said()) == 3


def test_a_forced_kernel_is_told(said):
    name = next(
        r["name"] for r in product_rows() if (r["weight"], r["act"], r["family"]) == ("int4", "float16", "decode")
    )
    weight = oracle.make("int4", (512, 1024))
    with extension.force_cuda_kernel(name):
        lowbit.matmul(oracle.normal(1, 1024, dtype=torch.float16), weight.pw)
    assert re.search(rf"{name}( [\d.]+ us)?, forced", said()[0])


def test_expanded_weights_are_told(said):
    weight = oracle.make("int4", (512, 1024))
    lowbit.matmul(oracle.normal(2, 1024, dtype=torch.float32), weight.pw)
    assert "w4a32_dequant_rows, which expands" in said()[0]


def test_compiled_and_captured_products_are_told_and_right(said):
    weight, x = oracle.make("int4", (512, 1024)), oracle.normal(2, 1024, dtype=torch.float16)
    eager = lowbit.matmul(x, weight.pw)
    compiled = torch.compile(lambda x: lowbit.matmul(x, weight.pw), fullgraph=True)
    assert torch.equal(compiled(x), eager)
    wide, small = oracle.normal(8, 1024, dtype=torch.float16), oracle.make("int4", (256, 1024))
    lowbit.matmul(wide, small.pw)  # what is done once only, such as loading the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = lowbit.matmul(wide, weight.pw)
        assert "M 8" in said()[-1] and "N 512" in said()[-1]
    graph.replay()
    assert torch.equal(y, lowbit.matmul(wide, weight.pw))
    assert [re.search(r"M (\d+)", line)[1] for line in said()] == ["2", "8", "8"]
