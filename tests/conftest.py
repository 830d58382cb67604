"""What every test shares: hypothesis profiles, torch's threads, and run-time checks of array shapes.

`LOWKEY_TYPECHECK=0` leaves the shape checks out, for timing.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Torch's first call alone takes longer than hypothesis's deadline, so no profile has one.
settings.register_profile("dev", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# The tensors here are tiny and the test processes several: more threads would only wait for each other.
torch.set_num_threads(1)

if os.environ.get("LOWKEY_TYPECHECK", "1") != "0":
    # Only what is imported after this line is checked, which is all of lowkey: no plugin imports it earlier.
    install_import_hook("lowkey", "shape_checks.check_shapes")
