"""The tensors that a torch optimizer steps, and how its step reaches the weights."""

from lowkey.optim.slots import GroupOptions, OnRefresh, OptimizerFactory, Slots
from lowkey.optim.subspace import Subspace

__all__ = ["GroupOptions", "OnRefresh", "OptimizerFactory", "Slots", "Subspace"]
