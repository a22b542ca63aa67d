# SPDX-License-Identifier: Apache-2.0
"""What all observers promise: registry, options, shapes, merging, failure."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from tests.support.pairs import each
from tests.support.thinned import thinned

from llmcompressor.errors import InputError, NonFiniteError
from llmcompressor.observers import (
    MemorylessMinMaxObserver,
    Observer,
    flatten_for_calibration,
    fused_global_scale,
)
from llmcompressor.observers.base import OBSERVERS

INT4 = QuantizationArgs(num_bits=4, group_size=16, symmetric=False)
TENSOR = QuantizationArgs(num_bits=8, strategy="tensor")
NVFP4 = PRESET_SCHEMES["NVFP4"]
WEIGHT = torch.linspace(-1, 2, 4 * 32).reshape(4, 32)


def make(name: str, base_name: str = "input", args: QuantizationArgs = TENSOR, **options):
    return Observer.load_from_registry(name, base_name=base_name, args=args, **options)


@pytest.mark.parametrize("name", OBSERVERS)
def test_every_observer_gives_usable_weight_scales(name):
    observer = make(name, "weight", INT4)
    observer.importance = torch.ones(32)
    scale, zero = observer(WEIGHT)
    assert scale.shape == zero.shape == (4, 2)
    assert bool((scale > 0).all())
    assert zero.dtype == torch.int8


@each(name=[name for name in OBSERVERS if "imatrix" not in name], split=[1, 7])
def test_every_observer_sees_activations_of_any_batch_shape(name, split):
    torch.manual_seed(0)
    x = torch.randn(2, 10, 32)
    a, b = make(name), make(name)
    for part in (x[:, :split], x[:, split:]):
        a.observe(part)
        b.observe(part.reshape(-1, 32))
    assert torch.equal(a.qparams()[0], b.qparams()[0])
    assert a.qparams()[0].shape == (1,)


@pytest.mark.parametrize(
    ("name", "args", "dtype"),
    thinned(
        [name for name in OBSERVERS if "imatrix" not in name],
        [
            (TENSOR, torch.float32),
            (QuantizationArgs(num_bits=8, group_size=16), torch.bfloat16),
            (TENSOR, torch.bfloat16),
            (QuantizationArgs(num_bits=8, group_size=16), torch.float32),
        ],
    ),
)
def test_batches_of_one_size_may_be_shown_together(name, args, dtype):
    """Each is an observation: moving averages take as many steps as there are batches."""
    torch.manual_seed(0)
    x = (torch.randn(5, 12, 32) * torch.rand(5, 1, 1)).to(dtype)
    x[3] = x[3].abs()  # all of one sign
    each, together = make(name, "input", args), make(name, "input", args)
    for part in x:
        each.observe(part)
    together.observe_each(x.flatten(0, 1), 5)
    assert together.observations == each.observations == 5
    for one, other in zip(together.qparams(), each.qparams(), strict=True):
        assert torch.equal(one, other)


def test_a_misspelt_name_lists_the_nearest():
    with pytest.raises(InputError, match="static_minmax"):
        make("static_min_max")


def test_unknown_options_are_refused_with_a_suggestion():
    with pytest.raises(InputError, match="Did you mean averaging_constant"):
        make("minmax", averaging_const=0.1)
    with pytest.raises(InputError, match="It has none"):
        make("static_minmax", averaging_constant=0.1)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("minmax", {"averaging_constant": 0.0}),
        ("mse", {"maxshrink": 2}),
        ("mse", {"patience": -1}),
        ("memoryless_mse", {"grid": 0}),
        ("imatrix_mse", {"norm": float("inf")}),
        ("memoryless_mse", {"expand": 0.9}),
        ("nvfp4_expanded_imatrix", {"expand": 0.5}),
        ("histogram", {"method": "guess"}),
        ("percentile", {"percentile": 0}),
    ],
)
def test_options_out_of_bounds_are_refused_by_name(name, option):
    with pytest.raises(InputError, match=next(iter(option))):
        make(name, **option)


def test_third_parties_can_register_an_observer():
    @Observer.register("twice_minmax_for_test", alias="twofold_for_test")
    class Twice(MemorylessMinMaxObserver):
        def measure(self, observed):
            low, high = super().measure(observed)
            return type(observed.extremes)(2 * low, 2 * high)

    assert isinstance(make("twofold_for_test"), Twice)
    x = torch.ones(3, 4)
    assert make("twice_minmax_for_test")(x)[0] == 2 * make("memoryless_minmax")(x)[0]


@pytest.mark.parametrize("name", OBSERVERS)
def test_nothing_seen_is_an_error_that_names_the_tensor(name):
    observer = make(name, "output")
    observer.observe(torch.zeros(0, 32))
    assert observer.observations == 0
    with pytest.raises(InputError, match="output"):
        observer.qparams()


@each(bad=[float("nan"), float("inf"), -float("inf")], name=OBSERVERS)
def test_bad_values_are_an_error_and_leave_no_trace(name, bad):
    observer = make(name)
    x = torch.ones(3, 32)
    x[1, 5] = bad
    with pytest.raises(NonFiniteError, match="input"):
        observer.observe(x)
    assert observer.observations == 0


@pytest.mark.parametrize("name", OBSERVERS)
def test_reset_forgets(name):
    observer = make(name, "weight", INT4)
    observer.importance = torch.ones(32)
    observer.observe(WEIGHT * 9)
    observer.reset()
    fresh = make(name, "weight", INT4)
    fresh.importance = torch.ones(32)
    assert torch.equal(observer(WEIGHT)[0], fresh(WEIGHT)[0])


@each(
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    preset=["W4A16", "W4A16_ASYM", "FP8", "FP8_BLOCK", "NVFP4", "MXFP4"]
    + [name for name in ("MXFP6A16",) if name in PRESET_SCHEMES],
)
def test_scales_equal_those_that_readers_compute(preset, dtype):
    torch.manual_seed(0)
    args = PRESET_SCHEMES[preset]["weights"]
    W = torch.randn(200, 256).to(dtype)
    observer = make("memoryless_minmax", "weight", args).observe(W)
    scale, zero = observer.qparams()
    global_scale = generate_gparam(W.min(), W.max()) if preset == "NVFP4" else None
    expected = calculate_qparams(*observer.range(), args, global_scale=global_scale)
    assert torch.equal(scale, expected[0])
    assert torch.equal(zero.float(), expected[1].float())


def test_a_scale_neither_vanishes_nor_overflows_unseen():
    tiny = make("memoryless_minmax").observe(torch.full((1, 4), 1e-9))
    assert tiny.qparams(dtype=torch.float16)[0] > 0
    huge = make("memoryless_minmax").observe(torch.full((1, 4), 1e9))
    with pytest.raises(NonFiniteError, match="float16"):
        huge.qparams(dtype=torch.float16)


class TestShapes:
    def test_attention_heads_have_a_scale_each(self):
        torch.manual_seed(0)
        states = torch.randn(2, 3, 5, 8) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
        args = QuantizationArgs(num_bits=8, strategy="attn_head")
        scale, _ = make("static_minmax", "k", args)(states)
        assert scale.shape == (3, 1, 1)
        assert torch.equal(scale, states.abs().amax((0, 2, 3)).reshape(3, 1, 1) / 127.5)

    @pytest.mark.parametrize("name", ["static_minmax", "memoryless_mse", "percentile"])
    def test_states_of_a_tensor_have_one_scale(self, name):
        assert make(name, "v")(torch.randn(2, 3, 5, 8))[0].shape == (1,)

    def test_groups_of_activations_have_a_scale_each(self):
        args = QuantizationArgs(num_bits=8, group_size=8)
        x = torch.randn(2, 5, 32)
        scale, _ = make("static_minmax", args=args)(x)
        assert torch.equal(scale, x.abs().reshape(-1, 4, 8).amax((0, 2)) / 127.5)

    @pytest.mark.parametrize("name", ["memoryless_minmax", "memoryless_mse", "histogram"])
    def test_ragged_blocks_are_not_widened_by_padding(self, name):
        args = QuantizationArgs(
            num_bits=8, strategy="block", block_structure=[3, 20], symmetric=False
        )
        ragged = make(name, "weight", args).observe(WEIGHT)
        corner = make(name, "weight", TENSOR.model_copy(update={"symmetric": False}))
        low, high = ragged.range()
        expected = corner.observe(WEIGHT[3:, 20:].clone()).range()
        assert low.shape == (2, 2)
        assert high[1, 1] == pytest.approx(expected[1].item())
        assert min(low[1, 1].item(), 0) == pytest.approx(min(expected[0].item(), 0))

    @pytest.mark.parametrize(
        ("base_name", "fields"),
        [
            ("input", {"strategy": "token", "dynamic": True}),
            ("input", {"strategy": "channel"}),
            ("k", {"strategy": "channel"}),
            ("weight", {"strategy": "attn_head"}),
        ],
    )
    def test_strategies_without_static_scales_are_refused(self, base_name, fields):
        observer = make("static_minmax", base_name, QuantizationArgs(**fields))
        with pytest.raises(InputError, match=fields["strategy"]):
            observer.observe(torch.ones(1, 2, 3, 4) if base_name == "k" else torch.ones(3, 4))


class TestGlobalScale:
    def test_local_activations_have_only_a_global_scale(self):
        x = torch.randn(2, 5, 32)
        observer = make("static_minmax", args=NVFP4["input_activations"]).observe(x)
        assert torch.equal(observer.global_scale(), generate_gparam(x.min(), x.max()))

    def test_fused_members_share_that_of_the_largest(self):
        args = NVFP4["weights"]
        members = [make("memoryless_minmax", "weight", args).observe(WEIGHT * s) for s in (1, 5, 2)]
        shared = fused_global_scale(members)
        assert torch.equal(shared, members[1].global_scale())
        scale, _ = members[0].qparams(shared)
        expected, _ = calculate_qparams(*members[0].range(), args, global_scale=shared)
        assert torch.equal(scale, expected)


class TestMerge:
    @pytest.mark.parametrize("name", ["static_minmax", "histogram", "percentile", "entropy"])
    def test_two_halves_give_the_whole(self, name):
        torch.manual_seed(0)
        parts = torch.randn(6, 20, 32) ** 3
        whole, one, two = make(name), make(name), make(name)
        for i, part in enumerate(parts):
            whole.observe(part)
            (one if i < 2 else two).observe(part)
        one.merge(two)
        assert one.observations == whole.observations
        for a, b in zip(one.range(), whole.range(), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("name", ["minmax", "mse"])
    def test_averages_are_weighted_by_their_observations(self, name):
        ones, threes = make(name).observe(torch.ones(1, 4)), make(name)
        for _ in range(3):
            threes.observe(torch.full((1, 4), 3.0))
        alone = (ones.range()[1], threes.range()[1])
        expected = (alone[0] + 3 * alone[1]) / 4
        assert torch.allclose(ones.merge(threes).range()[1], expected)


COLLECTING = [name for name in OBSERVERS if "imatrix" not in name]


def steps(number: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(number, 6, 32))


@pytest.mark.parametrize("name", COLLECTING)
def test_a_collected_step_is_one_observation(name):
    a, b = make(name), make(name)
    for x in steps(3):
        a.observe(x)
        b.collect(x).commit()
    assert b.observations == 3
    assert all(map(torch.equal, a.range(), b.range()))


@each(dtype=[torch.float32, torch.bfloat16], name=COLLECTING)
def test_a_saved_observer_goes_on_where_it_was(name, dtype, tmp_path):
    a, b = make(name), make(name)
    torch.save(a.state_dict(), tmp_path / "empty")
    b.load_state_dict(torch.load(tmp_path / "empty", weights_only=True))
    assert b.observations == 0
    for x in steps(3):
        a.observe(x.to(dtype))
    torch.save(a.state_dict(), tmp_path / "state")
    b.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for observer in (a, b):
        observer.observe(2 * steps(1)[0].to(dtype))
    assert a.observations == b.observations == 4
    for one, other in zip((*a.range(), *a.qparams()), (*b.range(), *b.qparams()), strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("base", "fields", "shape"),
    [
        ("weight", {"strategy": "tensor"}, (1, 1, 128)),
        ("weight", {"strategy": "channel"}, (1, 4, 1, 32)),
        ("weight", {"strategy": "group", "group_size": 16}, (1, 4, 2, 16)),
        ("weight", {"strategy": "block", "block_structure": [2, 8]}, (1, 2, 4, 16)),
        ("input", {"strategy": "tensor"}, (4, 1, 32)),
        ("input", {"strategy": "tensor_group", "group_size": 16}, (4, 2, 16)),
    ],
)
def test_a_tensor_can_be_laid_out_by_scale(base, fields, shape):
    args = QuantizationArgs(num_bits=8, **fields)
    flat = flatten_for_calibration(WEIGHT, base, args)
    assert flat.shape == shape
    assert torch.equal(
        flat.amax(dim=(0, -1)), make("static_minmax", base, args).observe(WEIGHT).max_vals
    )
