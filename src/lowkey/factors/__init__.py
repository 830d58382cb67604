"""Each example's gradient as factors, caught operation by operation and never materialised."""

from lowkey.factors import attention as _attention
from lowkey.factors import conv as _conv
from lowkey.factors import elementwise as _elementwise
from lowkey.factors import embedding as _embedding
from lowkey.factors import linear as _linear
from lowkey.factors import norm as _norm
from lowkey.factors import recurrent as _recurrent
from lowkey.factors.capture import Capture
from lowkey.factors.collector import Axis, Collector, Compression, Record, Weight
from lowkey.factors.factor import Dense, Factor, OneHot, Outer, wide_dtype
from lowkey.factors.isolation import check_isolation, isolation_weights
from lowkey.factors.kernels import Convolution
from lowkey.factors.layout import Kind, ParameterSpec, Selection, describe, refuse_coupling, require_module, select
from lowkey.factors.probe import probe
from lowkey.factors.taps import Taps

RULES = (_attention, _conv, _elementwise, _embedding, _linear, _norm, _recurrent)
"""The modules whose import fills the registry, one per family of operations."""

__all__ = [
    "Axis",
    "Capture",
    "Collector",
    "Compression",
    "Convolution",
    "Dense",
    "Factor",
    "Kind",
    "OneHot",
    "Outer",
    "ParameterSpec",
    "Record",
    "Selection",
    "Taps",
    "Weight",
    "check_isolation",
    "describe",
    "isolation_weights",
    "probe",
    "refuse_coupling",
    "require_module",
    "select",
    "wide_dtype",
]
