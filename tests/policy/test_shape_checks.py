from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(os.environ.get("LOWKEY_TYPECHECK") == "0", reason="shape checks are switched off for this run")


def test_a_tensor_of_the_wrong_shape_is_caught_while_tests_run() -> None:
    from lowkey.factors.factor import Dense

    two_weights_too_many = torch.zeros(3, 2)
    with pytest.raises(Exception, match="add_sum"):
        Dense(torch.zeros(3, 2)).add_sum(torch.zeros(2), two_weights_too_many)
