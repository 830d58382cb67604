"""Plans, headers and bytes that the ledger tests share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lowkey.account import Head, Ledger, Plan, RunHeader, open_ledger

PLAN = Plan(noise_multiplier=2.0, delta=1e-5, num_examples=10_000, expected_batch_size=250, num_steps=50)
HEADER = RunHeader(plan=PLAN, dataset="digits", method="DPSGD", clip_norm=1.0, versions={"lowkey": "test"}, run_id="run-1")


def open_at(path: Path, *, reserve: int = 1, resume: Head | None = None, run_id: str = "run-1", dataset: str = "digits") -> Ledger:
    return open_ledger(path, replace(HEADER, run_id=run_id, dataset=dataset), reserve=reserve, resume=resume)


def spend(ledger: Ledger, num_steps: int) -> None:
    for _ in range(num_steps):
        ledger.commit(ledger.intend())
