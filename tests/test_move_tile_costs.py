"""Risk: the plan's constants are moved by predictions that are not the plan's, or to where it chooses worse."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import move_tile_costs as moving

PRODUCTS = [(8192, 8192, 256, 4), (4608, 3584, 384, 8), (3584, 14336, 64, 1), (57344, 8192, 2048, 6)]


@pytest.mark.parametrize("product", PRODUCTS)
def test_predictions_are_those_of_the_header(product):
    n, k, m, bits = product
    for tile, cost in moving.costs().items():
        us = moving.tile_model.native.tile_us(2, tile, [m, n, k], bits, False, False, 128, 0, 90, [132, 66])
        assert moving.predict(cost, tile, product) == pytest.approx(us, rel=1e-4), tile


def test_files_of_each_kind_become_products(tmp_path):
    us = {"w4a16_gemm_sm90_n48": 7.0, "w4a16_gemm_sm90_n64": 5.0}
    sweep = [["int4", 64, 128, 32, 48, 7.0], ["int4", 64, 128, 32, 64, 5.0], ["float8_e4m3", 64, 128, 32, 64, 5.0]]
    tune = [{"weight": "int4", "shape": [64, 128], "m": 32, "us": us}]
    table = [["int4", "float16", 64, 128, 128, "none", [[17, 32, us]]]]
    files = {"sweep": sweep, "tune": tune, "table": table}
    for name, rows in files.items():
        path = tmp_path / name
        path.write_text(json.dumps({"rows": rows}))
        weight = moving.TABLE if name == "table" else 1.0
        assert moving.products_of(str(path)) == [((64, 128, 32, 4), {48: 7.0, 64: 5.0}, weight)]


def test_moved_constants_choose_the_faster_tile():
    """Of n128 and n256 the plan would take the one that a device finds slower, by a prediction 2% less."""
    product, before = (8192, 8192, 256, 5), moving.costs()
    us = {tile: moving.predict(before[tile], tile, product) for tile in (128, 256)}
    before[128]["start"] += us[256] / 0.98 - us[128]
    times = {256: us[256] * 1.1, 128: us[256] * 1.1 / 1.2}
    after = moving.descend(before, [(product, times, 1.0)])
    assert moving.lost(before, product, times) == pytest.approx(0.2) and moving.lost(after, product, times) == 0
