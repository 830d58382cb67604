"""One file, one paper, one frozen dataclass that composes the stages."""

from lowkey.methods.denoise import Denoise, Target
from lowkey.methods.dpsgd import DPSGD
from lowkey.methods.dpzero import DPZero
from lowkey.methods.gep import GEP
from lowkey.methods.grape import Grape, Side
from lowkey.methods.linear_probe import LinearProbe
from lowkey.methods.lora import LoRA
from lowkey.methods.method import Method, Strategy
from lowkey.methods.naive_galore import NaiveGaLore
from lowkey.methods.pdpsgd import PDPSGD
from lowkey.methods.powersgd import PowerSGD
from lowkey.methods.rgp import RGP, CarrierBasis, TrainedCarriers
from lowkey.methods.rpdpsgd import RPDPSGD

__all__ = [
    "DPSGD",
    "GEP",
    "PDPSGD",
    "RGP",
    "RPDPSGD",
    "CarrierBasis",
    "DPZero",
    "Denoise",
    "Grape",
    "LinearProbe",
    "LoRA",
    "Method",
    "NaiveGaLore",
    "PowerSGD",
    "Side",
    "Strategy",
    "Target",
    "TrainedCarriers",
]
