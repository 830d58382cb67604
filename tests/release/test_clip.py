"""No example moves the sum by more than the clip norm, whatever its numbers are and whatever happens on the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowkey.boundary import PerExample
from lowkey.factors import Dense, Factor, Outer
from lowkey.factors.kernels import Convolution, Geometry
from lowkey.release import ClippedSum

CLIP_NORM = 1.0
ROUNDING = 2e-6
"""Relative: a few units in the last place of float32."""


def moved(factor: Factor, shape: tuple[int, ...], batch_size: int) -> float:
    total = ClippedSum({"w": shape}, CLIP_NORM, torch.float32, torch.device("cpu"))
    total.add(PerExample({"w": factor}, batch_size))
    return float(total.take()._blocks["w"].double().norm())


def cancelling(seed: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of a 1 x 1 convolution whose products cancel but for their rounding; all other examples are zero."""
    torch.manual_seed(seed)
    inputs, backprops = torch.zeros(2, batch_size, 2, 4, 4)
    inputs[0] = torch.randn(2, 4, 4)
    columns, _ = torch.linalg.qr(inputs[0].flatten(1).T.double())
    signs = torch.randint(0, 2, (2, 16)).double() * 2 - 1
    backprops[0] = (signs - signs @ columns @ columns.T).reshape(2, 4, 4).float()
    return inputs * 1e4, backprops * 1e4


@pytest.mark.parametrize("batch_size", [2, 8])
@pytest.mark.parametrize("seed", range(12))
def test_terms_of_a_convolution_that_cancel_move_the_sum_by_at_most_the_clip_norm(seed: int, batch_size: int) -> None:
    inputs, backprops = cancelling(seed, batch_size)
    factor = Convolution(backprops, inputs, Geometry((1, 1), (0, 0), (1, 1), 1), (1, 1), (2, 2, 1, 1))
    assert moved(factor, (2, 2, 1, 1), batch_size) <= CLIP_NORM * (1 + ROUNDING)


@pytest.mark.parametrize(("small", "large"), [(2e-23, 1e18), (1e-19, 1e18), (3e-23, 1e19)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_side_whose_square_underflows_is_clipped_beside_a_huge_one(small: float, large: float, transposed: bool) -> None:
    rows, cols = torch.full((1, 2000, 4000), small), torch.full((1, 2000, 1), large)
    factor = Outer(cols, rows, (1, 4000)) if transposed else Outer(rows, cols, (4000, 1))
    assert moved(factor, factor.shape, 1) <= CLIP_NORM * (1 + ROUNDING)


@pytest.mark.parametrize("setting", ["autocast", "medium", "highest"])
def test_the_precision_that_a_program_runs_in_reaches_neither_norms_nor_sums(setting: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if setting == "medium" else "highest")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setting == "autocast"):
            # Numbers that bfloat16 rounds upwards, each alone and all together.
            inputs, backprops = torch.full((1, 8, 12, 12), 1.0 + 11 * 2**-9), torch.full((1, 16, 10, 10), 1.0 + 11 * 2**-9)
            factor = Convolution(backprops, inputs, Geometry((1, 1), (0, 0), (1, 1), 1), (3, 3), (16, 8, 3, 3))
            side = inputs.flatten(2)
            assert moved(factor, (16, 8, 3, 3), 1) == pytest.approx(CLIP_NORM, rel=1e-4)
            assert moved(Outer(side, side, (144, 144)), (144, 144), 1) == pytest.approx(CLIP_NORM, rel=1e-4)
            assert torch.get_float32_matmul_precision() == ("medium" if setting == "medium" else "highest")
    finally:
        torch.set_float32_matmul_precision(before)


class OutOfMemory(Dense):
    """Gradients whose sum does not fit."""

    def add_sum(self, total: Tensor, weights: Tensor) -> None:
        raise MemoryError("no room for the sum")


@pytest.mark.parametrize("failing", ["first", "last"])
def test_a_microbatch_that_is_added_again_after_a_failure_counts_once(failing: str) -> None:
    value = torch.full((1, 3), 5.0)
    blocks = {"first": Dense(value), "last": Dense(value)}
    total = ClippedSum(dict.fromkeys(blocks, (3,)), CLIP_NORM, torch.float32, torch.device("cpu"))
    with pytest.raises(MemoryError):
        total.add(PerExample({**blocks, failing: OutOfMemory(value)}, 1))
    total.add(PerExample(blocks, 1))
    sums = total.take()._blocks
    assert float(torch.stack([sums[name] for name in blocks]).double().norm()) <= CLIP_NORM * (1 + ROUNDING)
