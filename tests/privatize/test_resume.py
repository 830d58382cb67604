"""A resumed run is charged for what was released before it, at the noise and rate that were used then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audited import ADAM, PLAN, Mlp, batch_of, cross_entropy

import lowkey as lk


def attach(plan: lk.Plan = PLAN, clip_norm: float = 1.0, **options: Any) -> lk.Private:
    return lk.privatize(Mlp(), ADAM, method=lk.DPSGD(), plan=plan, clip_norm=clip_norm, **options)


def take(private: lk.Private, num_steps: int) -> None:
    for _ in range(num_steps):
        private.backward(cross_entropy(private.model, batch_of()))
        private.step()


CHANGES: dict[str, dict[str, Any]] = {
    "noise_multiplier": {"plan": replace(PLAN, noise_multiplier=50.0)},
    "num_examples": {"plan": replace(PLAN, num_examples=900)},
    "expected_batch_size": {"plan": replace(PLAN, expected_batch_size=1)},
    "sampling": {"plan": replace(PLAN, sampling=lk.TruncatedPoisson(max_batch_size=90))},
    "clip_norm": {"clip_norm": 10.0},
    "noise_source": {"noise": lk.SeededNoise(1)},
    "dataset": {"dataset": "other records"},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "file"])
def test_a_checkpoint_is_refused_where_its_releases_would_be_charged_at_another_price(tmp_path: Path, name: str, on_disk: bool) -> None:
    where = {"ledger": tmp_path / "ledger"} if on_disk else {}
    with attach(**where) as private:
        take(private, 2)
        state = private.state_dict()
    with attach(**where, **CHANGES[name]) as private, pytest.raises(lk.LedgerError, match=f"^{name}="):
        private.load_state_dict(state)


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "file"])
def test_a_run_goes_on_with_what_it_has_spent(tmp_path: Path, on_disk: bool) -> None:
    where = {"ledger": tmp_path / "ledger"} if on_disk else {}
    with attach(**where) as private:
        take(private, 2)
        state, spent = private.state_dict(), private.epsilon
    with attach(**where) as private:
        private.load_state_dict(state)
        assert private.epsilon == spent
        take(private, 1)
        assert private.history[-1][2] == 3
