"""The worst examples that an audit can think of: huge, tiny, not finite, and aimed."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowkey.sample.microbatch import map_columns
from lowkey.sketch import Sketch


@dataclass(frozen=True, kw_only=True)
class ScaledLoss:
    """The last example's loss times `factor`."""

    factor: float

    @property
    def label(self) -> str:
        return f"its loss times {self.factor:g}"

    def change_batch(self, batch: Any) -> Any:
        return batch

    def change_losses(self, losses: Tensor) -> Tensor:
        return torch.cat([losses[:-1], losses[-1:] * self.factor])

    def attached_to(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class ScaledInput:
    """Every floating-point input of the last example times `factor`."""

    factor: float

    @property
    def label(self) -> str:
        return f"its inputs times {self.factor:g}"

    def change_batch(self, batch: Any) -> Any:
        return map_columns(batch, self._scale)

    def _scale(self, column: Any) -> object:
        if not isinstance(column, Tensor) or not column.is_floating_point():
            return column
        return torch.cat([column[:-1], column[-1:] * self.factor])

    def change_losses(self, losses: Tensor) -> Tensor:
        return losses

    def attached_to(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


class Aimed:
    """The last example's loss becomes a linear function of one module's output, so that its gradient lies in that module alone.

    Args:
        module: Name of the module.
        outputs: Direction in the output's features, or None for all of them alike.
        inputs: What the module is fed for the last example, or None to leave it.
        factor: Scale of the loss.
    """

    def __init__(self, module: str, *, factor: float, outputs: Tensor | None = None, inputs: Tensor | None = None) -> None:
        self._module, self._factor, self._outputs, self._inputs = module, factor, outputs, inputs
        self._seen: list[Tensor] = []

    @property
    def label(self) -> str:
        where = "all of" if self._outputs is None else "the top direction of the basis of"
        return f"its loss aimed at {where} '{self._module}', times {self._factor:g}"

    def change_batch(self, batch: Any) -> Any:
        return batch

    @contextlib.contextmanager
    def attached_to(self, model: nn.Module) -> Generator[None]:
        module = model.get_submodule(self._module)
        handles = [
            module.register_forward_pre_hook(lambda _, args: self._feed(args)),
            module.register_forward_hook(lambda _, args, output: self._see(output)),
        ]
        try:
            yield
        finally:
            self._seen.clear()
            for handle in handles:
                handle.remove()

    def _see(self, output: object) -> None:
        if isinstance(output, Tensor):
            self._seen.append(output)

    def _feed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point() or args[0].dim() < 2:
            return args
        inputs = args[0]
        last = inputs[-1:].detach()
        if self._inputs is not None and last.shape[-1] == len(self._inputs):
            last = self._inputs.to(last).expand_as(last)
        return torch.cat([inputs[:-1], last]), *args[1:]

    def change_losses(self, losses: Tensor) -> Tensor:
        if not self._seen or self._seen[-1].dim() < 2 or self._seen[-1].shape[0] != losses.shape[0]:
            return losses
        output = self._seen[-1][-1]
        aimed = (output * self._direction(output)).sum().to(losses.dtype) * self._factor
        return torch.cat([losses[:-1], aimed[None]])

    def _direction(self, output: Tensor) -> Tensor:
        direction = self._outputs
        if direction is None:
            return torch.linspace(1.0, 2.0, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)
        direction = direction.to(output)
        if output.shape[-1] == len(direction):
            return direction.expand_as(output)
        if output.shape[0] == len(direction):
            return direction.view(-1, *[1] * (output.dim() - 1)).expand_as(output)
        return torch.ones_like(output)


def has_floats(batch: Any) -> bool:
    """Return whether a batch has any floating-point input to scale."""
    found: list[bool] = []
    map_columns(batch, lambda column: found.append(isinstance(column, Tensor) and column.is_floating_point()))
    return any(found)


def top_direction(sketch: Sketch, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sides of the rank-one gradient that a sketch stretches the most, by the power method on the sketch and its adjoint."""
    generator = torch.Generator().manual_seed(0)
    shape = (parameter.shape[0], parameter[0].numel())
    rows = torch.randn(shape[0], generator=generator, dtype=torch.float64).to(parameter.device)
    cols = torch.randn(shape[1], generator=generator, dtype=torch.float64).to(parameter.device)
    gradient = torch.outer(rows, cols)
    for _ in range(20):
        coordinates = sketch.compress_dense(gradient.view(1, *parameter.shape))
        gradient = sketch.decode({name: block.dense()[0] for name, block in coordinates.items()}).reshape(shape).double()
        gradient = gradient / gradient.norm()
    cols = gradient.T @ (gradient @ cols)
    cols = cols / cols.norm()
    rows = gradient @ cols
    return rows / rows.norm(), cols
