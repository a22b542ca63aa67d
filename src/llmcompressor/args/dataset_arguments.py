# SPDX-License-Identifier: Apache-2.0
"""Arguments for calibration and training data, and for running the model over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcompressor.args.checks import (
    CheckedFields,
    Named,
    Text,
    argument,
    boolean,
    integer,
    invalid_value,
    mapping,
    number,
    one_of,
    optional,
    path,
    size,
    string,
    strings,
)

STARVED: Mapping[str, str] = {name: name for name in ("all_tokens", "neighbours", "rtn", "error")}
PIPELINES: dict[str, str] = {
    "basic": "basic",
    "data_free": "datafree",
    "datafree": "datafree",
    "independent": "independent",
    "layer_sequential": "layer_sequential",
    "sequential": "sequential",
}
"""Pipelines as they may be spelt → as they are stored; those of users are added."""

GRANULARITIES: Mapping[str, str] = {name: name for name in ("auto", "linear", "sub_block", "block")}
"""Where the sequential pipeline may pause a forward."""

COLLATORS: Mapping[str, str] = {"padding": "padding", "truncation": "truncation"}

TRACING_IGNORE = (
    "_update_causal_mask",
    "create_causal_mask",
    "_update_mamba_mask",
    "make_causal_mask",
    "get_causal_mask",
    "mask_interface",
    "mask_function",
    "_prepare_4d_causal_attention_mask",
    "_prepare_fsmt_decoder_inputs",
    "_prepare_4d_causal_attention_mask_with_cache_position",
    "_update_linear_attn_mask",
    "project_per_layer_inputs",
    "_apply_attn_res",
)
"""Accepted and reported back, without effect: nothing is traced here."""


def _dataset(name: str, value: Any) -> Any:
    """Check for a name, a path or data; not an empty string or a bare number."""
    if isinstance(value, (str, os.PathLike)):
        return path(name, value)
    if isinstance(value, (bool, int, float)):
        raise invalid_value(name, value, "a name, a path, or data (a Dataset, DataLoader or list)")
    return value


def _splits(name: str, value: Any) -> str | list[str] | dict[str, str]:
    """Check for one split, several, or one by role; stored as a new list or dict."""
    if isinstance(value, str):
        return string(name, value)
    if isinstance(value, Mapping):
        if not value or not all(isinstance(split, str) for split in value.values()):
            raise invalid_value(
                name, value, "a split for each role, as in {'calibration': 'train[:5%]'}"
            )
        return dict(mapping(name, value))
    several = strings(name, value)
    if not several:
        raise invalid_value(name, value, "at least one split, for instance 'train[:5%]'")
    return several


def _collator(name: str, value: Any) -> str | Callable[..., Any]:
    """Check for the name of a collator, or a function from samples to a batch."""
    if callable(value):
        collator: Callable[..., Any] = value
        return collator
    return str(one_of(COLLATORS)(name, value))


def _function(name: str, value: Any) -> str | Callable[..., Any]:
    """Check for a function, or the place of one: ``"path/file.py:function"``."""
    if callable(value):
        function: Callable[..., Any] = value
        return function
    if not isinstance(value, str) or ".py:" not in value:
        raise invalid_value(name, value, "a function, or 'path/file.py:function'")
    return value


@dataclass
class DatasetArguments(CheckedFields):
    """The calibration or training data, and the settings for running the model over it."""

    dataset: Named = argument(
        "The data: default (a mix), another name, one on the hub, a path, or the data itself.",
        optional(_dataset),
    )
    dataset_config_name: str | None = argument(
        "The data set's configuration on the hub.", optional(string)
    )
    dataset_path: str | None = argument(
        "A file (json, jsonl, csv, parquet, txt) or a folder of them.", optional(path)
    )
    splits: Text | str | list[str] | dict[str, str] | None = argument(
        "The split to use, for instance train[:512].", optional(_splits)
    )
    batch_size: int = argument("Samples in a batch.", integer(1), default=1)
    data_collator: Text | str | Callable[..., Any] = argument(
        "How samples become a batch: truncation (cut to the shortest), padding, or a function.",
        _collator,
        default="truncation",
    )
    num_calibration_samples: int | None = argument(
        "Samples to calibrate with; None for all.", optional(integer(1)), default=512
    )
    shuffle_calibration_samples: bool = argument(
        "Choose samples at random; False takes the first.",
        boolean,
        off="Take the first samples, instead of choosing at random.",
        default=True,
    )
    max_seq_length: int | None = argument(
        "Tokens of a sample at most; None for what the model takes.", optional(integer(1))
    )
    pad_to_max_length: bool = argument(
        "Pad every sample to max_seq_length.", boolean, default=False
    )
    text_column: str = argument("The column that holds the text.", string, default="text")
    concatenate_data: bool = argument(
        "Join the samples and cut them into pieces of max_seq_length.", boolean, default=False
    )
    streaming: bool = argument(
        "Read the data set without downloading all of it.", boolean, default=False
    )
    overwrite_cache: bool = argument(
        "No effect: prepared data is not cached.", boolean, default=False
    )
    preprocessing_num_workers: int | None = argument(
        "No effect on the result; only what is selected is ever prepared.", optional(integer(0))
    )
    dataloader_num_workers: int = argument("Processes that make batches.", integer(0), default=0)
    min_tokens_per_module: float | None = argument(
        "Warn of modules that see less than this share (0 to 1) of the calibration "
        "tokens; an expert that does is starved.",
        optional(number(0, 1)),
    )
    moe_calibrate_all_experts: bool = argument(
        "Make the statistics of every expert of all tokens of its layer.",
        boolean,
        off="Make the statistics of an expert of the tokens that are routed to it.",
        default=True,
    )
    starved_experts: str = argument(
        "What the statistics of an expert are made of that too few tokens are routed "
        "to: all_tokens, neighbours, rtn or error.",
        one_of(STARVED),
        default="all_tokens",
    )
    pipeline: str | None = argument(
        "Who runs what when: independent, sequential, layer_sequential, basic or "
        "datafree; None chooses.",
        optional(one_of(PIPELINES)),
        default="independent",
    )
    tracing_ignore: list[str] = argument(
        "No effect: nothing is traced.", strings, factory=lambda: list(TRACING_IGNORE)
    )
    sequential_targets: list[str] | None = argument(
        "The blocks to calibrate one after another; not given: the decoder layers.",
        optional(strings),
    )
    sequential_granularity: str = argument(
        "Where a forward is paused: linear, sub_block, block; auto: the finest that fits.",
        one_of(GRANULARITIES),
        default="auto",
    )
    activation_budget: int | str | None = argument(
        "Memory for activations, in bytes or as 8GiB; what exceeds it goes to files. "
        "Not given: half of what is free.",
        optional(size),
    )
    sequential_offload_device: str = argument(
        "No effect: activations wait where activation_budget has room.", string, default="cpu"
    )
    quantization_aware_calibration: bool = argument(
        "No effect.", boolean, off="No effect.", default=True
    )
    sequential_prefetch: bool = argument("No effect.", boolean, default=False)
    preprocessing_func: Text | str | Callable[..., Any] | None = argument(
        "A function from a row to a row, or path/file.py:function.", optional(_function)
    )
    remove_columns: list[str] | None = argument(
        "Columns to drop; what the processor cannot take is dropped anyway.", optional(strings)
    )
    raw_kwargs: dict[str, Any] = argument(
        "Further arguments for loading the data set.", mapping, factory=dict
    )
    dvc_data_repository: str | None = argument(
        "The DVC repository that a dvc:// dataset_path is in.", optional(path)
    )
    sequential_targets_per_subgraph: int = argument(
        "No effect: blocks are calibrated one by one.", integer(1), default=1
    )
    propagate_error: bool = argument(
        "Calibrate each block on the outputs of the compressed ones before it.",
        boolean,
        off="Calibrate each block on the outputs of the original ones before it.",
        default=True,
    )
    use_loss_mask: bool = argument(
        "Count only tokens whose loss_mask is 1.", boolean, default=False
    )
    max_train_samples: int | None = argument(
        "Samples to train on, from the first; not given: all.", optional(integer(1))
    )
    seed: int = argument(
        "Decides the order of the data and everything random.", integer(0, 2**63 - 1), default=0
    )
