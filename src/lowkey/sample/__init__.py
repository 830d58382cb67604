"""Who takes part in a step, and the microbatches that fit memory.

Draws use keys of their own from the operating system: never the noise's, and never a global seed.
"""

from __future__ import annotations

from lowkey.sample.evidence import num_drawn, num_seeded
from lowkey.sample.loader import check_loader
from lowkey.sample.microbatch import batch_size, empty_like, split
from lowkey.sample.poisson import PoissonBatches, poisson_batches
from lowkey.sample.unsampled import UnsampledBatches, unsampled_batches

__all__ = [
    "poisson_batches",
    "PoissonBatches",
    "unsampled_batches",
    "UnsampledBatches",
    "check_loader",
    "split",
    "batch_size",
    "empty_like",
    "num_drawn",
    "num_seeded",
]
