"""What a step with a sketch never holds: a gradient in full, of an example or of the batch."""

from __future__ import annotations

from typing import Any

import pytest
from allocations import CONVOLUTION, EMBEDDING, EXAMPLES, LINEAR, watched

import lowkey as lk

RANK = 2
SUBJECTS = {"linear": LINEAR, "convolution": CONVOLUTION}
SKETCHES = {
    "RGP": lk.RGP(rank=RANK, warmup_steps=1),
    "RGP isometric": lk.RGP(rank=RANK, isometric=True),
    "RGP left": lk.RGP(rank=RANK, carriers="left"),
    "RGP right": lk.RGP(rank=RANK, carriers="right"),
    "Grape input": lk.Grape(rank=RANK, refresh_every=2),
    "Grape output": lk.Grape(rank=RANK, refresh_every=2, side="output"),
    "LoRA": lk.LoRA(rank=RANK),
    "LoRA frozen A": lk.LoRA(rank=RANK, freeze_a=True),
}


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("name", SKETCHES)
def test_a_sketch_forms_no_gradient_in_full(name: str, subject: str) -> None:
    seen = watched(SKETCHES[name], SUBJECTS[subject], with_step=False)
    assert seen.at_least(SUBJECTS[subject].numel) == []


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("name", [name for name in SKETCHES if "RGP" not in name])
def test_a_step_in_a_subspace_forms_nothing_of_the_weights_size(name: str, subject: str) -> None:
    seen = watched(SKETCHES[name], SUBJECTS[subject], with_step=True)
    assert seen.at_least(SUBJECTS[subject].numel) == []


def test_a_sketched_embedding_has_no_gradient_in_full() -> None:
    seen = watched(lk.Grape(rank=RANK, sketch_embeddings=True), EMBEDDING, with_step=True)
    assert seen.at_least(EMBEDDING.numel) == []


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_watch_sees_the_sum_of_full_gradients(subject: str) -> None:
    """Without this, finding nothing would say nothing."""
    assert watched(lk.DPSGD(), SUBJECTS[subject], with_step=False).at_least(SUBJECTS[subject].numel)


def test_the_watch_sees_gradients_of_examples_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_full(self: Any, target: Any, rows: Any, cols: Any, kept: Any) -> None:
        self.record_dense(target, rows.transpose(1, 2) @ cols)

    monkeypatch.setattr(lk.factors.Collector, "record_outer", in_full)
    assert watched(lk.RGP(rank=RANK), LINEAR, with_step=False).at_least(EXAMPLES * LINEAR.numel)
