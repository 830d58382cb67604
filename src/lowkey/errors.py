"""What lowkey raises, and when.

    LowkeyError
    ├── ConfigError(ValueError)            an argument cannot mean what it says
    ├── ShapeError(ValueError)             a tensor has the wrong shape, device or batch axis
    ├── UnsupportedLayerError(TypeError)   a layer has no per-example gradient, or none that is known
    ├── PrivacyBoundaryError(TypeError)    private data was about to be read before noise was added
    ├── BudgetError(RuntimeError)          the plan allows no further release
    └── LedgerError(RuntimeError)          the record of past releases is broken, busy or not this run's

Every message says what was given, what is needed and why, and what to do.
"""

from __future__ import annotations


class LowkeyError(Exception):
    """Base of every error that lowkey raises on purpose."""


class ConfigError(LowkeyError, ValueError):
    """An argument cannot mean what it says."""


class ShapeError(LowkeyError, ValueError):
    """A tensor has the wrong shape, device or batch axis."""


class UnsupportedLayerError(LowkeyError, TypeError):
    """A layer mixes examples, or its per-example gradient is not known."""


class PrivacyBoundaryError(LowkeyError, TypeError):
    """Private data was about to be read before noise was added."""


class BudgetError(LowkeyError, RuntimeError):
    """The plan allows no further release."""


class LedgerError(LowkeyError, RuntimeError):
    """The record of past releases is broken, busy or not this run's."""
