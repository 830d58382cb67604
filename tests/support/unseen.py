"""Operations that the capture cannot see into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Scaled(torch.autograd.Function):
    """A product that nobody watches, and that hands back a raw gradient of its second factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)
