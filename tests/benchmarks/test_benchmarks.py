from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus and transformers warn about themselves

CONTENDERS = ["fused", "foreach", "floor", "grape", "dpsgd", "rgp", "lora", "forward-twice", "dpzero", "nonprivate"]
CONTENDERS += ["opacus-hooks", "opacus-ghost"]


@pytest.fixture(autouse=True)
def _scripts_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def script(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("contender", CONTENDERS)
def test_every_contender_takes_steps_and_says_what_they_took(contender: str) -> None:
    runner = script("worker").Runner("resnet-tiny", contender, "cpu")
    turns = [runner.turn(), runner.turn()]
    assert all(turn.wall_s > 0 and turn.peak > 0 for turn in turns)
    assert runner.idle > 0


def test_the_list_of_contenders_is_the_one_tested_here() -> None:
    assert list(script("contenders").CONTENDERS) == CONTENDERS


def test_a_comparison_prints_ratios_and_writes_every_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "result.json"
    chosen = ["--workloads", "resnet-tiny", "--contenders", "fused", "--rounds", "2", "--warm-up", "0", "--threads", "1", "--skip-memory"]
    assert script("run").main([*chosen, "--out", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert len(result["workloads"]["resnet-tiny"]["time"]["fused"]) == 2
    assert result["machine"]["threads"] == 1
    assert "| ordinary training, AdamW (fused) |" in capsys.readouterr().out


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    turn, memory = script("worker").Turn, script("measuring").Memory
    # The machine is three times slower in the second round; each contender's share of it stays.
    turns = {
        "fused": [turn(cpu_s=cpu, wall_s=1.0, peak=0) for cpu in (1.0, 3.0, 1.0)],
        "grape": [turn(cpu_s=cpu, wall_s=2.0, peak=0) for cpu in (0.7, 2.1, 0.8)],
    }
    held = {
        "fused": memory(idle=5, first=100, later=80),
        "foreach": memory(idle=5, first=90, later=90),
        "grape": memory(idle=5, first=45, later=40),
    }
    rows = script("tables").summarise(turns, held)
    assert rows["grape"]["cpu_ratio"] == pytest.approx(0.7)
    assert rows["grape"]["wall_ratio"] == pytest.approx(2.0)
    assert rows["grape"]["memory_ratio"] == pytest.approx(0.5)
    assert script("tables").table(rows).count("\n") == 4


def test_a_small_decoder_is_measured_beside_what_adamw_would_need(tmp_path: Path) -> None:
    out = tmp_path / "size.json"
    shape = ["--layers", "1", "--width", "32", "--heads", "2", "--vocabulary", "50", "--tokens", "8", "--batches", "3", "--microbatch", "2"]
    assert script("size").main([*shape, "--threads", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    batch = result["batches"][0]
    # Four attention matrices and two of the feed-forward pair, their biases, and three norms: 12·32² + (4 + 4 + 1)·32 + 6·32.
    assert result["trained"] == 12 * 32**2 + 9 * 32 + 6 * 32
    assert batch["adamw_state"] == 4 * (result["parameters"] + 3 * result["trained"])
    assert batch["adamw_activations"] > 0


def test_a_page_takes_tables_between_its_markers_and_keeps_the_rest() -> None:
    page = "before\n<!-- cpu -->\nold\n<!-- end of cpu -->\nafter\n"
    assert script("page").fill(page, "cpu", "new") == "before\n<!-- cpu -->\n\nnew\n\n<!-- end of cpu -->\nafter\n"
    with pytest.raises(ValueError, match="no markers"):
        script("page").fill(page, "size", "new")


def test_figures_are_drawn_from_results(tmp_path: Path) -> None:
    row = {"title": "lowkey, X", "wall_ratio": 0.7, "memory_ratio": 0.6}
    rows = {"fused": {**row, "title": "ordinary"}, "grape": row}
    figure = tmp_path / "images" / "steps.svg"
    script("plots").draw_steps({"workloads": {"w": {"title": "W", "summary": rows}}}, figure)
    assert figure.read_text(encoding="utf-8").startswith("<?xml")
