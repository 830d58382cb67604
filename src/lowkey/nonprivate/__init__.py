"""Everything without a guarantee: for comparisons, never for private data."""

from lowkey.nonprivate.galore import GaLore
from lowkey.nonprivate.method import NonPrivate

__all__ = ["GaLore", "NonPrivate"]
