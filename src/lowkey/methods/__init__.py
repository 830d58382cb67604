"""One file, one paper, one frozen dataclass that composes the stages."""

from lowkey.methods.dpsgd import DPSGD
from lowkey.methods.dpzero import DPZero
from lowkey.methods.grape import Grape, Side
from lowkey.methods.linear_probe import LinearProbe
from lowkey.methods.lora import LoRA
from lowkey.methods.method import Method, Strategy
from lowkey.methods.naive_galore import NaiveGaLore
from lowkey.methods.powersgd import PowerSGD
from lowkey.methods.rgp import RGP, CarrierBasis, TrainedCarriers

__all__ = [
    "DPSGD",
    "RGP",
    "CarrierBasis",
    "DPZero",
    "Grape",
    "LinearProbe",
    "LoRA",
    "Method",
    "NaiveGaLore",
    "PowerSGD",
    "Side",
    "Strategy",
    "TrainedCarriers",
]
