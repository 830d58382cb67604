"""The tensors that a torch optimizer steps, and how its step reaches the weights."""

from lowkey.optim.slots import OnRefresh, OptimizerFactory, Slots

__all__ = ["OnRefresh", "OptimizerFactory", "Slots"]
