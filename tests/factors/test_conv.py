"""What a convolution's factor holds, beside one convolution for each example; whole models are in tests/oracle."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lowkey as lk
from lowkey.factors.kernels import Convolution, Geometry
from lowkey.sketch.shared import coordinates_of_products

GEOMETRIES = [
    Geometry((1, 1), (0, 0), (1, 1), 1),
    Geometry((2, 1), (1, 0), (1, 2), 1),
    Geometry((3, 2), (1, 1), (1, 1), 1),
    Geometry((2, 2), (0, 2), (1, 3), 1),
    Geometry((2, 3), (2, 1), (2, 1), 2),
    Geometry((1, 1), (1, 1), (1, 1), 4),
]

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)


def made(geometry: Geometry, batch: int = 3, kernel_size: tuple[int, ...] = (3, 2)) -> Convolution:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, 4, 8, 7, generator=generator, dtype=torch.float64)
    shape = (8, 4 // geometry.groups, *kernel_size)
    outputs = geometry.run(inputs, torch.zeros(shape, dtype=torch.float64))
    return Convolution(torch.randn(outputs.shape, generator=generator, dtype=torch.float64), inputs, geometry, kernel_size, shape)


def one_by_one(factor: Convolution) -> Tensor:
    """Each example's gradient by autograd, through an example's own convolution."""
    found: list[Tensor] = []
    for inputs, backprops in zip(factor.inputs, factor.backprops, strict=True):
        kernel = torch.zeros(factor.shape, dtype=torch.float64, requires_grad=True)
        geometry = factor.geometry
        outputs = F.conv2d(inputs[None], kernel, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
        found += torch.autograd.grad(outputs, kernel, backprops[None])
    return torch.stack(found)


@every_geometry
def test_kernels_of_all_examples_at_once_are_those_of_each_alone(geometry: Geometry) -> None:
    factor = made(geometry)
    assert torch.allclose(factor.dense(), one_by_one(factor), rtol=0, atol=1e-12)


@every_geometry
def test_the_number_of_places_is_that_of_the_outputs(geometry: Geometry) -> None:
    factor = made(geometry)
    assert geometry.num_positions(factor.inputs, factor.shape[2:]) == factor.backprops[0, 0].numel()


@pytest.mark.parametrize("geometry", [geometry for geometry in GEOMETRIES if geometry.groups == 1], ids=str)
def test_patches_times_the_kernel_are_the_outputs(geometry: Geometry) -> None:
    factor = made(geometry)
    kernel = torch.randn(factor.shape, dtype=torch.float64)
    outputs = geometry.patches(factor.inputs, factor.shape[2:]) @ kernel.flatten(1).T
    assert torch.allclose(outputs.transpose(1, 2), geometry.run(factor.inputs, kernel).flatten(2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel_size", [(3, 2), (2, 4), (5, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("geometry", [geometry for geometry in GEOMETRIES if geometry.groups == 1], ids=str)
def test_products_of_patches_are_those_of_patches_that_are_laid_out(geometry: Geometry, kernel_size: tuple[int, ...]) -> None:
    factor = made(geometry, kernel_size=kernel_size)
    patches = geometry.patches(factor.inputs, kernel_size)
    assert torch.allclose(geometry.patch_products(factor.inputs, kernel_size), patches @ patches.mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel_size", [(3,), (2, 3, 2)], ids=["sequences", "volumes"])
def test_products_of_patches_in_other_dimensions(kernel_size: tuple[int, ...]) -> None:
    dims = len(kernel_size)
    geometry = Geometry((2,) * dims, (1,) * dims, (1,) * dims, 1)
    inputs = torch.randn(2, 3, *[5] * dims, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    patches = geometry.patches(inputs, kernel_size)
    assert torch.allclose(geometry.patch_products(inputs, kernel_size), patches @ patches.mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel_size", [(3, 2), (6, 5), (8, 7)], ids=["many places", "some places", "one place"])
def test_norms_of_a_cut_batch_are_those_of_each_example(kernel_size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    factor = made(GEOMETRIES[0], kernel_size=kernel_size)
    monkeypatch.setattr("lowkey.factors.kernels._IN_CACHE", 1)
    expected = one_by_one(factor).square().sum((1, 2, 3, 4))
    assert torch.allclose(factor.squared_norms(), expected, rtol=1e-9)


@pytest.mark.parametrize("geometry", [geometry for geometry in GEOMETRIES if geometry.groups == 1], ids=str)
def test_a_basis_reduces_either_side_without_the_kernels(geometry: Geometry) -> None:
    factor = made(geometry)
    flat = one_by_one(factor).flatten(2)
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(width, 2, generator=generator, dtype=torch.float64) for width in flat.shape[1:])
    weights = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)
    for found, expected in (
        (factor.times(right, (8, 2)), flat @ right),
        (factor.times_from_left(left, (2, flat.shape[2])), left.T @ flat),
    ):
        assert torch.allclose(found.dense(), expected, rtol=0, atol=1e-12)
        assert torch.allclose(found.squared_norms(), expected.square().sum((1, 2)), rtol=1e-9)
        total = torch.ones(expected.shape[1:], dtype=torch.float64)
        found.add_sum(total, weights)
        assert torch.allclose(total, 1.0 + torch.einsum("b,brc->rc", weights, expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("few", [1, 1 << 24])
def test_coordinates_of_kernels_are_taken_a_few_examples_at_a_time(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowkey.sketch.shared._CHUNK_ELEMENTS", few)
    factor = made(GEOMETRIES[1])
    matrix = torch.randn(5, *factor.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = one_by_one(factor).flatten(1) @ matrix.flatten(1).T
    assert torch.allclose(coordinates_of_products(factor, matrix), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rank", "is_reduced"), [(1, True), (5, False)])
def test_an_input_is_reduced_at_once_only_where_that_leaves_less_of_it(rank: int, is_reduced: bool) -> None:
    kept: list[tuple[int, ...]] = []
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 1)).double()
    plan = lk.Plan(noise_multiplier=1.0, delta=1e-5, num_examples=100, expected_batch_size=2, num_steps=2)
    method = lk.Grape(rank=rank)
    with lk.privatize(model, partial(torch.optim.SGD, lr=0.1), method=method, plan=plan, clip_norm=1.0) as private:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor):
            losses = model(torch.randn(2, 4, 6, 6, dtype=torch.float64)).squeeze(1)
        private.backward(losses)
    assert ((2, 4, 6, 6) not in kept) is is_reduced


@pytest.mark.parametrize("rank", [4, 9], ids=["patches", "pixels"])
def test_a_reduced_input_of_no_example_has_no_row(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 1))
    plan = lk.Plan(noise_multiplier=1.0, delta=1e-5, num_examples=100, expected_batch_size=2, num_steps=2)
    with lk.privatize(model, partial(torch.optim.SGD, lr=0.1), method=lk.Grape(rank=rank), plan=plan, clip_norm=1.0) as private:
        private.backward(model(torch.empty(0, 8, 6, 6)).squeeze(1))
        assert private.step().num_steps_left == 1
