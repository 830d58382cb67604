"""The tensors that a torch optimizer steps, and how its step reaches the weights."""

from lowkey.optim.slots import GroupOptions, OnRefresh, OptimizerFactory, Slots

__all__ = ["GroupOptions", "OnRefresh", "OptimizerFactory", "Slots"]
