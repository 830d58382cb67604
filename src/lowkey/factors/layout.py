"""What a model's trainable parameters are: their names, shapes, kinds and neighbours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] # reason: the only common base of all batch norms

from lowkey.errors import ConfigError, UnsupportedLayerError


class Kind(Enum):
    """How a parameter is used, as far as a sketch cares."""

    OUTPUT_FIRST = "output x input"
    INPUT_FIRST = "input x output"
    EMBEDDING = "vocabulary x features"
    OTHER = "unsketched"


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """Public facts about one trainable parameter.

    Fields:
        name: Its first name in `model.named_parameters()`.
        shape: Its shape.
        kind: How layers use it.
        owner: Name of the parent of the module that owns it; siblings may share a basis.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    owner: str

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape with every axis but the first flattened."""
        rows = self.shape[0] if self.shape else 1
        numel = 1
        for size in self.shape:
            numel *= size
        return rows, numel // max(1, rows)


Selection = Collection[str] | Callable[[str, Tensor], bool] | None


def select(model: nn.Module, trainable: Selection) -> dict[str, nn.Parameter]:
    """Return the parameters to train, by name; tied parameters once."""
    everything = dict(model.named_parameters())
    if trainable is None:
        chosen = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
    elif callable(trainable):
        chosen = {name: parameter for name, parameter in everything.items() if trainable(name, parameter)}
    else:
        chosen = _named(model, trainable)
    if not chosen:
        raise ConfigError(
            "no parameter is trainable. A private step needs at least one. Set requires_grad=True, or pass trainable=[names]."
        )
    for name, parameter in chosen.items():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"'{name}' has no shape yet. A sketch and a sum need it before the first batch. Run the lazy module on a dummy batch first."
            )
        if not parameter.is_floating_point():
            raise ConfigError(
                f"'{name}' has dtype {parameter.dtype}. Only floating-point parameters can be trained. Leave it out of trainable."
            )
        if parameter.device.type == "meta":
            raise ConfigError(
                f"'{name}' is on the meta device and holds no values. Materialise the model first, with model.to_empty() and its weights."
            )
    return chosen


def _named(model: nn.Module, names: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the named parameters, a tied one under its first name whichever of its names was given."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    everything = dict(model.named_parameters(remove_duplicate=False))
    listed = list(names)
    # A tensor is told by its type: its values are weights, and no error prints those.
    unknown = [
        name if isinstance(name, str) else type(name).__name__  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass what they like
        for name in listed
        if name not in everything
    ]
    if unknown or isinstance(names, str):
        raise ConfigError(
            f"trainable={names if isinstance(names, str) else unknown!r} is not a list of the model's parameters. "
            "It must hold names from model.named_parameters(), or be a function of (name, parameter). "
            f"The first names are {list(everything)[:5]}."
        )
    return {first_names[id(everything[name])]: everything[name] for name in listed}


def require_module(model: object) -> None:
    """Refuse what is no torch module, before anything else asks it for parameters."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}. It must be a torch module, which is given first, and the optimizer second. "
            "Write privatize(model, functools.partial(torch.optim.AdamW, lr=1e-3), ...)."
        )


def describe(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, ParameterSpec]:
    """Return the facts that a method may shape its sketches by."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    specs: dict[str, ParameterSpec] = {}
    for module_name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            name = names.get(id(parameter))
            if name is None or (name in specs and specs[name].kind is not Kind.OTHER):
                continue
            owner = module_name.rpartition(".")[0]
            specs[name] = ParameterSpec(name=name, shape=tuple(parameter.shape), kind=_kind(module, parameter), owner=owner)
    return {name: specs[name] for name in parameters}


def _kind(module: nn.Module, parameter: nn.Parameter) -> Kind:
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase):
        return Kind.OUTPUT_FIRST if parameter.dim() == 2 else Kind.OTHER
    if parameter is not getattr(module, "weight", None) or parameter.dim() < 2:
        return Kind.OTHER
    if isinstance(module, nn.Linear):
        return Kind.OUTPUT_FIRST
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Kind.OUTPUT_FIRST if module.groups == 1 else Kind.OTHER
    if isinstance(module, nn.Embedding):
        return Kind.EMBEDDING
    return Kind.INPUT_FIRST if type(module).__name__ == "Conv1D" and parameter.dim() == 2 else Kind.OTHER


def refuse_coupling(model: nn.Module) -> None:
    """Refuse modules that mix examples, by name, before anything is spent."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) and module.training:
            raise UnsupportedLayerError(
                f"'{name}' is {kind}, which mixes examples, so no per-example gradient exists. "
                f"Each example's gradient must depend on that example alone. "
                f"Replace it with GroupNorm, or freeze it: call '{name}'.eval() after every model.train()."
            )
        if getattr(module, "track_running_stats", False) and not isinstance(module, _BatchNorm):
            raise UnsupportedLayerError(
                f"'{name}' is {kind} with track_running_stats=True, which writes statistics of the batch into the model without noise. "
                "A buffer may hold no private data. Build it with track_running_stats=False."
            )
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedLayerError(
                f"'{name or kind}' is compiled with torch.compile, which hides its operations from the capture. "
                "Per-example gradients are taken operation by operation. Pass the model as it was before torch.compile."
            )
