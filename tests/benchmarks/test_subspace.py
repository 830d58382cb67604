from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("subspace")


def test_lanczos_and_the_gram_matrix_find_the_exact_eigenspace(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "result.json"
    assert script.main(["--examples", "12", "--rank", "4", "--quick", "--threads", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["coordinates"] == 26_010
    assert result["angles"]["gram"] < 1e-10
    assert result["angles"]["lanczos"] < 1e-6
    assert len(result["seconds"]["lanczos"]) == 2
    assert "| Gram matrix (PDPSGD) | none |" in capsys.readouterr().out


def test_the_product_that_lanczos_takes_is_that_of_the_second_moment(script: Any) -> None:
    model, examples = script.build(script.draw_examples(5), torch.float64, warm_up=1)
    multiply, start = script._second_moment(model, examples)
    parameters = list(model.parameters())
    rows = torch.stack(
        [
            torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters, retain_graph=True)])
            for loss in script.losses(model, examples)
        ]
    )
    torch.testing.assert_close(multiply(start), rows.T @ (rows @ start) / 5, rtol=1e-10, atol=1e-14)


def test_the_angle_between_subspaces_is_that_of_their_worst_directions(script: Any) -> None:
    axes = torch.eye(4, dtype=torch.float64)
    tilted = torch.stack([axes[0], 0.8 * axes[1] + 0.6 * axes[2]])
    assert script.angle(3.0 * tilted, axes[:2]) == pytest.approx(0.6, rel=1e-12)
