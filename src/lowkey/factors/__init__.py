"""Each example's gradient as factors, caught operation by operation and never materialised."""

from lowkey.factors import attention as _attention  # noqa: F401 - registers its rules
from lowkey.factors import conv as _conv  # noqa: F401 - registers its rules
from lowkey.factors import elementwise as _elementwise  # noqa: F401 - registers its rules
from lowkey.factors import embedding as _embedding  # noqa: F401 - registers its rules
from lowkey.factors import linear as _linear  # noqa: F401 - registers its rules
from lowkey.factors import norm as _norm  # noqa: F401 - registers its rules
from lowkey.factors import recurrent as _recurrent  # noqa: F401 - registers its rules
from lowkey.factors.capture import Capture
from lowkey.factors.collector import Axis, Collector, Compression, Weight
from lowkey.factors.factor import Dense, Factor, OneHot, Outer, wide_dtype
from lowkey.factors.isolation import check_isolation, isolation_weights
from lowkey.factors.layout import Kind, ParameterSpec, Selection, describe, refuse_coupling, select
from lowkey.factors.taps import Taps

__all__ = [
    "Axis",
    "Capture",
    "Collector",
    "Compression",
    "Dense",
    "Factor",
    "Kind",
    "OneHot",
    "Outer",
    "ParameterSpec",
    "Selection",
    "Taps",
    "Weight",
    "check_isolation",
    "describe",
    "isolation_weights",
    "refuse_coupling",
    "select",
    "wide_dtype",
]
