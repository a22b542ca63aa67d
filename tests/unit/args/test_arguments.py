# SPDX-License-Identifier: Apache-2.0
"""Argument dataclasses: defaults, bounds, and that the user's objects stay the user's."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    RunArguments,
)
from llmcompressor.errors import ArgumentError

DEFAULTS = {
    ModelArguments: {
        "config_name": None,
        "tokenizer": None,
        "processor": None,
        "precision": "auto",
        "tie_word_embeddings": True,
        "trust_remote_code_model": False,
        "save_compressed": True,
        "model_revision": "main",
        "overwrite": False,
    },
    RecipeArguments: {
        "recipe": None,
        "recipe_args": None,
        "clear_sparse_session": False,
        "stage": None,
    },
    DatasetArguments: {
        "dataset": None,
        "dataset_config_name": None,
        "dataset_path": None,
        "splits": None,
        "batch_size": 1,
        "data_collator": "truncation",
        "num_calibration_samples": 512,
        "shuffle_calibration_samples": True,
        "max_seq_length": None,
        "pad_to_max_length": False,
        "text_column": "text",
        "concatenate_data": False,
        "streaming": False,
        "overwrite_cache": False,
        "preprocessing_num_workers": None,
        "dataloader_num_workers": 0,
        "min_tokens_per_module": None,
        "moe_calibrate_all_experts": True,
        "starved_experts": "all_tokens",
        "pipeline": "independent",
        "sequential_targets": None,
        "sequential_granularity": "auto",
        "activation_budget": None,
        "sequential_offload_device": "cpu",
        "quantization_aware_calibration": True,
        "sequential_prefetch": False,
        "preprocessing_func": None,
        "remove_columns": None,
        "raw_kwargs": {},
        "dvc_data_repository": None,
        "sequential_targets_per_subgraph": 1,
        "propagate_error": True,
        "use_loss_mask": False,
        "seed": 0,
    },
}


@pytest.mark.parametrize("cls", DEFAULTS)
def test_defaults_are_those_that_users_know(cls):
    made = cls(model="m") if cls is ModelArguments else cls()
    for name, default in DEFAULTS[cls].items():
        assert getattr(made, name) == default, name


@pytest.mark.parametrize("cls", DEFAULTS)
def test_every_field_has_help_and_a_check(cls):
    for field in dataclasses.fields(cls):
        assert field.metadata["help"].endswith("."), field.name
        assert callable(field.metadata["help"].check), field.name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_calibration_samples", 0),
        ("num_calibration_samples", 2.5),
        ("num_calibration_samples", True),
        ("batch_size", 0),
        ("max_seq_length", 0),
        ("max_seq_length", "512"),
        ("seed", -1),
        ("streaming", "yes"),
        ("shuffle_calibration_samples", 1),
        ("data_collator", "truncate"),
        ("pipeline", "sequental"),
        ("splits", {}),
        ("splits", {"calibration": 3}),
        ("preprocessing_func", "no_such_form"),
        ("sequential_targets", [3]),
        ("sequential_granularity", "layer"),
        *(("activation_budget", value) for value in (0, -1, 1.5, True, [], "", "much", "8 GiB x")),
        *(("activation_budget", value) for value in ("1e-3", "1.2345e3", "e9", float("nan"))),
        ("min_tokens_per_module", float("nan")),
        ("raw_kwargs", []),
        ("dataset", 7),
        ("dataset", ""),
    ],
)
def test_values_out_of_bounds_name_the_argument(name, value):
    with pytest.raises(ArgumentError, match=name):
        DatasetArguments(**{name: value})


def test_a_misspelt_pipeline_gets_a_suggestion():
    with pytest.raises(ArgumentError, match="Did you mean sequential"):
        DatasetArguments(pipeline="sequental")


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (1, 1),
        (np.int64(7), 7),
        ("12345", 12345),
        ("500MB", 500 * 1000**2),
        ("8GiB", 8 * 1024**3),
        (" 1.5KiB ", 1536),
        ("1e9", 10**9),
        (2e9, 2 * 10**9),
    ],
)
def test_a_budget_is_stored_in_bytes(given, stored):
    budget = DatasetArguments(activation_budget=given).activation_budget
    assert budget == stored
    assert type(budget) is int


def test_a_budget_that_is_no_size_gets_an_example():
    with pytest.raises(ArgumentError, match=r"activation_budget.*'much'.*8GiB"):
        DatasetArguments(activation_budget="much")


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("1e9", {"cpu": 10**9}),
        ("0=1GB,cpu=2GB", {0: 10**9, "cpu": 2 * 10**9}),
        ({"cuda:1": "1GB", "host": 2e9}, {1: 10**9, "cpu": 2 * 10**9}),
    ],
)
def test_limits_are_stored_by_device(given, stored):
    assert RunArguments(max_memory=given).max_memory == stored


@pytest.mark.parametrize(
    "given", ["cpu=4GiB,cpu=1GiB", "cpu=4GiB,host=4GiB", "0=1GiB,cuda:0=2GiB", {0: 1, "0": 1}]
)
def test_a_device_has_one_limit(given):
    with pytest.raises(ArgumentError, match=r"max_memory.*one size for (the host|device 0)"):
        RunArguments(max_memory=given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("cpu=1GiB,1=much", r"max_memory\['1'\].*'much'"),
        ({"cpu": "1GiB", 3: -1}, r"max_memory\[3\].*-1"),
        ("much", "'max_memory' cannot be 'much'"),
    ],
)
def test_a_wrong_limit_is_named_by_its_device(given, named):
    with pytest.raises(ArgumentError, match=named):
        RunArguments(max_memory=given)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("auto", "auto"),
        ("half", "float16"),
        ("torch.float16", "float16"),
        ("bfloat16", "bfloat16"),
        (torch.bfloat16, "bfloat16"),
        ("full", "float32"),
        (torch.float32, "float32"),
    ],
)
def test_a_precision_has_one_stored_name(given, stored):
    assert ModelArguments(model="m", precision=given).precision == stored


def test_the_tokenizer_is_moved_to_the_processor():
    tokenizer = object()
    arguments = ModelArguments(model="m", tokenizer=tokenizer)
    assert arguments.processor is tokenizer
    assert arguments.tokenizer is None


def test_tokenizer_and_processor_together_are_an_error():
    with pytest.raises(ArgumentError, match="only one"):
        ModelArguments(model="m", tokenizer="a", processor="b")


def test_the_users_lists_and_dicts_are_copied():
    raw, splits, recipe_args = {"field": "data"}, ["train"], {"k": 1}
    arguments = DatasetArguments(raw_kwargs=raw, splits=splits)
    recipe = RecipeArguments(recipe_args=recipe_args)
    raw["more"], recipe_args["k"] = 1, 2
    splits.append("test")
    assert arguments.raw_kwargs == {"field": "data"}
    assert arguments.splits == ["train"]
    assert recipe.recipe_args == {"k": 1}


def test_what_is_set_later_is_checked_as_what_is_given():
    arguments = copy.deepcopy(DatasetArguments(dataset="mine"))
    arguments.dataset, arguments.pipeline = "json", "data-free"
    assert (arguments.dataset, arguments.pipeline) == ("json", "datafree")
    with pytest.raises(ArgumentError, match="'seed' cannot be -1"):
        arguments.seed = -1
    assert arguments.seed == 0


def test_a_class_of_the_users_adds_fields():
    @dataclasses.dataclass
    class Mine(DatasetArguments):
        language: str = dataclasses.field(default="en", metadata={"help": "Of the text."})

    arguments = Mine(language="de", batch_size=2)
    arguments.language, arguments._seen = "fr", 3
    assert (arguments.language, arguments.batch_size) == ("fr", 2)


@pytest.mark.parametrize("cls", [ModelArguments, DatasetArguments, RecipeArguments, RunArguments])
def test_the_parser_of_transformers_reads_each_class(cls):
    given = ["--model", "m"] if cls is ModelArguments else []
    parser = transformers.HfArgumentParser(cls)
    assert parser.parse_args_into_dataclasses(given) == (cls(*given[1:]),)
    assert "--" + dataclasses.fields(cls)[0].name in parser.format_help()


def test_a_command_line_parsed_by_transformers_is_stored_alike():
    parser = transformers.HfArgumentParser(
        (ModelArguments, DatasetArguments, RecipeArguments, RunArguments)
    )
    typed = (
        "--model org/m --tokenizer t --use_auth_token true --no-save-compressed --dataset d "
        "--splits train --data_collator padding --preprocessing_func f.py:g --activation_budget "
        "8GiB --sequential_targets A B --recipe r.yaml --recipe_args a=1 b=2 --max_memory 1GB"
    )
    model, data, recipe, run = parser.parse_args_into_dataclasses(typed.split())
    assert (model.model, model.processor, model.tokenizer) == ("org/m", "t", None)
    assert (model.use_auth_token, model.save_compressed) == (True, False)
    assert (data.dataset, data.splits, data.data_collator) == ("d", "train", "padding")
    assert (data.preprocessing_func, data.activation_budget) == ("f.py:g", 8 * 1024**3)
    assert data.sequential_targets == ["A", "B"]
    assert (recipe.recipe, recipe.recipe_args) == ("r.yaml", ["a=1", "b=2"])
    assert run.max_memory == {"cpu": 10**9}
    with pytest.raises(ArgumentError, match="batch_size"):
        parser.parse_args_into_dataclasses(["--model", "m", "--batch_size", "0"])


@pytest.mark.parametrize("value", ["k", ["k"], 3, [1]])
def test_recipe_args_are_pairs(value):
    with pytest.raises(ArgumentError, match="recipe_args"):
        RecipeArguments(recipe_args=value)


def test_importing_loads_neither_torch_nor_transformers():
    code = (
        "import sys, llmcompressor.args as a; a.ModelArguments(model='m'); a.DatasetArguments(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
