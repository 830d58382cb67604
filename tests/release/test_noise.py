"""What a noise source promises about keys, dtypes, layouts and failures; its distribution is in tests/statistical."""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from lowkey.errors import ConfigError, PrivacyBoundaryError
from lowkey.release.noise import CHUNK, DrawKeys, NoiseSource, SeededNoise, SystemNoise, _add_on_cuda, _count_fork
from lowkey.release.secure import SecureNoise, grid_spacing

every_source = pytest.mark.parametrize("source", [SystemNoise(), SecureNoise(), SeededNoise(3)], ids=repr)
fresh_source = pytest.mark.parametrize("make", [SystemNoise, SecureNoise])


def first(source: NoiseSource, count: int = 8, *, step: int = 1, index: int = 0) -> Tensor:
    return source.normal(torch.zeros(count, dtype=torch.float64), 1.0, step=step, index=index)


@fresh_source
def test_the_same_step_and_index_never_give_the_same_noise_twice(make: type[SystemNoise] | type[SecureNoise]) -> None:
    source = make()
    assert not torch.equal(first(source), first(source))


@fresh_source
def test_two_sources_share_no_noise(make: type[SystemNoise] | type[SecureNoise]) -> None:
    assert not torch.equal(first(make()), first(make()))


@fresh_source
def test_global_seeds_do_not_change_the_noise(make: type[SystemNoise] | type[SecureNoise]) -> None:
    def seeded_draw() -> Tensor:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global generator is the subject
        random.seed(0)
        return first(make())

    assert not torch.equal(seeded_draw(), seeded_draw())


@every_source
def test_drawing_leaves_the_global_generators_alone(source: NoiseSource) -> None:
    from_torch, from_numpy, from_python = torch.get_rng_state(), pickle.dumps(np.random.get_state()), random.getstate()  # noqa: NPY002
    first(source, CHUNK + 1)
    assert torch.equal(torch.get_rng_state(), from_torch)
    assert pickle.dumps(np.random.get_state()) == from_numpy  # noqa: NPY002
    assert random.getstate() == from_python


def test_a_seeded_source_replays_exactly_what_step_and_index_name() -> None:
    assert torch.equal(first(SeededNoise(7), step=4, index=2), first(SeededNoise(7), step=4, index=2))


@pytest.mark.parametrize(("seed", "step", "index"), [(5 + 2**32, 1, 0), (-5, 1, 0), (5, 2, 0), (5, 1, 1), (5, 11, 0), (5, 0, 1)])
def test_a_seeded_source_changes_with_every_part_of_the_name(seed: int, step: int, index: int) -> None:
    assert not torch.isclose(first(SeededNoise(5)), first(SeededNoise(seed), step=step, index=index)).any()


def test_replayed_noise_does_not_depend_on_the_number_of_threads() -> None:
    count, threads = 3 * CHUNK + 5, torch.get_num_threads()
    draws: list[Tensor] = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            draws.append(first(SeededNoise(1), count))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*draws)


def test_a_prefix_of_a_draw_is_the_draw_of_the_prefix() -> None:
    assert torch.equal(first(SeededNoise(1), CHUNK + 9)[: CHUNK + 2], first(SeededNoise(1), CHUNK + 2))


def test_chunks_differ_from_one_another() -> None:
    noise = first(SeededNoise(1), 2 * CHUNK)
    assert not torch.isclose(noise[:CHUNK], noise[CHUNK:], rtol=1e-12, atol=0).any()


@every_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (3, 4)])
def test_noise_has_the_shape_and_dtype_of_its_model(source: NoiseSource, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    noise = source.normal(torch.empty(shape, dtype=dtype), 1.0, step=1, index=0)
    assert (noise.shape, noise.dtype) == (torch.Size(shape), dtype)


def test_adding_in_place_adds_exactly_the_named_noise() -> None:
    total = torch.arange(6.0)
    noise = SeededNoise(2).normal(total, 0.5, step=9, index=1)
    expected = total + noise
    SeededNoise(2).add_(total, 0.5, step=9, index=1)
    assert torch.equal(total, expected)


def test_a_transposed_sum_gets_the_noise_of_its_logical_order() -> None:
    total = torch.zeros(4, 3).T
    SeededNoise(2).add_(total, 1.0, step=1, index=0)
    assert torch.equal(total, SeededNoise(2).normal(torch.zeros(3, 4), 1.0, step=1, index=0))


def test_a_transposed_sum_gets_secure_noise_on_every_coordinate() -> None:
    base = torch.zeros(4, 3)
    SecureNoise().add_(base.T, 1.0, step=1, index=0)
    assert (base != 0).all()


def test_noise_scales_with_the_standard_deviation() -> None:
    like = torch.zeros(9, dtype=torch.float64)
    assert torch.equal(SeededNoise(2).normal(like, 4.0, step=1, index=0), 4 * SeededNoise(2).normal(like, 1.0, step=1, index=0))


@every_source
def test_a_parameter_that_requires_grad_is_noised_without_a_graph(source: NoiseSource) -> None:
    total = torch.zeros(4, requires_grad=True)
    source.add_(total, 1.0, step=1, index=0)
    assert total.grad_fn is None
    assert bool((total.detach() != 0).all())


@every_source
def test_zero_standard_deviation_changes_nothing(source: NoiseSource) -> None:
    total = torch.tensor([1 / 3, -math.inf, 0.1])
    source.add_(total, 0.0, step=1, index=0)
    assert torch.equal(total, torch.tensor([1 / 3, -math.inf, 0.1]))


@every_source
@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
def test_an_impossible_standard_deviation_is_refused(source: NoiseSource, std: float) -> None:
    with pytest.raises(ConfigError, match="standard deviation"):
        source.add_(torch.zeros(2), std, step=1, index=0)


@every_source
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_a_short_dtype_is_refused(source: NoiseSource, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="float32 or float64"):
        source.add_(torch.zeros(2, dtype=dtype), 1.0, step=1, index=0)


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@fresh_source
def test_a_forked_child_draws_other_noise_than_its_parent(make: type[SystemNoise] | type[SecureNoise]) -> None:
    source = make()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, first(source).numpy().tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    from_child = np.frombuffer(os.read(read_end, 64))
    os.close(read_end)
    os.close(write_end)
    assert not np.isclose(from_child, first(source).numpy()).any()


def test_the_key_is_renewed_after_a_fork_even_if_the_process_id_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda count: bytes(count))
    monkeypatch.setattr("lowkey.release.noise._forks", 0)  # restored afterwards
    keys = DrawKeys("test")
    in_parent = keys.next_key(1, 0)
    monkeypatch.setattr("os.urandom", lambda count: bytes([1]) * count)
    _count_fork()
    assert keys.next_key(1, 0) != in_parent
    assert keys._secret == bytes([1]) * 32  # pyright: ignore[reportPrivateUsage]


def test_a_source_takes_256_bits_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def recorded(count: int) -> bytes:
        asked.append(count)
        return bytes(count)

    monkeypatch.setattr("os.urandom", recorded)
    SystemNoise()
    assert asked == [32]


def test_purposes_have_unrelated_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda count: bytes(count))
    assert DrawKeys("one").next_key(1, 0) != DrawKeys("two").next_key(1, 0)


@fresh_source
@pytest.mark.parametrize("store", [pickle.dumps, copy.deepcopy])
def test_a_key_cannot_be_stored_or_copied(make: type[SystemNoise] | type[SecureNoise], store: object) -> None:
    assert callable(store)
    with pytest.raises(PrivacyBoundaryError, match="Create a new noise source"):
        store(make())


def test_no_key_shows_in_print() -> None:
    keys = DrawKeys("test")
    secret = keys._secret  # pyright: ignore[reportPrivateUsage]
    assert repr(keys) == "DrawKeys('test', secret hidden)"
    assert secret.hex() not in repr(keys)
    assert str(secret) not in repr(keys)


@pytest.mark.parametrize(("source", "has_guarantee"), [(SystemNoise(), True), (SecureNoise(), True), (SeededNoise(1), False)])
def test_only_fresh_sources_carry_a_guarantee(source: NoiseSource, has_guarantee: bool) -> None:
    assert source.has_guarantee is has_guarantee
    assert ("NON-PRIVATE" in source.description) is not has_guarantee
    assert "\n" not in source.description


@pytest.mark.parametrize("std", [1e-300, 0.013, 1.0, 1.999, 7e20])
def test_the_grid_is_a_power_of_two_far_below_the_noise(std: float) -> None:
    grid = grid_spacing(std)
    assert math.frexp(grid)[0] == 0.5
    assert grid <= std * 2.0**-24 < 2 * grid


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_secure_sum_lies_on_the_grid(dtype: torch.dtype) -> None:
    total = torch.linspace(-3, 3, 1001, dtype=dtype)
    SecureNoise().add_(total, 0.3, step=1, index=0)
    multiples = total.double() / grid_spacing(0.3)
    assert torch.equal(multiples, multiples.round())


def test_a_secure_sum_keeps_what_it_was_added_to() -> None:
    total = torch.full((1000,), 5.0)
    SecureNoise().add_(total, 1e-6, step=1, index=0)
    assert bool(((total - 5).abs() < 1e-5).all())


def test_a_missing_cipher_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ConfigError, match=r'pip install "lowkey\[secure\]"'):
        SecureNoise()


def test_a_device_without_a_generator_of_its_own_gets_noise_from_the_cpu() -> None:
    assert SystemNoise().normal(torch.empty(3, 2, device="meta"), 1.0, step=1, index=0).shape == (3, 2)


def test_the_chunks_of_a_cuda_draw_continue_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's generators have one interface on all devices, so the walk over chunks can be followed on the CPU.
    monkeypatch.setattr("lowkey.release.noise._CUDA_CHUNK", 16)
    noise = torch.zeros(40)
    _add_on_cuda(noise, 2.0, bytes(range(32)))
    generator = torch.Generator().manual_seed(int.from_bytes(bytes(range(8)), "little"))
    assert torch.equal(noise, 2.0 * torch.cat([torch.empty(count).normal_(generator=generator) for count in (16, 16, 8)]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_source
def test_noise_on_a_cuda_device_has_unit_scale_and_leaves_global_state_alone(source: NoiseSource) -> None:
    before = torch.cuda.get_rng_state()
    noise = source.normal(torch.empty(1 << 20, device="cuda"), 1.0, step=1, index=0)
    assert noise.is_cuda
    # 2^20 squares have a relative standard error of 0.0014; 0.007 is five of them.
    assert abs(float(noise.square().mean()) - 1) < 0.007
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_seeded_draw_on_a_cuda_device_replays() -> None:
    like = torch.empty(1000, device="cuda")
    assert torch.equal(SeededNoise(5).normal(like, 1.0, step=1, index=0), SeededNoise(5).normal(like, 1.0, step=1, index=0))
    assert not torch.equal(SeededNoise(5).normal(like, 1.0, step=1, index=0), SeededNoise(5 + 2**32).normal(like, 1.0, step=1, index=0))
