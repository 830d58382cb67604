"""What becomes of moments when Grape redraws its bases, from Adam's and momentum's own formulas; the rest is in tests/contracts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from audited import Layer, batch_of
from dense_steps import NO_NOISE, clipped_mean, dense_gradients, take, twins
from torch import Tensor

import lowkey as lk

RATE, DECAY, BOUND, EVERY = 0.05, 0.1, 0.3, 2


class Moments:
    """The two moments of Adam, or one of momentum, of a sketch; `turn` carries the first one to a new basis."""

    def __init__(self, kind: str) -> None:
        self.kind, self.count = kind, 0
        self.first: Tensor | float = 0.0
        self.second: Tensor | float = 0.0

    def restart(self) -> None:
        self.first, self.second, self.count = 0.0, 0.0, 0

    def update(self, gradient: Tensor) -> Tensor:
        self.count += 1
        if self.kind == "SGD":
            self.first = 0.9 * self.first + gradient
            return self.first
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        return self.first / (1 - 0.9**self.count) / ((self.second / (1 - 0.999**self.count)).sqrt() + 1e-8)


KINDS = {
    "SGD": functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=DECAY),
    "Adam": functools.partial(torch.optim.Adam, lr=RATE, weight_decay=DECAY),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("policy", ["keep", "rotate", "reset"])
def test_moments_cross_a_redraw_as_they_were_told_to(policy: str, side: str, kind: str) -> None:
    model, dense = twins(Layer)
    batch, weight, moments = batch_of(dtype=torch.float64), dense.body.weight, Moments(kind)
    method = lk.Grape(rank=4, refresh_every=EVERY, side=side, on_refresh=policy)
    earlier: Any = None
    with lk.privatize(model, KINDS[kind], method=method, plan=NO_NOISE, clip_norm=BOUND, seed=1) as private:
        for step in range(3 * EVERY):
            basis: Tensor = private.sketches["body.weight"].matrix
            take(private, model, batch)
            if step and step % EVERY == 0:
                assert not torch.equal(basis, earlier)
                if policy == "reset":
                    moments.restart()
                elif policy == "rotate":
                    turn = earlier.T @ basis
                    moments.first = moments.first @ turn if side == "input" else turn.T @ moments.first
            earlier = basis
            rows = dense_gradients(dense, batch)["body.weight"]
            reduced = {"sketch": rows @ basis if side == "input" else basis.T @ rows}
            mean = clipped_mean(reduced, BOUND, NO_NOISE.expected_batch_size)["sketch"]
            # Coupled decay is the gradient of a penalty on the real weight, and is sketched as the gradient is.
            held = weight.detach()
            update = moments.update(mean + DECAY * (held @ basis if side == "input" else basis.T @ held))
            with torch.no_grad():
                weight -= RATE * (update @ basis.T if side == "input" else basis @ update)
    torch.testing.assert_close(model.body.weight, weight, rtol=1e-8, atol=1e-10)
