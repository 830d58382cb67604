"""A small residual network with GroupNorm, for images of 32 × 32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two convolutions around a shortcut, which is a convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(8, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(8, outputs)
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(out)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """A stem, one block for each width, and a linear head."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128), num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, widths[0])
        steps = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(*(Block(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(steps)))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(out, 1), 1))
