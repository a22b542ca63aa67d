# SPDX-License-Identifier: Apache-2.0
"""What all observers promise: registry, options, shapes, merging, failure."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from tests.support.thinned import thinned

from llmcompressor.errors import InputError, NonFiniteError
from llmcompressor.observers import (
    MemorylessMinMaxObserver,
    NVFP4ExpandedMSEObserver,
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


@pytest.mark.parametrize("name", [name for name in OBSERVERS if "imatrix" not in name])
@pytest.mark.parametrize("split", [1, 7])
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


def test_an_observer_of_ones_own_sees_each_batch_by_itself():
    class Clipping(MemorylessMinMaxObserver):
        def observe(self, x):
            return super().observe(x.clamp(-1, 1))

    class Counting(MemorylessMinMaxObserver):
        seen = 0

        def _update(self, observed):
            self.seen += 1
            super()._update(observed)

    x = torch.linspace(-9, 9, 6 * 32).reshape(6, 32)
    _, high = Clipping("input", TENSOR).observe_each(x, 3).range()
    assert float(high) == 1
    assert Counting("input", TENSOR).observe_each(x, 3).seen == 3


@pytest.mark.parametrize("name", ["minmax", "mse", "histogram"])
def test_a_bad_batch_among_others_is_found(name):
    x = torch.ones(6, 32)
    x[4, 7] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or infinity in the input"):
        make(name).observe_each(x, 3)


def test_a_misspelt_name_lists_the_nearest():
    with pytest.raises(InputError, match="static_minmax"):
        make("static_min_max")


def test_the_arguments_go_by_their_former_name_too():
    scale, zero = Observer.load_from_registry("minmax", quantization_args=INT4)(WEIGHT)
    for found, expected in zip((scale, zero), make("minmax", "weight", INT4)(WEIGHT), strict=True):
        assert torch.equal(found, expected)
    states = QuantizationArgs(strategy="token", dynamic=True)
    assert Observer.load_from_registry("minmax", quantization_args=states).base_name == "input"
    with pytest.raises(InputError, match="Give args"):
        Observer.load_from_registry("minmax", "weight")


def test_names_are_folded():
    assert isinstance(make("Memoryless-MinMax"), MemorylessMinMaxObserver)
    assert isinstance(make("fouroversix", "weight", INT4), NVFP4ExpandedMSEObserver)


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


@pytest.mark.parametrize("base", ["weight", "input"])
def test_importance_that_cannot_be_used_is_told_once(base, warned):
    """An input is observed in every batch."""
    observer = make("imatrix_mse", base, INT4)
    for _ in range(3):
        observer(WEIGHT)
    assert len([line for line in warned if "All columns count the same" in line]) == 1


def test_a_scale_is_selected_by_its_error_alone():
    assert make("fouroversix", "weight", INT4, scale_selection="mse")(WEIGHT)[0].shape == (4, 2)
    with pytest.raises(InputError, match="scale_selection = 'abs_max'"):
        make("fouroversix", "weight", INT4, scale_selection="abs_max")


def test_options_come_from_the_arguments_and_the_arguments_stay_as_they_are():
    args = QuantizationArgs(observer="minmax", observer_kwargs={"averaging_constant": 0.5})
    before = args.model_dump()
    assert make("minmax", args=args).options.averaging_constant == 0.5
    assert make("minmax", args=args, averaging_constant=0.25).options.averaging_constant == 0.25
    assert args.model_dump() == before


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", OBSERVERS)
def test_values_that_are_not_finite_are_an_error_and_leave_no_trace(name, bad):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "preset",
    ["W4A16", "W4A16_ASYM", "FP8", "FP8_BLOCK", "NVFP4", "MXFP4"]
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


def test_scales_can_be_asked_for_in_the_dtype_of_the_module():
    observer = make("memoryless_minmax", "weight", INT4).observe(WEIGHT)
    assert observer.qparams(dtype=torch.bfloat16)[0].dtype is torch.bfloat16
    assert observer.qparams(dtype=torch.float8_e4m3fn)[0].dtype is torch.float16


def test_a_scale_neither_vanishes_nor_overflows_unseen_in_its_dtype():
    tiny = make("memoryless_minmax").observe(torch.full((1, 4), 1e-9))
    assert tiny.qparams(dtype=torch.float16)[0] > 0
    huge = make("memoryless_minmax").observe(torch.full((1, 4), 1e9))
    with pytest.raises(NonFiniteError, match="float16"):
        huge.qparams(dtype=torch.float16)


def test_weights_of_exotic_dtypes_are_observed():
    W = WEIGHT.to(torch.float8_e4m3fn)
    assert make("memoryless_minmax", "weight", INT4)(W)[0].dtype is torch.float16


def test_integers_are_observed_with_all_their_digits():
    args = QuantizationArgs(num_bits=8, strategy="tensor", observer="minmax")
    observer = make("minmax", "input", args)
    for greatest in (1, 127, 70000):
        observer(torch.tensor([[greatest, 1, 1]]))
    assert observer.max_vals.item() == pytest.approx(2.26 + 0.01 * (70000 - 2.26), rel=1e-6)
    assert observer.get_qparams()["scale"].dtype is torch.float32


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

    def test_ragged_groups_of_activations_are_refused(self):
        args = QuantizationArgs(num_bits=8, group_size=24)
        with pytest.raises(InputError, match="24"):
            make("static_minmax", args=args).observe(torch.ones(2, 32))

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

    def test_unknown_tensors_are_refused(self):
        with pytest.raises(InputError, match="Did you mean weight"):
            make("static_minmax", "weights").observe(WEIGHT)


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

    def test_other_strategies_have_none(self):
        assert make("static_minmax").observe(WEIGHT).global_scale() is None


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

    @pytest.mark.parametrize("name", OBSERVERS)
    def test_an_observer_that_saw_nothing_adds_nothing(self, name):
        seen, unseen = make(name).observe(WEIGHT), make(name)
        expected = seen.range()[1]
        assert torch.equal(seen.merge(unseen).range()[1], expected)
        assert torch.equal(unseen.merge(seen).range()[1], expected)
        assert make(name).merge(make(name)).observations == 0

    def test_different_observers_do_not_merge(self):
        with pytest.raises(InputError, match="same class"):
            make("minmax").merge(make("static_minmax"))


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


@pytest.mark.parametrize("name", ["minmax", "static_minmax", "histogram", "percentile"])
def test_a_step_counts_the_same_however_it_is_cut(name):
    """In one batch, in three, or on two processes: not so where each part is searched."""
    whole, cut, first, second = (make(name) for _ in range(4))
    for x in steps(3):
        whole.collect(x).commit()
        for rows in x.split(2):
            cut.collect(rows)
        cut.commit()
        seen = [first.collect(x[:2]).collected(), second.collect(x[2:]).collected()]
        first.commit(seen)
        second.commit(seen)
    for other in (cut, first, second):
        assert other.observations == 3
        assert all(map(torch.equal, whole.range(), other.range()))


def test_nothing_collected_is_no_observation():
    observer = make("minmax")
    assert observer.commit([None, None]).commit().observations == 0


@pytest.mark.parametrize("name", ["minmax", "mse", "histogram"])
def test_what_is_not_finite_is_not_taken(name):
    observer = make(name).observe(WEIGHT)
    before = observer.range()
    with pytest.raises(NonFiniteError):
        observer.collect(torch.tensor([[1.0, torch.inf]])).commit()
    assert observer.observations == 1
    assert all(map(torch.equal, before, observer.range()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COLLECTING)
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


@pytest.mark.parametrize("name", OBSERVERS)
def test_what_a_call_gives_leads_on_to_parameters_by_name(name):
    observer = make(name, "weight", INT4)
    observer.importance = torch.ones(32)
    found = observer(WEIGHT)
    scale, zero = found
    assert isinstance(found, tuple)
    by_name = found.get_qparams()
    assert torch.equal(by_name["scale"], scale)
    assert torch.equal(by_name["zero_point"], zero)
    assert by_name["global_scale"] is None


@pytest.mark.parametrize("name", OBSERVERS)
def test_the_range_goes_by_the_names_of_its_ends(name):
    observer = make(name, "weight", INT4)
    observer.importance = torch.ones(32)
    assert not observer.has_statistics
    assert not hasattr(observer, "min_vals")
    with pytest.raises(InputError, match="has not seen any value"):
        observer.get_statistics()
    minimum, maximum = observer.observe(WEIGHT).range()
    assert observer.has_statistics
    assert torch.equal(observer.min_vals, minimum)
    assert torch.equal(observer.max_vals, maximum)
    assert observer.get_statistics().keys() == {"min_vals", "max_vals"}
    assert observer.is_weight_obs
    observer.reset()
    assert not observer.has_statistics


def test_the_registry_tells_its_names_those_of_others_too():
    @Observer.register("told")
    class Told(MemorylessMinMaxObserver):
        pass

    names = Observer.registered_names()
    assert {"minmax", "memoryless_minmax", "told"} <= set(names)
    assert all(make(name) for name in names)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"strategy": "tensor"}, (1,)),
        ({"strategy": "channel"}, (1,)),
        ({"strategy": "group", "group_size": 16}, (2,)),
    ],
)
def test_a_weight_of_one_dimension_is_a_row(fields, shape):
    args = QuantizationArgs(num_bits=8, **fields)
    row = WEIGHT[0]
    scale, zero = make("minmax", "weight", args)(row)
    assert scale.shape == zero.shape == shape
    assert torch.equal(scale, make("minmax", "weight", args)(row[None])[0].reshape(shape))


def test_dimensions_that_do_not_do_are_refused():
    blocks = QuantizationArgs(num_bits=8, strategy="block", block_structure=[4, 4])
    with pytest.raises(InputError, match="cannot be cut into blocks"):
        make("minmax", "weight", blocks)(WEIGHT[0])
    with pytest.raises(InputError, match="batch, heads, tokens, head_dim"):
        make("minmax", "k")(WEIGHT[0])
    assert make("minmax")(torch.tensor(2.0))[0].shape == (1,)


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
