"""Projections of a released gradient on a few directions: the noise outside of them is dropped, and so is the signal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lowkey.boundary import Blocks, Released
from lowkey.sketch.shared import combine_directions, coordinates_of_dense, draw_directions

_DRAWN_NUMBERS = 1 << 22
"""Random directions are drawn a few at a time, so that they hold about this many numbers."""


@torch.no_grad()
def project(released: Released, directions: Mapping[str, Tensor]) -> Released:
    """Replace the released gradient `g` by `V^T V g`.

    Args:
        released: One block for each parameter, of its shape.
        directions: Every parameter's part of each direction, `(rank, *shape)`.

    Returns:
        A release in which the noise has the covariance `noise_std^2 (V^T V)^2`; its `noise_std` is the one before.

    Guarantee:
        Reads a release and directions that were fixed without the batch, so it is post-processing.
        For orthonormal directions it is the orthogonal projection on them.

    Cost:
        Two inner products with each direction.
    """
    return dataclasses.replace(released, blocks=_projected(released.blocks, directions))


@torch.no_grad()
def project_randomly(released: Released, rank: int, key: tuple[object, ...]) -> Released:
    """Replace the released gradient `g` by `V^T V g` with `rank` Gaussian directions that are a function of `key` alone.

    The entries have variance `1 / rank`, so that `E[V^T V] = I`: unbiased, and for fewer directions than coordinates about
    `sqrt(coordinates / rank)` times as long as `g`.

    Guarantee:
        Reads a release and public randomness, so it is post-processing.

    Cost:
        Draws `rank` times the number of coordinates, and holds 2^22 of them at a time, or one direction if that is more.
    """
    total: dict[str, Tensor] = {}
    for directions in _draw(released.blocks, rank, key):
        for name, part in _projected(released.blocks, directions).items():
            total[name] = total[name].add_(part) if name in total else part
    return dataclasses.replace(released, blocks=total)


def _draw(blocks: Blocks, rank: int, key: tuple[object, ...]) -> Iterator[Mapping[str, Tensor]]:
    width = sum(block.numel() for block in blocks.values())
    step = max(1, _DRAWN_NUMBERS // max(1, width))
    for first in range(0, rank, step):
        some = range(first, min(first + step, rank))
        yield {name: draw_directions(tuple(block.shape), some, rank, (*key, name)).to(block) for name, block in blocks.items()}


def _projected(blocks: Blocks, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    coordinates = torch.stack([coordinates_of_dense(block[None], directions[name])[0] for name, block in blocks.items()]).sum(0)
    return {name: combine_directions(coordinates, directions[name]).to(block.dtype) for name, block in blocks.items()}
