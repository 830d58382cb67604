from __future__ import annotations

from typing import Protocol

import pytest
import torch
from jaxtyping import Float, jaxtyped
from shape_checks import check_shapes
from torch import Tensor


class NotCheckableAtRunTime(Protocol):
    def call(self) -> None: ...


@jaxtyped(typechecker=check_shapes)
def weigh(values: Float[Tensor, "B R"], weights: Float[Tensor, " B"], by: NotCheckableAtRunTime | None = None) -> Float[Tensor, " R"]:
    return weights @ values


def test_a_tensor_of_the_wrong_shape_is_caught_while_tests_run() -> None:
    with pytest.raises(Exception, match="weigh"):
        weigh(torch.zeros(3, 2), torch.zeros(2))


def test_tensors_that_fit_pass_the_shape_check() -> None:
    assert weigh(torch.ones(3, 2), torch.ones(3)).tolist() == [3.0, 3.0]


def test_annotations_outlive_the_shape_check() -> None:
    assert set(weigh.__annotations__) == {"values", "weights", "by", "return"}
