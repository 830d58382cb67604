"""One batch makes one release: an example that joins two batches of one release would move it by twice the clip norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audited import ADAM, Mlp, cross_entropy
from torch.utils.data import Dataset

import lowkey as lk

NUM_EXAMPLES = 40


class Rows(Dataset[Any]):
    """Labelled rows that a dictionary holds, as the models here take them."""

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((12,), 0.1 * index), "y": torch.tensor(index % 4)}


def attach(**sampling: Any) -> tuple[lk.Private, lk.Plan]:
    plan = lk.Plan(noise_multiplier=1.0, delta=1e-3, num_examples=NUM_EXAMPLES, expected_batch_size=20, num_steps=6, **sampling)
    return lk.privatize(Mlp(), ADAM, method=lk.DPSGD(), plan=plan, clip_norm=1.0), plan


def batches_of(plan: lk.Plan) -> Any:
    if isinstance(plan.sampling, lk.Unsampled):
        return lk.unsampled_batches(Rows(), plan, seed=0)
    return lk.poisson_batches(Rows(), plan)


@pytest.mark.parametrize("sampling", [{}, {"sampling": lk.Unsampled()}], ids=["Poisson", "Unsampled"])
def test_a_second_batch_is_refused_until_the_first_is_released(sampling: dict[str, Any]) -> None:
    private, plan = attach(**sampling)
    with private:
        batches = iter(batches_of(plan))
        private.backward(cross_entropy(private.model, next(batches)))
        second = next(batches)
        with pytest.raises(lk.PrivacyBoundaryError, match="second batch"):
            private.backward(cross_entropy(private.model, second))
        private.step()
        private.backward(cross_entropy(private.model, second))
        assert private.step().step == 2


def test_parts_of_one_batch_and_batches_drawn_ahead_are_taken() -> None:
    private, plan = attach()
    with private:
        for batch in list(lk.poisson_batches(Rows(), plan)):
            for part in lk.split(batch, 7):
                private.backward(cross_entropy(private.model, part))
            private.step()
        assert private.num_steps_left == 0
        assert private.statement().caveats == ()


def test_losses_that_were_refused_do_not_count_as_a_batch() -> None:
    private, plan = attach()
    with private:
        batches = iter(lk.poisson_batches(Rows(), plan))
        with pytest.raises(lk.ShapeError):
            private.backward(cross_entropy(private.model, next(batches)).mean())
        private.backward(cross_entropy(private.model, next(batches)))
        private.step()
