# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments of the entrypoints, as types that editors and type checkers read (PEP 692).

``oneshot(model, **arguments: Unpack[OneshotKeywords])``: the names and types are those of the
dataclasses of this package, which have the defaults, the bounds and the meaning of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    from accelerate.parallelism_config import ParallelismConfig
    from torch.nn import Module
    from torch.utils.data import Dataset
    from transformers.debug_utils import DebugOption
    from transformers.trainer_utils import (
        HubStrategy,
        IntervalStrategy,
        SaveStrategy,
        SchedulerType,
    )
    from transformers.training_args import OptimizerNames

ModelInput: TypeAlias = "str | os.PathLike[str] | Module"
"""A folder, the id of a model on the hub, or a loaded model."""

DataInput: TypeAlias = "str | os.PathLike[str] | Iterable[Any] | Dataset[Any] | None"
"""A registered name, a file or folder, a data set, a loader, or a list of texts or rows."""


class OneshotKeywords(TypedDict, total=False):
    """Arguments of ``oneshot`` and ``plan`` beside those in their signatures."""

    # ModelArguments
    config_name: str | os.PathLike[str] | None
    tokenizer: Any
    processor: Any
    precision: str
    tie_word_embeddings: bool
    trust_remote_code_model: bool
    save_compressed: bool
    model_revision: str
    overwrite: bool
    device: str | None
    cache_dir: str | os.PathLike[str] | None
    use_auth_token: str | bool
    distill_teacher: Any
    # RecipeArguments
    recipe_args: list[str] | str | dict[str, Any] | None
    clear_sparse_session: bool
    stage: str | None
    bits: float | None
    size: str | int | None
    max_kl: float | None
    candidates: list[str] | str | None
    # DatasetArguments
    dataset_config_name: str | None
    dataset_path: str | os.PathLike[str] | None
    splits: str | list[str] | dict[str, str] | None
    batch_size: int
    data_collator: str | Callable[..., Any]
    num_calibration_samples: int | None
    shuffle_calibration_samples: bool
    max_seq_length: int | None
    pad_to_max_length: bool
    text_column: str
    concatenate_data: bool
    streaming: bool
    overwrite_cache: bool
    preprocessing_num_workers: int | None
    dataloader_num_workers: int
    min_tokens_per_module: float | None
    moe_calibrate_all_experts: bool
    starved_experts: str
    pipeline: str | None
    tracing_ignore: list[str]
    sequential_targets: list[str] | None
    sequential_granularity: str
    activation_budget: int | str | None
    sequential_offload_device: str
    quantization_aware_calibration: bool
    sequential_prefetch: bool
    preprocessing_func: str | Callable[..., Any] | None
    remove_columns: list[str] | None
    raw_kwargs: dict[str, Any]
    dvc_data_repository: str | os.PathLike[str] | None
    sequential_targets_per_subgraph: int
    propagate_error: bool
    use_loss_mask: bool
    max_train_samples: int | None
    seed: int
    # RunArguments
    max_memory: Any
    resume: str
    verify: bool
    verify_with: str | None
    verify_python: str | None
    verify_timeout: float | None
    report: bool
    gates: list[str] | str | dict[str, Any] | None
    gate_dataset: Any
    gate_reference: Any
    keep_rejected: bool
    save_statistics: str | os.PathLike[str] | None
    statistics: str | os.PathLike[str] | None


class TrainKeywords(OneshotKeywords, total=False):
    """Arguments of ``train``: transformers' ``TrainingArguments`` as well."""

    # TrainingArguments
    per_device_train_batch_size: int
    num_train_epochs: float
    max_steps: int
    learning_rate: float
    lr_scheduler_type: SchedulerType | str
    lr_scheduler_kwargs: dict[str, Any] | str | None
    warmup_steps: float
    optim: OptimizerNames | str
    optim_args: str | None
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    optim_target_modules: str | list[str] | None
    gradient_accumulation_steps: int
    average_tokens_across_devices: bool
    max_grad_norm: float
    label_smoothing_factor: float
    bf16: bool
    fp16: bool
    bf16_full_eval: bool
    fp16_full_eval: bool
    tf32: bool | None
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: dict[str, Any] | str | None
    torch_compile: bool
    torch_compile_backend: str | None
    torch_compile_mode: str | None
    use_liger_kernel: bool
    liger_kernel_config: dict[str, bool] | None
    use_cache: bool
    neftune_noise_alpha: float | None
    torch_empty_cache_steps: int | None
    auto_find_batch_size: bool
    logging_strategy: IntervalStrategy | str
    logging_steps: float
    logging_first_step: bool
    log_on_each_node: bool
    logging_nan_inf_filter: bool
    include_num_input_tokens_seen: str | bool
    log_level: str
    log_level_replica: str
    disable_tqdm: bool | None
    report_to: str | list[str] | None
    run_name: str | None
    project: str
    trackio_space_id: str | None
    trackio_bucket_id: str | None
    trackio_static_space_id: str | Literal[False] | None
    eval_strategy: IntervalStrategy | str
    eval_steps: float | None
    eval_delay: float
    per_device_eval_batch_size: int
    prediction_loss_only: bool
    eval_on_start: bool
    eval_do_concat_batches: bool
    eval_use_gather_object: bool
    eval_accumulation_steps: int | None
    include_for_metrics: list[str]
    batch_eval_metrics: bool
    save_only_model: bool
    save_strategy: SaveStrategy | str
    save_steps: float
    save_on_each_node: bool
    save_total_limit: int | None
    enable_jit_checkpoint: bool
    push_to_hub: bool
    hub_token: str | None
    hub_private_repo: bool | None
    hub_model_id: str | None
    hub_strategy: HubStrategy | str
    hub_always_push: bool
    hub_revision: str | None
    load_best_model_at_end: bool
    metric_for_best_model: str | None
    greater_is_better: bool | None
    ignore_data_skip: bool
    restore_callback_states_from_checkpoint: bool
    full_determinism: bool
    data_seed: int | None
    use_cpu: bool
    accelerator_config: dict[str, Any] | str | None
    parallelism_config: ParallelismConfig | None
    dataloader_drop_last: bool
    dataloader_pin_memory: bool
    dataloader_persistent_workers: bool
    dataloader_prefetch_factor: int | None
    dataloader_multiprocessing_context: str | None
    dataloader_in_order: bool
    remove_unused_columns: bool
    label_names: list[str] | None
    train_sampling_strategy: str
    length_column_name: str
    ddp_find_unused_parameters: bool | None
    ddp_bucket_cap_mb: int | None
    ddp_broadcast_buffers: bool | None
    ddp_static_graph: bool | None
    ddp_backend: str | None
    ddp_timeout: int
    fsdp: str | None
    fsdp_config: dict[str, Any] | str | None
    deepspeed: dict[str, Any] | str | None
    debug: str | list[DebugOption]
    skip_memory_metrics: bool
    do_train: bool
    do_eval: bool
    do_predict: bool
    resume_from_checkpoint: str | os.PathLike[str] | None
    local_rank: int
    do_oneshot: bool
    run_stages: bool


class StageKeywords(TrainKeywords, total=False):
    """Arguments of ``run_stages``: those in the signatures of ``oneshot`` and ``train`` too."""

    log_dir: str | os.PathLike[str] | None
    loggers: Any
