"""One file, one paper, one frozen dataclass that composes the stages."""

from lowkey.methods.dpsgd import DPSGD
from lowkey.methods.grape import Grape, Side
from lowkey.methods.method import Method, Strategy

__all__ = ["DPSGD", "Grape", "Method", "Side", "Strategy"]
