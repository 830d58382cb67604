"""LoRA: train low-rank adapters of each matrix, without touching the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowkey.boundary import Provenance
from lowkey.checks import require_count, require_number
from lowkey.errors import ConfigError
from lowkey.factors import Axis, ParameterSpec, wide_dtype
from lowkey.methods.matrices import input_axis, wide_matrices
from lowkey.methods.method import Start, Strategy
from lowkey.optim import Subspace
from lowkey.sketch import Distribution, Identity, OneSided, Sketch, draw_basis
from lowkey.sketch.carriers import Carriers, Core


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Train `W_0 + scale * B A` by the gradients of `B` and `A`, where `scale = alpha / rank`.

    `A` starts normal with variance `1 / (3 * inputs)`, that of the uniform draw of common implementations, and `B` at zero.
    The model keeps one weight, which always holds the sum: its forward pass is that of the model without adapters.

    Fields:
        rank: Inner dimension of each adapter.
        freeze_a: Train B alone (FFA-LoRA). This is an input-side sketch with a basis that never changes.
        alpha: The update's scale times the rank; by default the rank itself, so that the scale is one.
        whole: Modules or parameters whose matrices are trained in full, as a new classifier's head. Embeddings, biases, norms,
            and matrices with a side no wider than the rank are trained in full anyhow, if they are trainable.

    Guarantee:
        The gradients of B and A are clipped together with everything else, whatever B and A are.

    References:
        [hu2022lora], Eq. 3; [sun2024ffalora] for `freeze_a`.

    Example:
        >>> LoRA(rank=16, freeze_a=True).scale
        1.0
    """

    rank: int
    freeze_a: bool = False
    alpha: float | None = None
    whole: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_count("rank", self.rank)
        if not 0.0 < require_number("alpha", self.rank if self.alpha is None else self.alpha) < math.inf:
            raise ConfigError(f"alpha={self.alpha!r} is no scale. It must be above zero and finite. Leave it out for a scale of one.")
        if isinstance(self.whole, str):
            raise ConfigError(f"whole={self.whole!r} is a single string. It must be a tuple of names. Write whole=({self.whole!r},).")
        object.__setattr__(self, "whole", tuple(self.whole))

    @property
    def scale(self) -> float:
        """What `B A` is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @property
    def has_guarantee(self) -> bool:
        return True

    def start(self, start: Start) -> Strategy:
        """Become a strategy for one model."""
        adapters = _Adapters(self, start)
        return Strategy(sketching=adapters, space=adapters)


class _Adapters:
    """An adapter for each matrix, the identity for the rest."""

    def __init__(self, method: LoRA, start: Start) -> None:
        self._identities = {name: Identity(name, spec.shape) for name, spec in start.specs.items()}
        _check_names(method.whole, list(start.specs))
        rest = {name: spec for name, spec in start.specs.items() if not any(_is_within(name, place) for place in method.whole)}
        self._adapters = {name: _adapter(method, start, name) for name in wide_matrices(rest, method.rank)}

    def sketches(self, step: int) -> Mapping[str, Sketch]:
        """Return the derivative of each weight by its adapter, as it stands after the last step."""
        return {**self._identities, **{name: adapter.sketch for name, adapter in self._adapters.items()}}

    def subspaces(self) -> Mapping[str, Subspace]:
        """Return the adapters, which the optimizer steps in place of the weights."""
        return self._adapters

    def state_dict(self) -> dict[str, object]:
        """Return what the adapters hold."""
        return {name: adapter.state_dict() for name, adapter in self._adapters.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        for name, adapter in self._adapters.items():
            adapter.load_state_dict(state[name])


class _Adapter:
    """Two factors of what has been added to one weight: `scale * left @ right`, in the orientation in which the weight is stored.

    Args:
        spec: The weight.
        left: One row per row of the weight as a matrix.
        right: One column per column.
        scale: What the product is multiplied by.
        fixed: The axis whose factor is not trained; None to train both.
        base: The weight before anything was added, where the weight's own digits are too few to add steps up in them.
    """

    def __init__(self, spec: ParameterSpec, left: Tensor, right: Tensor, *, scale: float, fixed: Axis | None, base: Tensor | None) -> None:
        self._spec, self._scale, self._fixed, self._base = spec, scale, fixed, base
        self._left, self._right = left, right
        self._starts_at_zero = input_axis(spec).other if fixed is None else None
        self.sketch = self._derivative()

    def _derivative(self) -> Sketch:
        """Return the map from a gradient by the weight to the gradients by the factors that are trained."""
        name, shape, left, right = self._spec.name, self._spec.shape, self._scale * self._left, self._scale * self._right
        if self._fixed is Axis.COLS:
            return OneSided(name, shape, Axis.COLS, right.T, Provenance.RANDOM)
        if self._fixed is Axis.ROWS:
            return OneSided(name, shape, Axis.ROWS, left, Provenance.RANDOM)
        # PRIVACY: the factors of this step are functions of the releases before it; nothing here has seen its batch.
        return Carriers(
            name=name, shape=shape, left=left, right=right, provenance=Provenance.HISTORICAL, core=Core.ADDED, zero=self._zero_side()
        )

    def _zero_side(self) -> Axis | None:
        """Return the side whose factor has not left zero yet, where it starts."""
        axis = self._starts_at_zero
        if axis is not None and bool((self._left if axis is Axis.ROWS else self._right).any()):
            axis = self._starts_at_zero = None  # it has moved, and need not be looked at again
        return axis

    @property
    def is_centred(self) -> bool:
        return False

    def start(self) -> Mapping[str, Tensor]:
        """Return the trained factors."""
        if self._fixed is not None:
            return {self._spec.name: self._left if self._fixed is Axis.COLS else self._right}
        return dict(zip(self.sketch.blocks, (self._left, self._right), strict=True))

    def encode(self, weight: Tensor) -> Mapping[str, Tensor]:
        """Return the derivative along a tensor of the weight's shape."""
        return {block: factor.dense()[0] for block, factor in self.sketch.compress_dense(weight[None]).items()}

    def move(self, weight: Tensor, proxies: Mapping[str, Tensor]) -> None:
        """Add the change of the factors' product to the weight, and take the factors over."""
        left, right = self._stepped(proxies)
        flat = weight.view(weight.shape[0], -1)
        if self._base is not None:
            # NUMERICS: steps far below the last digit of a bfloat16 weight would vanish one by one; their sum does not.
            flat.copy_(torch.addmm(self._base.flatten(1).to(left), left, right, alpha=self._scale))
        else:
            # NUMERICS: B'A' - BA as (B'-B)A' + B(A'-A): both terms are as small as the step, so rounding is too.
            first, second = torch.cat([left - self._left, self._left], dim=1), torch.cat([right, right - self._right])
            flat.addmm_(first.to(flat), second.to(flat), alpha=self._scale)
        self._left, self._right = left, right
        if self._fixed is None:
            self.sketch = self._derivative()

    def _stepped(self, proxies: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return both factors after the optimizer's step, as copies."""
        stepped = [value.detach().to(self._left.dtype, copy=True) for value in proxies.values()]
        if self._fixed is None:
            return stepped[0], stepped[1]
        return (stepped[0], self._right) if self._fixed is Axis.COLS else (self._left, stepped[0])

    def rotate_to(self, later: Subspace, block: str, coordinates: Tensor) -> Tensor | None:
        """Return None: an adapter has no later basis."""
        return None

    def state_dict(self) -> dict[str, object]:
        """Return the factors, and the weight below them where it is kept."""
        return {"factors": [self._left, self._right], "base": self._base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        left, right = state["factors"]
        self._left, self._right = left.to(self._left), right.to(self._right)
        self._base = None if self._base is None else state["base"].to(self._base)
        self.sketch = self._derivative()


def _adapter(method: LoRA, start: Start, name: str) -> _Adapter:
    spec, weight = start.specs[name], start.weights[name]
    axis = input_axis(spec)
    rows, cols = spec.matrix_shape
    inputs, outputs = (cols, rows) if axis is Axis.COLS else (rows, cols)
    drawn = draw_basis(Distribution.GAUSSIAN, inputs, method.rank, (start.seed, "adapter", name)) * (method.rank / (3 * inputs)) ** 0.5
    drawn = drawn.to(weight.device, wide_dtype(weight.dtype))
    zero = drawn.new_zeros(outputs, method.rank)
    left, right = (zero, drawn.T) if axis is Axis.COLS else (drawn, zero.T)
    is_narrow = weight.dtype != wide_dtype(weight.dtype)
    return _Adapter(
        spec,
        left,
        right,
        scale=method.scale,
        fixed=axis if method.freeze_a else None,
        base=weight.detach().clone() if is_narrow else None,
    )


def _is_within(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")


def _check_names(whole: tuple[str, ...], names: list[str]) -> None:
    for place in whole:
        if not any(_is_within(name, place) for name in names):
            raise ConfigError(
                f"whole names '{place}', and no trainable parameter lies there. It must hold names of modules or parameters of the model. "
                f"The first trainable parameters are {names[:5]}."
            )
