"""Training that dies at any moment: every release that happened is charged, and no noise is drawn twice."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
from audited import batch_of, cross_entropy
from torch import nn

import lowkey as lk

PLAN = lk.Plan(noise_multiplier=1.0, delta=1e-6, num_examples=1000, expected_batch_size=10, num_steps=100_000)
CHECKPOINT_EVERY = 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(inputs)))


def attach(folder: Path, method: object) -> lk.Private:
    torch.manual_seed(0)
    sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    private = lk.privatize(Small(), sgd, method=method, plan=PLAN, clip_norm=1.0, ledger=folder / "ledger", dataset="letters")
    if (folder / "checkpoint.pt").exists():
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        private.model.load_state_dict(state["model"])
        private.load_state_dict(state["private"])
    return private


def train(folder: Path, method: object, num_steps: int = 10**9) -> None:
    """Take steps until killed, every other one over an empty batch, whose release is its noise; print each release."""
    private = attach(folder, method)
    prints = os.open(folder / "prints", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    is_empty = False

    def note(released: lk.Released) -> None:
        content = b"".join(block.numpy().tobytes() for block in released.blocks.values())
        name = hashlib.sha256(content).hexdigest() if is_empty else f"examples-{os.urandom(16).hex()}"
        os.write(prints, f"{name}\n".encode())

    private.on_release(note)
    for _ in range(num_steps):
        if not is_empty:
            private.backward(cross_entropy(private.model, batch_of()))
        step = private.step().step
        is_empty = not is_empty
        if step % CHECKPOINT_EVERY == 0:
            torch.save({"model": private.model.state_dict(), "private": private.state_dict()}, folder / "new.pt")
            (folder / "new.pt").replace(folder / "checkpoint.pt")
    os.close(prints)
    private.close()


def start(folder: Path, method: object) -> int:
    """Fork a child that trains; a fork starts in milliseconds and inherits whatever randomness its parent holds."""
    child = os.fork()
    if child:
        return child
    try:
        train(folder, method)
    except BaseException:  # noqa: BLE001 - a forked child must never return into the test
        (folder / "error").write_text(traceback.format_exc())
    finally:
        os._exit(1)


def size_of_prints(folder: Path) -> int:
    return (folder / "prints").stat().st_size if (folder / "prints").exists() else 0


def wait_for_a_release(folder: Path) -> None:
    before, until = size_of_prints(folder), time.monotonic() + 20.0
    while size_of_prints(folder) == before and time.monotonic() < until:
        time.sleep(0.001)


def kill_again_and_again(folder: Path, method: object, times: int) -> None:
    """Kill every other child while it starts, and the others while they train."""
    delays = random.Random(times)
    # Here first, so that every fork finds all modules imported.
    (folder / "warm").mkdir()
    train(folder / "warm", method, 2 * CHECKPOINT_EVERY)
    attach(folder / "warm", method).close()
    for number in range(times):
        child = start(folder, method)
        if number % 2:
            wait_for_a_release(folder)
        time.sleep(delays.uniform(0.0, 0.15 if number % 2 else 0.05))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert not (folder / "error").exists(), (folder / "error").read_text()
        assert os.WIFSIGNALED(status)


def check(folder: Path, method: object, times: int) -> None:
    prints = (folder / "prints").read_text().split()
    with attach(folder, method) as private:
        charged = sum(count for _, _, count in private.history)
        expected = lk.epsilon([(PLAN.sampling_rate, 1.0, charged)], PLAN.delta)
        assert private.epsilon == pytest.approx(expected, rel=1e-6)
    assert (folder / "checkpoint.pt").exists()
    assert len(prints) >= times // 2
    assert len(prints) <= charged
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("method", [lk.DPSGD(), lk.Grape(rank=2, refresh_every=3)], ids=["DPSGD", "Grape"])
def test_a_few_kills_lose_no_charge_and_repeat_no_noise(tmp_path: Path, method: object) -> None:
    kill_again_and_again(tmp_path, method, 10)
    check(tmp_path, method, 10)


@pytest.mark.slow
def test_two_hundred_kills_lose_no_charge_and_repeat_no_noise(tmp_path: Path) -> None:
    method = lk.Grape(rank=2, refresh_every=3)
    kill_again_and_again(tmp_path, method, 200)
    check(tmp_path, method, 200)
