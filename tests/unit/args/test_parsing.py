# SPDX-License-Identifier: Apache-2.0
"""parse_arguments: every key finds its class or is an error; old names are understood."""

from __future__ import annotations

import pytest

from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    parse_args,
    parse_arguments,
)
from llmcompressor.args.parsing import OLD_NAMES, RENAMED
from llmcompressor.errors import ArgumentError

CLASSES = (ModelArguments, DatasetArguments, RecipeArguments)


def test_each_argument_reaches_its_class():
    model, dataset, recipe = parse_arguments(
        {"model": "m", "batch_size": 4, "recipe": "r.yaml", "seed": 3}, *CLASSES
    )
    assert (model.model, dataset.batch_size, dataset.seed, recipe.recipe) == ("m", 4, 3, "r.yaml")


def test_a_misspelt_argument_gets_the_nearest_of_all_classes():
    with pytest.raises(ArgumentError, match=r"'num_calibration_sample'.*num_calibration_samples"):
        parse_arguments({"model": "m", "num_calibration_sample": 3}, *CLASSES)
    with pytest.raises(ArgumentError, match="Did you mean recipe_args"):
        parse_arguments({"model": "m", "recipe_arg": []}, *CLASSES)


def test_a_name_far_from_all_is_an_error_without_a_long_list():
    with pytest.raises(ArgumentError) as caught:
        parse_arguments({"model": "m", "zzzzzz": 1}, *CLASSES)
    assert "Choose one of" not in str(caught.value)


def test_a_missing_model_is_named():
    with pytest.raises(ArgumentError, match="'model' is missing"):
        parse_arguments({}, *CLASSES)


def test_the_callers_dict_is_not_changed():
    given = {"model": "m", "tokenizer": "t", "oneshot_device": "cpu"}
    before = dict(given)
    parse_arguments(given, *CLASSES)
    assert given == before


def test_old_names_mean_their_new_ones():
    model, dataset, _ = parse_arguments(
        {
            "model": "m",
            "oneshot_device": "cuda:0",
            "max_calibration_samples": 7,
            "overwrite_output_dir": True,
            "trust_remote_code_data": True,
            "distill_teacher": "t",
            "cache_dir": "c",
            "use_auth_token": True,
            "calibrate_moe_context": False,
            "max_train_samples": 5,
        },
        *CLASSES,
    )
    assert (model.device, model.overwrite, model.distill_teacher) == ("cuda:0", True, "t")
    assert (model.cache_dir, model.use_auth_token) == ("c", True)
    assert (dataset.num_calibration_samples, dataset.max_train_samples) == (7, 5)
    assert dataset.moe_calibrate_all_experts is False


def test_an_old_name_and_its_new_one_together_are_an_error():
    with pytest.raises(ArgumentError, match="only 'device'"):
        parse_arguments({"model": "m", "oneshot_device": "cpu", "device": "cpu"}, *CLASSES)


def test_every_new_name_is_a_field():
    from llmcompressor.args import TrainingArguments

    classes = (*CLASSES, TrainingArguments)
    fields = {name for cls in classes for name in cls.__dataclass_fields__}
    assert {old.new for old in OLD_NAMES.values() if old.new} <= fields
    assert not fields & set(OLD_NAMES)


def test_old_names_of_transformers_mean_their_new_ones():
    from llmcompressor.args import TrainingArguments

    given = {"warmup_ratio": 0.25, "evaluation_strategy": "epoch", "no_cuda": True}
    [training] = parse_arguments(given, TrainingArguments)
    assert training.get_warmup_steps(8) == 2
    assert (training.eval_strategy, training.use_cpu) == ("epoch", True)


@pytest.mark.parametrize("old", RENAMED)
def test_a_name_that_transformers_changed_is_understood(old, warned):
    """The one that the installed release does not have means the other."""
    from llmcompressor.args import TrainingArguments

    new, value = RENAMED[old], {"use_reentrant": False} if old.endswith("kwargs") else True
    has_new = new in TrainingArguments.__dataclass_fields__
    for given in (old, new):
        warned.clear()
        [training] = parse_arguments({given: value}, TrainingArguments)
        assert getattr(training, new if has_new else old) == value
        told = [f"The argument {old!r} is now called {new!r}."] if has_new and given == old else []
        assert [line.strip() for line in warned] == told
    with pytest.raises(ArgumentError, match="both given"):
        parse_arguments({old: value, new: value}, TrainingArguments)
    with pytest.raises(ArgumentError, match="no argument named"):
        parse_arguments({"model": "m", old: value}, *CLASSES)


def test_training_arguments_extend_transformers(tmp_path):
    import transformers

    from llmcompressor.args import TrainingArguments

    dataset, training = parse_arguments(
        {"seed": 5, "learning_rate": 1e-3}, DatasetArguments, TrainingArguments
    )
    assert isinstance(training, transformers.TrainingArguments)
    assert (training.output_dir, training.do_oneshot, training.run_stages) == (
        "./output",
        False,
        False,
    )
    assert dataset.seed == training.seed == 5
    assert training.learning_rate == 1e-3
    assert not training.place_model_on_device


def test_the_arguments_of_a_script_come_by_what_they_are_about():
    model, data, recipe, output = parse_args(
        model="m", tokenizer="t", batch_size=2, recipe_args=["bits=4", "eq=a=b"], output_dir="o"
    )
    assert (model.model, model.processor, data.batch_size, output) == ("m", "t", 2, "o")
    assert recipe.recipe_args == {"bits": "4", "eq": "a=b"}
    assert parse_args(model="m")[3] is None
    assert parse_args(model="m", recipe_args={"bits": 4})[2].recipe_args == {"bits": 4}
