# SPDX-License-Identifier: Apache-2.0
"""Arguments for calibration and training data, and for running the model over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcompressor.args.checks import (
    CheckedFields,
    Named,
    Text,
    boolean,
    field_metadata,
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

__all__ = ["COLLATORS", "PIPELINES", "TRACING_IGNORE", "DatasetArguments"]

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

    dataset: Named = field(
        default=None,
        metadata=field_metadata(
            "The data: a registered name, a name on the hub, a path, or the data itself.",
            optional(_dataset),
        ),
    )
    dataset_config_name: str | None = field(
        default=None,
        metadata=field_metadata("The data set's configuration on the hub.", optional(string)),
    )
    dataset_path: str | None = field(
        default=None,
        metadata=field_metadata(
            "A file (json, jsonl, csv, parquet, txt) or a folder of them.", optional(path)
        ),
    )
    splits: Text | str | list[str] | dict[str, str] | None = field(
        default=None,
        metadata=field_metadata("The split to use, for instance train[:512].", optional(_splits)),
    )
    batch_size: int = field(default=1, metadata=field_metadata("Samples in a batch.", integer(1)))
    data_collator: Text | str | Callable[..., Any] = field(
        default="truncation",
        metadata=field_metadata(
            "How samples become a batch: truncation (cut to the shortest), padding, or a function.",
            _collator,
        ),
    )
    num_calibration_samples: int | None = field(
        default=512,
        metadata=field_metadata("Samples to calibrate with; None for all.", optional(integer(1))),
    )
    shuffle_calibration_samples: bool = field(
        default=True,
        metadata=field_metadata(
            "Choose samples at random; False takes the first.",
            boolean,
            off="Take the first samples, instead of choosing at random.",
        ),
    )
    max_seq_length: int | None = field(
        default=None,
        metadata=field_metadata(
            "Tokens of a sample at most; None for what the model takes.", optional(integer(1))
        ),
    )
    pad_to_max_length: bool = field(
        default=False, metadata=field_metadata("Pad every sample to max_seq_length.", boolean)
    )
    text_column: str = field(
        default="text", metadata=field_metadata("The column that holds the text.", string)
    )
    concatenate_data: bool = field(
        default=False,
        metadata=field_metadata(
            "Join the samples and cut them into pieces of max_seq_length.", boolean
        ),
    )
    streaming: bool = field(
        default=False,
        metadata=field_metadata("Read the data set without downloading all of it.", boolean),
    )
    overwrite_cache: bool = field(
        default=False, metadata=field_metadata("No effect: prepared data is not cached.", boolean)
    )
    preprocessing_num_workers: int | None = field(
        default=None,
        metadata=field_metadata(
            "No effect on the result; only what is selected is ever prepared.", optional(integer(0))
        ),
    )
    dataloader_num_workers: int = field(
        default=0, metadata=field_metadata("Processes that make batches.", integer(0))
    )
    min_tokens_per_module: float | None = field(
        default=None,
        metadata=field_metadata(
            "Warn of modules that see less than this share (0 to 1) of the calibration tokens; an "
            "expert that does is starved.",
            optional(number(0, 1)),
        ),
    )
    moe_calibrate_all_experts: bool = field(
        default=True,
        metadata=field_metadata(
            "Make the statistics of every expert of all tokens of its layer.",
            boolean,
            off="Make the statistics of an expert of the tokens that are routed to it.",
        ),
    )
    starved_experts: str = field(
        default="all_tokens",
        metadata=field_metadata(
            "What the statistics of an expert are made of that too few tokens are routed to: "
            "all_tokens, neighbours, rtn or error.",
            one_of(STARVED),
        ),
    )
    pipeline: str | None = field(
        default="independent",
        metadata=field_metadata(
            "Who runs what when: independent, sequential, layer_sequential, basic or "
            "datafree; None chooses.",
            optional(one_of(PIPELINES)),
        ),
    )
    tracing_ignore: list[str] = field(
        default_factory=lambda: list(TRACING_IGNORE),
        metadata=field_metadata("No effect: nothing is traced.", strings),
    )
    sequential_targets: list[str] | None = field(
        default=None,
        metadata=field_metadata(
            "The blocks to calibrate one after another; not given: the decoder layers.",
            optional(strings),
        ),
    )
    sequential_granularity: str = field(
        default="auto",
        metadata=field_metadata(
            "Where a forward is paused: linear, sub_block, block; auto: the finest that fits.",
            one_of(GRANULARITIES),
        ),
    )
    activation_budget: int | str | None = field(
        default=None,
        metadata=field_metadata(
            "Memory for activations, in bytes or as 8GiB; what exceeds it goes to files. Not "
            "given: half of what is free.",
            optional(size),
        ),
    )
    sequential_offload_device: str = field(
        default="cpu",
        metadata=field_metadata(
            "No effect: activations wait where activation_budget has room.", string
        ),
    )
    quantization_aware_calibration: bool = field(
        default=True, metadata=field_metadata("No effect.", boolean, off="No effect.")
    )
    sequential_prefetch: bool = field(default=False, metadata=field_metadata("No effect.", boolean))
    preprocessing_func: Text | str | Callable[..., Any] | None = field(
        default=None,
        metadata=field_metadata(
            "A function from a row to a row, or path/file.py:function.", optional(_function)
        ),
    )
    remove_columns: list[str] | None = field(
        default=None,
        metadata=field_metadata(
            "Columns to drop; what the processor cannot take is dropped anyway.", optional(strings)
        ),
    )
    raw_kwargs: dict[str, Any] = field(
        default_factory=dict,
        metadata=field_metadata("Further arguments for loading the data set.", mapping),
    )
    dvc_data_repository: str | None = field(
        default=None,
        metadata=field_metadata(
            "The DVC repository that a dvc:// dataset_path is in.", optional(path)
        ),
    )
    sequential_targets_per_subgraph: int = field(
        default=1,
        metadata=field_metadata("No effect: blocks are calibrated one by one.", integer(1)),
    )
    propagate_error: bool = field(
        default=True,
        metadata=field_metadata(
            "Calibrate each block on the outputs of the compressed ones before it.",
            boolean,
            off="Calibrate each block on the outputs of the original ones before it.",
        ),
    )
    use_loss_mask: bool = field(
        default=False,
        metadata=field_metadata("Count only tokens whose loss_mask is 1.", boolean),
    )
    max_train_samples: int | None = field(
        default=None,
        metadata=field_metadata(
            "Samples to train on, from the first; not given: all.", optional(integer(1))
        ),
    )
    seed: int = field(
        default=0,
        metadata=field_metadata(
            "Decides the order of the data and everything random.", integer(0, 2**63 - 1)
        ),
    )
