"""`F.multi_head_attention_forward`, which `nn.MultiheadAttention` and torch's transformer layers call with the batch on the second axis.

It is redone with the batch on the first axis, out of operations that have rules of their own.

    Axes: B examples, H heads, L queries, S keys, D features of a head, E of all heads
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowkey.errors import ConfigError, ShapeError
from lowkey.factors.capture import Capture
from lowkey.factors.elementwise import as_data
from lowkey.factors.registry import Call, rule


@dataclass
class _Given:
    """The arguments of `F.multi_head_attention_forward`, in torch's order."""

    query: Tensor
    key: Tensor
    value: Tensor
    embed_dim_to_check: int
    num_heads: int
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool
    dropout_p: float
    out_proj_weight: Tensor
    out_proj_bias: Tensor | None
    training: bool = True
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    use_separate_proj_weight: bool = False
    q_proj_weight: Tensor | None = None
    k_proj_weight: Tensor | None = None
    v_proj_weight: Tensor | None = None
    static_k: Tensor | None = None
    static_v: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


@rule(F.multi_head_attention_forward)
def multi_head_attention(call: Call) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward(query, key, value, ...)`."""
    given = _Given(*call.args, **call.kwargs)
    _check(given)
    given = _batch_first(call.capture, given)
    # The operations below meet the same capture that called this rule.
    with call.capture:
        query, key, value = _project(given)
        key, value, extra = _append(given, key, value)
        mask = _mask(given, query, extra)
        is_causal = given.is_causal and mask is None
        heads, weights = _attend(given, _split(given, query), _split(given, key), _split(given, value), mask, is_causal)
        output = F.linear(heads.transpose(1, 2).flatten(2), given.out_proj_weight, given.out_proj_bias)
        return output.transpose(0, 1), weights


def _check(given: _Given) -> None:
    if given.query.dim() != 3:
        raise ShapeError(
            f"multi_head_attention_forward was given a query of shape {tuple(given.query.shape)}, which holds a single example. "
            "Each example's gradient is told apart by its place on the batch axis. "
            "Give the layer a batch of one: query.unsqueeze(0) with batch_first=True."
        )
    if given.static_k is not None or given.static_v is not None:
        raise ConfigError(
            "multi_head_attention_forward was given static_k or static_v, for which no per-example gradient is known. "
            "Keys and values must be projected from the layer's inputs. Pass them as key and value."
        )
    if given.is_causal and given.attn_mask is None:
        raise ConfigError("is_causal=True is a hint about attn_mask, which is None. Pass the causal mask as attn_mask too.")


def _batch_first(capture: Capture, given: _Given) -> _Given:
    """Return the three inputs with the examples on the first axis, as data; one tensor given twice stays one."""
    turned: dict[int, Tensor] = {}
    for tensor in (given.query, given.key, given.value):
        if id(tensor) not in turned:
            with capture:
                rows = tensor.transpose(0, 1)
            turned[id(tensor)] = as_data(capture, rows, rows.shape[0])
    return replace(given, query=turned[id(given.query)], key=turned[id(given.key)], value=turned[id(given.value)])


def _project(given: _Given) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each `(B, L or S, E)`."""
    inputs = (given.query, given.key, given.value)
    if given.use_separate_proj_weight:
        weights = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
        biases = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
        query, key, value = (F.linear(x, _present(w), b) for x, w, b in zip(inputs, weights, biases, strict=True))
        return query, key, value
    # One product with the whole packed weight for each distinct input: the gradient of a slice of the weight would be no factor any more.
    products: dict[int, tuple[Tensor, ...]] = {}
    for x in inputs:
        if id(x) not in products:
            products[id(x)] = F.linear(x, _present(given.in_proj_weight), given.in_proj_bias).chunk(3, -1)
    query, key, value = (products[id(x)][place] for place, x in enumerate(inputs))
    return query, key, value


def _present(weight: Tensor | None) -> Tensor:
    if weight is None:
        raise ConfigError(
            "multi_head_attention_forward was given no projection weight. Pass in_proj_weight, or q_, k_ and v_proj_weight together."
        )
    return weight


def _append(given: _Given, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return keys and values with the trained bias and the zero at their end, and how many were added."""
    before = key.shape[1]
    if given.bias_k is not None and given.bias_v is not None:
        batch = key.shape[0]
        key = torch.cat([key, given.bias_k.expand(batch, -1, -1)], dim=1)
        value = torch.cat([value, given.bias_v.expand(batch, -1, -1)], dim=1)
    if given.add_zero_attn:
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    return key, value, key.shape[1] - before


def _mask(given: _Given, query: Tensor, extra: int) -> Tensor | None:
    """Return what is added to the scores, broadcastable to `(B, H, L, S)`, or None."""
    mask, padding = given.attn_mask, given.key_padding_mask
    if given.is_causal and padding is None and not given.need_weights:
        return None
    if mask is not None:
        mask = _additive(mask, query.dtype, extra)
        mask = mask.unflatten(0, (-1, given.num_heads)) if mask.dim() == 3 else mask
    if padding is not None:
        padding = _additive(padding, query.dtype, extra)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: Tensor, dtype: torch.dtype, extra: int) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
    return F.pad(mask, (0, extra))


def _split(given: _Given, features: Tensor) -> Tensor:
    return features.unflatten(-1, (given.num_heads, -1)).transpose(1, 2)


def _attend(given: _Given, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor | None]:
    """Return `(B, H, L, D)`, and the attention weights if they are wanted."""
    dropout = given.dropout_p if given.training else 0.0
    if not given.need_weights:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal), None
    scores: Any = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights @ value, weights.mean(1) if given.average_attn_weights else weights
