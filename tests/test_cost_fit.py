"""Risk: constants of the plan are fitted by predictions that are not the plan's, or to what chooses worse."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import cost_fit
import fit_split_costs
import fit_tile_costs
import tile_model

PRODUCTS = [(8192, 8192, 256, 4), (4608, 3584, 384, 8), (3584, 14336, 64, 1), (57344, 8192, 2048, 6)]
PRODUCTS += [(2048, 2048, 32, 2), (4096, 1024, 128, 4), (8192, 8192, 32, 4)]


def half_us(ways: list) -> list[float]:
    if not ways:
        return []
    constants = zip(*(tile_model.half_costs()[tile] for tile in fit_tile_costs.HALVES), strict=True)
    named = dict(zip(("half_start", "half_step"), (torch.tensor(one) for one in constants), strict=True))
    return fit_tile_costs.halves_model(ways)(named).tolist()


@pytest.mark.parametrize("product", PRODUCTS)
def test_predictions_of_tiles_are_those_of_the_header(product):
    n, k, m, bits = product
    costs = tile_model.costs()
    assert len(costs) == 10
    for tile, cost in costs.items():
        us = tile_model.native.tile_us(2, tile, [m, n, k], bits, False, False, 128, 0, 90, [132, 66])
        found = tile_model.predict(cost, cost["step"][bits - 1], tile_model.work_of(tile, n, k, m, bits))
        ways = [(product, (tile, blocks)) for blocks in fit_tile_costs.MEET if bits <= 4 and tile in (32, 64)]
        for (_, (_, blocks)), us_of_half in zip(ways, half_us(ways), strict=True):
            short = fit_tile_costs.steps_of_half(k, blocks) <= fit_tile_costs.MOST_STEPS[tile]
            if short and -(-n // 128) * -(-m // tile) <= {1: 132, 2: 66, 4: 30}[blocks]:
                found = min(found, us_of_half)
        assert found == pytest.approx(us, rel=1e-4), tile


def test_the_model_of_splits_is_that_of_the_header():
    """By the header's own constants, read by what each of them adds to a prediction of the header."""
    splits = [(8192, 8192, 8, 4, (4, 2, 1, 8)), (37888, 3584, 16, 6, (9, 1, 1, 16)), (6144, 4096, 16, 1, (6, 2, 2, 16)),
              (28672, 4096, 8, 8, (16, 1, 1, 16)), (2048, 2048, 16, 3, (2, 4, 2, 8))]  # fmt: skip
    text = (tile_model.ROOT / "csrc/cuda/split.h").read_text()
    constants = {name: [] for name in fit_split_costs.START}
    for kind in ("kHalfCosts", "kWholeCosts"):
        literal = (
            text.split(f"SplitCosts {kind} = ")[1].split(";")[0].replace("f", "").replace("{", "[").replace("}", "]")
        )
        for name, value in zip(fit_split_costs.START, json.loads(literal), strict=True):
            constants[name].append(value)
    constants = {name: torch.tensor(value, dtype=torch.float64) for name, value in constants.items()}
    found = fit_split_costs.model_of([((n, k, tokens, bits), split) for n, k, tokens, bits, split in splits])(constants)
    for us, (n, k, tokens, bits, split) in zip(found.tolist(), splits, strict=True):
        by_header = tile_model.native.split_us(
            -(-n // 16), -(-k // 128), tokens, bits, [*split[:3], 1, split[3], 0], [132, 66], False
        )
        assert us == pytest.approx(by_header, rel=1e-4), split


def test_files_become_products_with_the_least_of_their_times(tmp_path):
    rows = [["int4", 64, 128, 32, 48, 7.0], ["int4", 64, 128, 32, 64, 5.0], ["int4", 64, 128, 32, 64, 6.0],
            ["int4", 64, 128, 32, 64, 2, 4.0],
            ["float8_e4m3", 64, 128, 32, 64, 1.0], ["int4", 64, 128, 16, 16, 1.0]]  # fmt: skip
    (tmp_path / "tiles").write_text(json.dumps({"rows": rows}))
    assert fit_tile_costs.products_of([str(tmp_path / "tiles")]) == {
        (64, 128, 32, 4): {(48, 0): 7.0, (64, 0): 5.0, (64, 2): 4.0}
    }
    rows = [["int4", 64, 128, 8, None, 1.0], ["int4", 64, 128, 8, [2, 4, 1, 2, 8, 4], 3.0],
            ["int4", 64, 128, 8, [2, 4, 1, 3, 8, 6], 2.0], ["int4", 64, 128, 8, [16, 1, 1, 2, 16, 0], 4.0]]  # fmt: skip
    (tmp_path / "splits").write_text(json.dumps({"rows": rows}))
    times = {(2, 4, 1, 8): 2.0, (16, 1, 1, 16): 4.0}
    assert fit_split_costs.products_of(str(tmp_path / "splits")) == {(64, 128, 8, 4): times}


def test_fitted_constants_choose_the_faster_candidate_of_a_device_that_is_not_like_the_model():
    """Candidate 0 takes 2 + work, 1 takes 5 + work / 2; the model knows no start but one for both, so that it can't
    predict both, but choose."""
    work = torch.arange(1.0, 17.0, dtype=torch.float64)
    us = torch.stack([2 + work, 5 + work / 2], dim=1).flatten()
    measured = cost_fit.Measured([i // 2 for i in range(32)], us.tolist())
    twice, second = work.repeat_interleave(2), torch.arange(32) % 2

    def model(c):
        return c["start"] + twice * c["step"][second] + 2.0 * second

    found = measured.fit(model, {"start": 1.0, "step": [1.0, 1.0]})
    lost = measured.lost(model(found))
    assert lost.mean() < 0.005 < measured.lost(model({"start": torch.ones(()), "step": torch.ones(2)})).mean()
    assert "16 products" in cost_fit.summary(lost)
