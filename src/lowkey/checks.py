"""Checks of what users pass: counts, probabilities and choices, each with one clear error."""

from __future__ import annotations

import math
import operator
from enum import Enum
from typing import SupportsIndex, TypeVar

from lowkey.errors import ConfigError

Choice = TypeVar("Choice", bound=Enum)


class Word(Enum):
    """A choice that users may pass by its word, and that statements write as that word."""

    def __repr__(self) -> str:
        return repr(self.value)


def require_count(name: str, value: SupportsIndex) -> int:
    """Return ``value`` as an int of at least 1, or raise `ConfigError`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}. It counts something, so it must be an int. Pass int({name}).")
    if count < 1:
        raise ConfigError(f"{name}={count} is too small. It counts something that a run needs, so it must be at least 1.")
    return count


def require_seed(name: str, value: SupportsIndex) -> int:
    """Return ``value`` as an int, or raise `ConfigError`."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}. A seed names random numbers, so it must be an int.") from None


def require_delta(delta: float) -> float:
    """Return ``delta`` as a float strictly between 0 and 1, or raise `ConfigError`."""
    if not 0.0 < require_number("delta", delta) < 1.0:
        raise ConfigError(
            f"delta={delta} is not a failure probability. It must lie in (0, 1), well below 1/num_examples. Did you swap epsilon and delta?"
        )
    return float(delta)


def require_noise_multiplier(noise_multiplier: float) -> float:
    """Return ``noise_multiplier`` as a finite float of at least 0, or raise `ConfigError`."""
    if not 0.0 <= require_number("noise_multiplier", noise_multiplier) < math.inf:
        raise ConfigError(
            f"noise_multiplier={noise_multiplier} is not a ratio of noise to sensitivity. "
            "It must be finite and at least 0. Pass the standard deviation of the noise divided by clip_norm."
        )
    return float(noise_multiplier)


def require_sampling_rate(sampling_rate: float) -> float:
    """Return ``sampling_rate`` as a float in (0, 1], or raise `ConfigError`."""
    if not 0.0 < require_number("sampling_rate", sampling_rate) <= 1.0:
        raise ConfigError(f"sampling_rate={sampling_rate} is not a probability. It must lie in (0, 1]. Did you pass expected_batch_size?")
    return float(sampling_rate)


def require_number(name: str, value: object) -> float:
    """Return ``value`` as a float, or raise `ConfigError` when it is no real number."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}. It must be a real number. Pass a float.")
    number = float(value)  # pyright: ignore[reportArgumentType]  # has __float__, checked above
    if math.isnan(number):
        raise ConfigError(f"{name} is nan. It must be a real number. Check how it was computed.")
    return number


def require_member(choices: type[Choice], name: str, value: object) -> Choice:
    """Return the member of ``choices`` that ``value`` is or names, or raise `ConfigError`."""
    try:
        return choices(value)
    except ValueError:
        options = ", ".join(repr(choice.value) for choice in choices)
        raise ConfigError(
            f"{name}={value!r} is not known. It must be one of {options}. Pass one of these, or the member of {choices.__name__}."
        ) from None
