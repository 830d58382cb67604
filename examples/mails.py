"""Train a small text classifier privately on the mails that the package carries, with a ledger on disk.

    python examples/mails.py               the full gradient
    python examples/mails.py --rank 8      random sketches, of the embedding's features too

Words are hashed, so the vocabulary tells nothing about any mail.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import re
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lowkey as lk
from lowkey.data import Mail, load_mails

NUM_BUCKETS, NUM_WORDS, WIDTH = 4_096, 100, 32
EMPTY = 0


def encode(mails: tuple[Mail, ...]) -> TensorDataset:
    """Turn each mail into the hashes of its first words; a row depends on its own mail alone."""
    rows = torch.full((len(mails), NUM_WORDS), EMPTY)
    for row, mail in zip(rows, mails, strict=True):
        words = re.findall(r"[a-z]{2,}|[$!%]", mail.text.lower())[:NUM_WORDS]
        hashes = [int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little") for word in words]
        row[: len(words)] = torch.tensor([1 + value % (NUM_BUCKETS - 1) for value in hashes], dtype=torch.int64)
    return TensorDataset(rows, torch.tensor([int(mail.is_spam) for mail in mails]))


class WordAverage(nn.Module):
    """Embed words, average them, and classify the average."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BUCKETS, WIDTH, padding_idx=EMPTY)
        self.hidden = nn.Linear(WIDTH, 64)
        self.head = nn.Linear(64, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Return two scores for each row of words."""
        # The mean is over an example's own words: the number of words in the batch must not appear.
        counts = (words != EMPTY).sum(1, keepdim=True).clamp_min(1)
        return self.head(torch.tanh(self.hidden(8.0 * self.embedding(words).sum(1) / counts)))


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Return the share of mails that the model gets right."""
    words, labels = dataset.tensors
    return float((model(words).argmax(1) == labels).float().mean())


def train(model: nn.Module, dataset: TensorDataset, method: lk.DPSGD | lk.Grape, learning_rate: float, ledger: Path) -> lk.Statement:
    """Train `model` in place; every release is on disk before it is made."""
    plan = lk.calibrate(epsilon=4.0, delta=1e-5, num_examples=len(dataset), expected_batch_size=256, num_steps=100)
    optimizer = functools.partial(torch.optim.AdamW, lr=learning_rate, weight_decay=0.01)
    with lk.privatize(model, optimizer, method=method, plan=plan, clip_norm=0.5, ledger=ledger, dataset="mails") as private:
        for batch in lk.poisson_batches(dataset, plan):
            for words, labels in lk.split(batch, 64):
                private.backward(F.cross_entropy(model(words), labels, reduction="none"))
            private.step()
        return private.statement()


def main() -> None:
    """Train, test, and state the guarantee."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=0, help="kept dimensions per matrix; 0 for the full gradient")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="AdamW's")
    parser.add_argument("--ledger", type=Path, help="where the releases are counted; by default a file that is deleted afterwards")
    args = parser.parse_args()
    method = lk.Grape(rank=args.rank, sketch_embeddings=True) if args.rank else lk.DPSGD()
    torch.manual_seed(0)
    model, mails = WordAverage(), load_mails()
    test = encode(mails.test)
    with tempfile.TemporaryDirectory() as folder:
        statement = train(model, encode(mails.train), method, args.learning_rate, args.ledger or Path(folder) / "ledger")
    majority = 1 - float(test.tensors[1].float().mean())
    print(f"accuracy on {len(test)} other mails: {accuracy(model, test):.3f}; always 'not spam': {majority:.3f}")
    print(statement.headline)


if __name__ == "__main__":
    main()
