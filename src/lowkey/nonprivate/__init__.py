"""Everything without a guarantee: for comparisons, never for private data."""

from lowkey.nonprivate.method import NonPrivate

__all__ = ["NonPrivate"]
