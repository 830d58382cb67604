"""The bar between private and public: clip, sum, noise. One release a step, one place where noise is added."""

from lowkey.release.clip import ClipGroup, ClippedSum
from lowkey.release.declared import open_declared
from lowkey.release.gaussian import release_gaussian
from lowkey.release.noise import NoiseSource, SeededNoise, SystemNoise
from lowkey.release.secure import SecureNoise

__all__ = ["ClipGroup", "ClippedSum", "NoiseSource", "SecureNoise", "SeededNoise", "SystemNoise", "open_declared", "release_gaussian"]
