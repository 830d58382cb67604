"""Mutants of the methods with public examples and random projectors: the audit must name each."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from audited import MakePrivate, batch_of, cross_entropy, maker
from torch import Tensor, nn

import lowkey as lk
from lowkey.audit import Check, mechanism
from lowkey.boundary import Sensitive
from lowkey.factors import Dense
from lowkey.sketch import Shared
from lowkey.sketch.residual import Residual

Patch = pytest.MonkeyPatch
CLIP, NOISE, GRADIENTS, GEP, RPDPSGD, SHARED, COLLECTOR = (
    importlib.import_module(f"lowkey.{name}")
    for name in ("release.clip", "release.noise", "gradients", "methods.gep", "methods.rpdpsgd", "sketch.shared", "factors.collector")
)


class Small(nn.Module):
    """Two layers, so that an audit takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


PUBLIC = lk.Public(batch_of(8), cross_entropy)
PROJECTED = maker(lk.PDPSGD(public=PUBLIC, rank=3), model=Small)
SKETCHED = maker(lk.PDPSGD(public=PUBLIC, rank=3, sketch_first=True), model=Small)
RANDOM = maker(lk.RPDPSGD(rank=20, sketch_first=True), model=Small)
RANDOM_64 = maker(lk.RPDPSGD(rank=20, sketch_first=True), model=Small, dtype=torch.float64)
EMBEDDED = maker(lk.GEP(public=PUBLIC, rank=3), model=Small)


@dataclass(frozen=True)
class Mutant:
    """One way to break a method, what the audit must find, and in which run."""

    apply: Callable[[Patch], None]
    expected: Check
    run: MakePrivate
    dtype: torch.dtype = torch.float32


# -- whose examples give the basis -------------------------------------------------------------------------------------


def basis_from_private_examples(patch: Patch) -> None:
    """The gradients that are taken for public are those of the batch that was last seen."""
    add, public_gradients = GRADIENTS.ClippedGradients.add, GRADIENTS.ClippedGradients.public_gradients
    seen: list[Callable[[], Tensor]] = []

    def noted(self: Any, losses: Any) -> None:
        add(self, losses)
        seen[:] = [losses]

    def private_gradients(self: Any, public: lk.Public) -> Iterator[Mapping[str, Tensor]]:
        if not seen:
            yield from public_gradients(self, public)
            return
        batch, seen[:] = seen[0], []
        gradients = self._of_public(lk.Public(public.examples, lambda model, part: batch()), public.examples)
        yield {name: value.nan_to_num(0.0, 0.0, 0.0) for name, value in gradients.items()}

    patch.setattr(GRADIENTS.ClippedGradients, "add", noted)
    patch.setattr(GRADIENTS.ClippedGradients, "public_gradients", private_gradients)


def private_examples_join_the_public_ones(patch: Patch) -> None:
    """One gradient of the batch among those of the public examples."""
    take, public_gradients = CLIP.ClippedSum.take, GRADIENTS.ClippedGradients.public_gradients
    sums: list[Mapping[str, Tensor]] = []

    def noted(self: Any) -> Sensitive:
        total = take(self)
        sums[:] = [{name: block.clone() for name, block in total._blocks.items()}]
        return total

    def joined(self: Any, public: lk.Public) -> Iterator[Mapping[str, Tensor]]:
        for chunk in public_gradients(self, public):
            whole = {name: sums[0][name][None] if sums and name in sums[0] else value[:1] for name, value in chunk.items()}
            yield {name: torch.cat([value, whole[name].to(value)]) for name, value in chunk.items()}

    patch.setattr(CLIP.ClippedSum, "take", noted)
    patch.setattr(GRADIENTS.ClippedGradients, "public_gradients", joined)


# -- what is clipped, and when -----------------------------------------------------------------------------------------


def clipped_before_the_projection(patch: Patch) -> None:
    """Full gradients are clipped, and the directions, which are not orthonormal, are applied to the sum."""
    take = CLIP.ClippedSum.take
    late: dict[str, Tensor] = {}

    def compress(self: Shared, outer: Any, kept: Any) -> dict[str, Any]:
        return {self.name: outer}

    def decode(self: Shared, blocks: Mapping[str, Tensor]) -> Tensor:
        # The audit decodes one parameter's coordinates, a step those of all of them.
        whole = blocks.get("subspace")
        if whole is None:
            whole = SHARED.coordinates_of_dense(blocks[self.name][None], self.matrix)[0]
        return SHARED.combine_directions(whole, self.matrix)

    def blocks(self: Shared) -> dict[str, tuple[int, ...]]:
        late[self.name] = self.matrix
        return {self.name: tuple(self.matrix.shape[1:])}

    def projected(self: Any) -> Sensitive:
        total = take(self)
        coordinates = [SHARED.coordinates_of_dense(block[None], late[name])[0] for name, block in total._blocks.items()]
        return Sensitive({"subspace": torch.stack(coordinates).sum(0)}, total.l2_bound)

    patch.setattr(Shared, "compress", compress)
    patch.setattr(Shared, "compress_dense", lambda self, gradients: {self.name: Dense(gradients)})
    patch.setattr(Shared, "blocks", property(blocks))
    patch.setattr(Shared, "decode", decode)
    patch.setattr(CLIP.ClippedSum, "take", projected)


def mean_of_a_microbatch_is_clipped(patch: Patch) -> None:
    """As in the paper's second experiment: five examples are averaged, and the average is clipped as if it were one."""

    def add(self: Any, per_example: Any) -> None:
        means = {name: factor.dense().nan_to_num(0.0, 0.0, 0.0).mean(0) for name, factor in per_example._blocks.items()}
        squares = torch.stack([mean.square().sum() for mean in means.values()]).sum()[None]
        weight = CLIP.clip_weights(squares, torch.isfinite(squares), self.clip_norm)[0]
        for name, mean in means.items():
            self._block(name).add_(mean * weight * per_example._batch_size)

    patch.setattr(CLIP.ClippedSum, "add", add)


def parts_clipped_apart(patch: Patch) -> None:
    """The norms of each parameter's coordinates add up in squares, as if the coordinates were not added up into one vector."""

    @dataclass(frozen=True)
    class Apart(Dense):
        """A sum whose parts are measured one by one."""

        parts: tuple[Tensor, ...] = ()

        def squared_norms(self) -> Tensor:
            return torch.stack([part.square().sum(1) for part in self.parts]).sum(0)

        def without(self, bad: Tensor) -> Any:
            return Dense(self.value.masked_fill(bad[:, None], 0.0))

    def combine(uses: list[Any]) -> Any:
        return uses[0] if len(uses) == 1 else Apart(sum(use.dense() for use in uses), tuple(use.dense() for use in uses))

    patch.setattr(COLLECTOR, "combine", combine)


def both_limits_are_the_clip_norm(patch: Patch) -> None:
    patch.setattr(GEP, "ClipGroup", lambda *, blocks, share: CLIP.ClipGroup(blocks=blocks, share=1.0))
    patch.setattr(CLIP, "_check_groups", lambda groups, shapes: None)


def residual_with(change: Callable[[Residual, Tensor], Tensor]) -> Callable[[Patch], None]:
    """Change the squared norm of the residual, factored or in full."""
    split, norms = GEP.WithResidual._split_dense, Residual.squared_norms

    @dataclass(frozen=True)
    class Mismeasured(Dense):
        """A residual in full that is measured as a factored one would be."""

        residual: Any = None

        def squared_norms(self) -> Tensor:
            return change(self.residual, Dense.squared_norms(self))

        def without(self, bad: Tensor) -> Any:
            return dataclasses.replace(self, value=Dense.without(self, bad).value, residual=self.residual.without(bad))

    def splits(self: Any, gradients: Tensor) -> dict[str, Any]:
        blocks = split(self, gradients)
        (_, inside), (name, outside) = blocks.items()
        return {**blocks, name: Mismeasured(outside.value, residual=Residual(Dense(gradients), inside.value, self))}

    def apply(patch: Patch) -> None:
        patch.setattr(Residual, "squared_norms", lambda self: change(self, norms(self)))
        patch.setattr(GEP.WithResidual, "_split_dense", splits)

    return apply


def length_inside(residual: Residual, square: Tensor) -> Tensor:
    """Take the norm of what the subspace holds for that of what it leaves."""
    return residual.sketch.weight**2 * residual.coordinates.square().sum(1)


def residual_is_not_in_any_norm(residual: Residual, square: Tensor) -> Tensor:
    return torch.where(torch.isfinite(square), 0.0 * square, square).nan_to_num(0.0)


def residual_is_clipped_before_it_is_scaled(residual: Residual, square: Tensor) -> Tensor:
    return square / residual.sketch.weight**2


# -- what is drawn from what -------------------------------------------------------------------------------------------


def directions_and_noise_share_a_key(patch: Patch) -> None:
    """The directions of a step are the noise that the step's coordinates will get."""
    secrets: list[bytes] = []
    renew = NOISE.DrawKeys._renew

    def renewed(self: Any) -> None:
        renew(self)
        secrets.append(self._secret)

    def draw(shape: tuple[int, ...], some: range, rank: int, key: tuple[Any, ...]) -> Tensor:
        drawn = torch.zeros(len(some), *shape, dtype=torch.float64)
        if secrets:
            NOISE._add_philox(drawn, 1.0, NOISE.derive_key(secrets[-1], "system noise", key[0] + 1, key[0], 0))
        return drawn + (0.0 if secrets else 1.0)

    patch.setattr(NOISE.DrawKeys, "_renew", renewed)
    patch.setattr(RPDPSGD, "draw_directions", draw)


MUTANTS = {
    "projected on private directions": Mutant(basis_from_private_examples, Check.POST_PROCESSING, PROJECTED),
    "sketched with private directions": Mutant(basis_from_private_examples, Check.POST_PROCESSING, SKETCHED),
    "embedded in private directions": Mutant(basis_from_private_examples, Check.POST_PROCESSING, EMBEDDED),
    "the private sum among the public gradients": Mutant(private_examples_join_the_public_ones, Check.POST_PROCESSING, PROJECTED),
    "clipped before a projection that stretches": Mutant(clipped_before_the_projection, Check.SENSITIVITY, RANDOM),
    "mean of a microbatch, projected": Mutant(mean_of_a_microbatch_is_clipped, Check.INVARIANCE, PROJECTED),
    "mean of a microbatch, sketched": Mutant(mean_of_a_microbatch_is_clipped, Check.INVARIANCE, SKETCHED),
    "a norm for each parameter's part": Mutant(parts_clipped_apart, Check.SENSITIVITY, SKETCHED),
    "both limits are the clip norm": Mutant(both_limits_are_the_clip_norm, Check.SENSITIVITY, EMBEDDED),
    "the residual has no norm": Mutant(residual_with(residual_is_not_in_any_norm), Check.SENSITIVITY, EMBEDDED),
    "the residual has the embedding's norm": Mutant(residual_with(length_inside), Check.SENSITIVITY, EMBEDDED),
    "the residual is scaled after clipping": Mutant(residual_with(residual_is_clipped_before_it_is_scaled), Check.SENSITIVITY, EMBEDDED),
    "directions and noise share a key": Mutant(directions_and_noise_share_a_key, Check.NOISE_INDEPENDENCE, RANDOM_64, torch.float64),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_audit_names_what_a_mutant_breaks(name: str, monkeypatch: Patch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    result = mechanism(
        mutant.run, batch_of(dtype=mutant.dtype), num_coordinates=2_000 if mutant.expected is Check.NOISE_INDEPENDENCE else 100
    )
    assert mutant.expected in {finding.check for finding in result.findings}, str(result)


def test_two_limits_of_the_whole_clip_norm_are_refused_before_any_audit(monkeypatch: Patch) -> None:
    monkeypatch.setattr(GEP, "ClipGroup", lambda *, blocks, share: CLIP.ClipGroup(blocks=blocks, share=1.0))
    with pytest.raises(lk.ConfigError, match="squares add up to 2"):
        EMBEDDED(lk.SystemNoise())


def test_the_audit_measures_the_bound_that_two_whole_limits_would_have(monkeypatch: Patch) -> None:
    both_limits_are_the_clip_norm(monkeypatch)
    result = mechanism(EMBEDDED, batch_of(), num_coordinates=100)
    assert f"{math.sqrt(2):.4f}"[:5] in str(result)
