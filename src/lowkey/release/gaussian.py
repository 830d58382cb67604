"""The one line where private data becomes public."""

from __future__ import annotations

from lowkey.boundary import Released, Sensitive
from lowkey.release.noise import NoiseSource


def release_gaussian(sensitive: Sensitive, noise_multiplier: float, expected_batch_size: int, source: NoiseSource, step: int) -> Released:
    """Noise a clipped sum and divide it by the expected batch size.

    Args:
        sensitive: The sum; its tensors are reused for the result.
        noise_multiplier: Noise standard deviation over the L2 bound.
        expected_batch_size: The mean size of a batch.
        source: Draws the noise.
        step: Which release this is; each coordinate of each step has noise of its own.

    Returns:
        `(sum + noise_multiplier * l2_bound * Z) / expected_batch_size` with Z standard normal.

    Guarantee:
        The Gaussian mechanism with that noise multiplier for adding or removing one example, for real arithmetic and ideal Gaussian noise.
        Everything computed from the result is post-processing.

    Assumes:
        The result is used once per `step`, and the ledger has been charged before.
    """
    blocks = sensitive._blocks  # pyright: ignore[reportPrivateUsage] # reason: this is where a sum is opened, to be noised
    # PRIVACY: noise goes on the sum, in proportion to what one example can add to it, before any division.
    noise_std = noise_multiplier * sensitive.l2_bound if noise_multiplier else 0.0
    for index, block in enumerate(blocks.values()):
        if noise_std:
            source.add_(block, noise_std, step=step, index=index)
        # PRIVACY: divide by the expected size; the drawn size is itself private.
        block.div_(expected_batch_size)
    return Released(blocks=blocks, noise_std=noise_std / expected_batch_size, l2_bound=sensitive.l2_bound / expected_batch_size, step=step)
