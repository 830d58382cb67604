"""Linear maps of each parameter's gradient, fixed before the batch, that prove where their basis comes from."""

from lowkey.sketch.channels import Channels
from lowkey.sketch.identity import Identity
from lowkey.sketch.random import Distribution, OneSided, draw_basis, draw_signs
from lowkey.sketch.shared import Shared
from lowkey.sketch.sketch import Sketch

__all__ = ["Channels", "Distribution", "Identity", "OneSided", "Shared", "Sketch", "draw_basis", "draw_signs"]
