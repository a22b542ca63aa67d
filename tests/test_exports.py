# SPDX-License-Identifier: Apache-2.0
"""The public surface: every name that users import, from every path they import it from."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
import transformers

import llmcompressor

# Path → names. A name leaves this table only with a line in the changelog.
PUBLIC = {
    "llmcompressor": [
        "LoggerConfig",
        "Oneshot",
        "active_session",
        "callbacks",
        "compare",
        "configure_logger",
        "create_session",
        "evaluate",
        "finalize",
        "initialize",
        "logger",
        "model_free_ptq",
        "oneshot",
        "plan",
        "report",
        "reproduce",
        "reset_session",
        "run_stages",
        "train",
        "verify",
        "version",
    ],
    "llmcompressor.args": [
        "DataTrainingArguments",
        "DatasetArguments",
        "ModelArguments",
        "RecipeArguments",
        "TrainingArguments",
        "parse_args",
    ],
    "llmcompressor.core": [
        "CompressionLifecycle",
        "CompressionSession",
        "Data",
        "Event",
        "EventType",
        "Hardware",
        "LifecycleCallbacks",
        "ModelParameterizedLayer",
        "ModifiedState",
        "State",
        "active_session",
        "callbacks",
        "create_session",
        "finalize",
        "initialize",
        "reset_session",
    ],
    "llmcompressor.core.events": ["Event", "EventType"],
    "llmcompressor.core.events.event": ["Event", "EventType"],
    "llmcompressor.core.lifecycle": ["CompressionLifecycle"],
    "llmcompressor.core.model_layer": ["ModelParameterizedLayer"],
    "llmcompressor.core.session": ["CompressionSession"],
    "llmcompressor.core.session_functions": [
        "LifecycleCallbacks",
        "active_session",
        "callbacks",
        "create_session",
        "finalize",
        "initialize",
        "reset_session",
    ],
    "llmcompressor.core.state": ["Data", "Hardware", "ModifiedState", "State"],
    "llmcompressor.datasets": [
        "TextGenerationDataset",
        "format_calibration_data",
        "get_calibration_dataloader",
        "get_processed_dataset",
        "get_rank_partition",
    ],
    "llmcompressor.datasets.utils": [
        "DataCollatorWithTruncation",
        "LengthAwareSampler",
        "format_calibration_data",
        "get_calibration_dataloader",
        "get_processed_dataset",
        "get_rank_partition",
    ],
    "llmcompressor.entrypoints": ["Oneshot", "model_free_ptq", "oneshot", "train"],
    "llmcompressor.metrics": [
        "BaseLogger",
        "LambdaLogger",
        "LoggerManager",
        "PythonLogger",
        "SparsificationGroupLogger",
        "TensorBoardLogger",
        "WANDBLogger",
    ],
    "llmcompressor.modeling": [
        "center_embeddings",
        "fuse_norm_linears",
        "moe_calibration_context",
        "patch_moe_mappings",
        "prepare_for_calibration",
        "replace_modules_for_calibration",
    ],
    "llmcompressor.modeling.deepseek_v3": ["CalibrationDeepseekV3MoE"],
    "llmcompressor.modeling.glm4_moe": ["CalibrationGlm4MoeMoE"],
    "llmcompressor.modeling.glm_moe_dsa": ["CalibrationGlmMoeDsaMoE"],
    "llmcompressor.modeling.gpt_oss": ["convert_model_for_quantization_gptoss"],
    "llmcompressor.modeling.llama4": ["SequentialLlama4TextMoe"],
    "llmcompressor.modeling.minimax_m2": ["CalibrationMiniMaxM2SparseMoeBlock"],
    "llmcompressor.modeling.moe.context": ["moe_calibration_context"],
    "llmcompressor.modeling.moe.conversion_mappings": ["patch_moe_mappings"],
    "llmcompressor.modeling.moe.linearize": ["linearize_moe", "load_quantizable_moe"],
    "llmcompressor.modeling.moe_context": ["MoECalibrationModule", "moe_calibration_context"],
    "llmcompressor.modeling.patch.qwen3_omni_patch": ["fast_pos_embed_interpolate"],
    "llmcompressor.modeling.prepare": [
        "moe_calibration_context",
        "replace_modules_for_calibration",
    ],
    "llmcompressor.modeling.qwen3_5_moe": ["CalibrationQwen3_5MoeSparseMoeBlock"],
    "llmcompressor.modeling.qwen3_moe": ["CalibrationQwen3MoeSparseMoeBlock"],
    "llmcompressor.modifiers": [
        "Modifier",
        "ModifierFactory",
        "ModifierInterface",
        "StageModifiers",
    ],
    "llmcompressor.modifiers.autoround": ["AutoRoundModifier", "fix_batch_if_needed"],
    "llmcompressor.modifiers.awq": ["AWQMapping", "AWQModifier", "AWQ_MAPPING_REGISTRY"],
    "llmcompressor.modifiers.awq.dynamic_mappings": [
        "AWQMapping",
        "AWQ_MAPPING_REGISTRY",
        "default_mappings",
        "get_layer_mappings_from_model",
    ],
    "llmcompressor.modifiers.awq.mappings": [
        "AWQMapping",
        "AWQ_MAPPING_REGISTRY",
        "default_mappings",
        "get_layer_mappings_from_architecture",
    ],
    "llmcompressor.modifiers.distillation": ["OutputDistillationModifier"],
    "llmcompressor.modifiers.distillation.output": ["OutputDistillationModifier"],
    "llmcompressor.modifiers.gptq": ["GPTQModifier"],
    "llmcompressor.modifiers.hqq": ["HQQModifier"],
    "llmcompressor.modifiers.interface": ["ModifierInterface"],
    "llmcompressor.modifiers.logarithmic_equalization": ["LogarithmicEqualizationModifier"],
    "llmcompressor.modifiers.logarithmic_equalization.base": ["LogarithmicEqualizationModifier"],
    "llmcompressor.modifiers.modifier": ["Modifier"],
    "llmcompressor.modifiers.obcq": ["SparseGPTModifier"],
    "llmcompressor.modifiers.obcq.base": ["SparseGPTModifier"],
    "llmcompressor.modifiers.obcq.sgpt_base": ["SparseGPTModifier"],
    "llmcompressor.modifiers.pruning": [
        "ConstantPruningModifier",
        "GradualPruningModifier",
        "MagnitudePruningModifier",
        "REAPPruningModifier",
        "SparseGPTModifier",
        "WandaPruningModifier",
    ],
    "llmcompressor.modifiers.pruning.constant": ["ConstantPruningModifier"],
    "llmcompressor.modifiers.pruning.constant.base": ["ConstantPruningModifier"],
    "llmcompressor.modifiers.pruning.magnitude": ["MagnitudePruningModifier"],
    "llmcompressor.modifiers.pruning.magnitude.base": ["MagnitudePruningModifier"],
    "llmcompressor.modifiers.pruning.reap": ["REAPPruningModifier"],
    "llmcompressor.modifiers.pruning.reap.base": ["REAPPruningModifier"],
    "llmcompressor.modifiers.pruning.sparsegpt": ["SparseGPTModifier"],
    "llmcompressor.modifiers.pruning.sparsegpt.base": ["SparseGPTModifier"],
    "llmcompressor.modifiers.pruning.wanda": ["WandaPruningModifier"],
    "llmcompressor.modifiers.pruning.wanda.base": ["WandaPruningModifier"],
    "llmcompressor.modifiers.quantization": [
        "GPTQModifier",
        "QuantizationMixin",
        "QuantizationModifier",
    ],
    "llmcompressor.modifiers.quantization.gptq": ["GPTQModifier"],
    "llmcompressor.modifiers.quantization.gptq.base": ["GPTQModifier"],
    "llmcompressor.modifiers.quantization.quantization": [
        "QuantizationMixin",
        "QuantizationModifier",
    ],
    "llmcompressor.modifiers.quantization.quantization.base": ["QuantizationModifier"],
    "llmcompressor.modifiers.quantization.quantization.mixin": ["QuantizationMixin"],
    "llmcompressor.modifiers.reap": ["REAPPruningModifier"],
    "llmcompressor.modifiers.rotation": [
        "NormMapping",
        "QuIPModifier",
        "SpinQuantMapping",
        "SpinQuantModifier",
    ],
    "llmcompressor.modifiers.scale_tuning": ["ScaleTuningModifier"],
    "llmcompressor.modifiers.smoothquant": [
        "LogarithmicEqualizationModifier",
        "SmoothQuantMapping",
        "SmoothQuantModifier",
    ],
    "llmcompressor.modifiers.smoothquant.utils": [
        "DEFAULT_SMOOTHQUANT_MAPPINGS",
        "LayerMap",
        "MAPPINGS_REGISTRY",
        "get_layer_mappings_from_architecture",
    ],
    "llmcompressor.modifiers.sparsity": ["SparseGPTModifier", "WandaPruningModifier"],
    "llmcompressor.modifiers.transform": [
        "AWQMapping",
        "AWQModifier",
        "IMatrixGatherer",
        "QuIPModifier",
        "SmoothQuantMapping",
        "SmoothQuantModifier",
        "SpinQuantModifier",
    ],
    "llmcompressor.modifiers.transform.awq": ["AWQMapping", "AWQModifier", "AWQ_MAPPING_REGISTRY"],
    "llmcompressor.modifiers.transform.awq.base": ["AWQMapping", "AWQModifier"],
    "llmcompressor.modifiers.transform.awq.dynamic_mappings": [
        "AWQMapping",
        "AWQ_MAPPING_REGISTRY",
        "default_mappings",
        "get_layer_mappings_from_model",
    ],
    "llmcompressor.modifiers.transform.awq.mappings": [
        "AWQMapping",
        "AWQ_MAPPING_REGISTRY",
        "default_mappings",
        "get_layer_mappings_from_architecture",
    ],
    "llmcompressor.modifiers.transform.imatrix": ["IMatrixGatherer"],
    "llmcompressor.modifiers.transform.quip": ["QuIPModifier"],
    "llmcompressor.modifiers.transform.quip.base": ["QuIPModifier"],
    "llmcompressor.modifiers.transform.smoothquant": ["SmoothQuantMapping", "SmoothQuantModifier"],
    "llmcompressor.modifiers.transform.smoothquant.base": [
        "SmoothQuantMapping",
        "SmoothQuantModifier",
    ],
    "llmcompressor.modifiers.transform.smoothquant.dynamic_mappings": [
        "get_layer_mappings_from_model"
    ],
    "llmcompressor.modifiers.transform.smoothquant.utils": [
        "DEFAULT_SMOOTHQUANT_MAPPINGS",
        "LayerMap",
        "MAPPINGS_REGISTRY",
        "get_layer_mappings_from_architecture",
    ],
    "llmcompressor.modifiers.transform.spinquant": [
        "NormMapping",
        "SpinQuantMapping",
        "SpinQuantModifier",
    ],
    "llmcompressor.modifiers.transform.spinquant.base": ["SpinQuantModifier"],
    "llmcompressor.modifiers.transform.spinquant.mappings": [
        "SPINQUANT_MAPPING_REGISTRY",
        "SpinQuantMapping",
    ],
    "llmcompressor.modifiers.transform.spinquant.norm_mappings": [
        "NORM_MAPPING_REGISTRY",
        "NormMapping",
    ],
    "llmcompressor.modifiers.utils.hooks": ["HooksMixin"],
    "llmcompressor.observers": ["MovingAverageMSEObserver", "Observer", "flatten_for_calibration"],
    "llmcompressor.observers.base": ["MinMaxTuple", "Observer", "QParamsDict"],
    "llmcompressor.observers.helpers": ["flatten_for_calibration"],
    "llmcompressor.pipelines": [
        "BasicPipeline",
        "CalibrationPipeline",
        "DataFreePipeline",
        "IndependentPipeline",
        "SequentialPipeline",
    ],
    "llmcompressor.pytorch.utils": [
        "ModuleSparsificationInfo",
        "tensor_sparsity",
        "tensors_to_device",
    ],
    "llmcompressor.pytorch.utils.helpers": ["tensor_sparsity", "tensors_to_device"],
    "llmcompressor.pytorch.utils.sparsification": ["ModuleSparsificationInfo"],
    "llmcompressor.recipe": [
        "Recipe",
        "RecipeArgsInput",
        "RecipeContainer",
        "RecipeInput",
        "RecipeStageInput",
    ],
    "llmcompressor.training": ["SessionManagerMixIn", "Trainer"],
    "llmcompressor.transformers": [
        "DataTrainingArguments",
        "DatasetArguments",
        "ModelArguments",
        "RecipeArguments",
        "SessionManagerMixIn",
        "SparseAutoModelForCausalLM",
        "TextGenerationDataset",
        "Trainer",
        "TrainingArguments",
        "apply",
        "compress",
        "oneshot",
        "train",
        "wrap_hf_model_class",
    ],
    "llmcompressor.transformers.compression.compressed_tensors_utils": ["modify_save_pretrained"],
    "llmcompressor.transformers.compression.helpers": [
        "calculate_offload_device_map",
        "custom_offload_device_map",
    ],
    "llmcompressor.transformers.data": [
        "C4Dataset",
        "CNNDailyMailDataset",
        "EvolCodeAlpacaDataset",
        "Flickr30K",
        "GSM8KDataset",
        "OpenPlatypusDataset",
        "PeoplesSpeech",
        "PerfectBlendDataset",
        "TextGenerationDataset",
        "UltraChatDataset",
        "WikiTextDataset",
    ],
    "llmcompressor.transformers.data.base": ["TextGenerationDataset"],
    "llmcompressor.transformers.finetune": [
        "DataTrainingArguments",
        "ModelArguments",
        "SessionManagerMixIn",
        "TextGenerationDataset",
        "TrainingArguments",
        "apply",
        "compress",
        "oneshot",
        "train",
    ],
    "llmcompressor.transformers.finetune.data": [
        "C4Dataset",
        "CNNDailyMailDataset",
        "EvolCodeAlpacaDataset",
        "Flickr30K",
        "GSM8KDataset",
        "OpenPlatypusDataset",
        "PeoplesSpeech",
        "PerfectBlendDataset",
        "TextGenerationDataset",
        "UltraChatDataset",
        "WikiTextDataset",
    ],
    "llmcompressor.transformers.finetune.data.base": ["TextGenerationDataset"],
    "llmcompressor.transformers.finetune.data.data_args": [
        "DataTrainingArguments",
        "DatasetArguments",
    ],
    "llmcompressor.transformers.finetune.model_args": ["ModelArguments"],
    "llmcompressor.transformers.finetune.session_mixin": ["SessionManagerMixIn"],
    "llmcompressor.transformers.finetune.text_generation": [
        "apply",
        "compress",
        "oneshot",
        "train",
    ],
    "llmcompressor.transformers.finetune.trainer": ["Trainer"],
    "llmcompressor.transformers.finetune.training_args": ["TrainingArguments"],
    "llmcompressor.transformers.sparsification": [
        "SparseAutoModelForCausalLM",
        "modify_save_pretrained",
    ],
    "llmcompressor.transformers.sparsification.compressed_tensors_utils": [
        "modify_save_pretrained",
    ],
    "llmcompressor.transformers.sparsification.sparse_model": ["SparseAutoModelForCausalLM"],
    "llmcompressor.transformers.tracing": ["TraceableLlavaForConditionalGeneration"],
    "llmcompressor.transformers.utils": ["is_model_ct_quantized_from_path"],
    "llmcompressor.transformers.utils.data_collator": [
        "llava_data_collator",
        "mllama_data_collator",
        "pixtral_data_collator",
        "qwen2_vl_data_collator",
    ],
    "llmcompressor.transformers.utils.helpers": ["is_model_ct_quantized_from_path"],
    "llmcompressor.typing": ["DatasetType", "NamedModules", "Processor"],
    "llmcompressor.utils": [
        "DisableQuantization",
        "calculate_offload_device_map",
        "calibration_forward_context",
        "custom_offload_device_map",
        "disable_cache",
        "dispatch_for_generation",
        "eval_context",
        "get_embeddings",
        "get_high_precision",
        "get_main_device",
        "load_context",
        "patch_transformers_logger_level",
        "skip_weights_download",
        "skip_weights_initialize",
        "targets_embeddings",
        "untie_word_embeddings",
    ],
    "llmcompressor.utils.dev": [
        "dispatch_for_generation",
        "get_high_precision",
        "get_main_device",
        "load_context",
        "patch_transformers_logger_level",
        "skip_weights_download",
        "skip_weights_initialize",
    ],
    "llmcompressor.utils.helpers": [
        "DisableQuantization",
        "calibration_forward_context",
        "disable_cache",
        "eval_context",
        "get_embeddings",
        "targets_embeddings",
        "untie_word_embeddings",
    ],
    "llmcompressor.utils.pytorch": ["get_no_split_params"],
    "llmcompressor.utils.pytorch.module": ["get_no_split_params"],
    "llmcompressor.version": ["__version__", "__version_tuple__", "version", "version_tuple"],
}
# Second path → where the thing lives; both give the same object. tests/unit/test_compat.py has
# those of earlier releases.
ALIASES = {
    "llmcompressor:callbacks": "llmcompressor.session.functions:LifecycleCallbacks",
    "llmcompressor.args:DataTrainingArguments": "llmcompressor.args:DatasetArguments",
    "llmcompressor.entrypoints:Oneshot": "llmcompressor:Oneshot",
    "llmcompressor.entrypoints:model_free_ptq": "llmcompressor:model_free_ptq",
    "llmcompressor.entrypoints:oneshot": "llmcompressor:oneshot",
    "llmcompressor.entrypoints:train": "llmcompressor:train",
    "llmcompressor.modifiers.pruning:GradualPruningModifier": (
        "llmcompressor.modifiers.pruning.magnitude:MagnitudePruningModifier"
    ),
    "llmcompressor.modifiers.pruning:REAPPruningModifier": (
        "llmcompressor.modifiers.reap:REAPPruningModifier"
    ),
    "llmcompressor.modifiers.pruning:SparseGPTModifier": (
        "llmcompressor.modifiers.sparsity:SparseGPTModifier"
    ),
    "llmcompressor.modifiers.pruning:WandaPruningModifier": (
        "llmcompressor.modifiers.sparsity:WandaPruningModifier"
    ),
    "llmcompressor.modifiers.quantization:GPTQModifier": (
        "llmcompressor.modifiers.gptq:GPTQModifier"
    ),
    "llmcompressor.modifiers.transform:IMatrixGatherer": (
        "llmcompressor.modifiers.transform.imatrix:IMatrixGatherer"
    ),
    "llmcompressor.modifiers.transform:QuIPModifier": (
        "llmcompressor.modifiers.rotation:QuIPModifier"
    ),
    "llmcompressor.modifiers.transform:SpinQuantModifier": (
        "llmcompressor.modifiers.rotation:SpinQuantModifier"
    ),
    "llmcompressor.modifiers.transform.awq:AWQMapping": "llmcompressor.modifiers.awq:AWQMapping",
    "llmcompressor.modifiers.transform.quip:QuIPModifier": (
        "llmcompressor.modifiers.rotation:QuIPModifier"
    ),
    "llmcompressor.modifiers.transform.smoothquant:SmoothQuantMapping": (
        "llmcompressor.modifiers.smoothquant:SmoothQuantMapping"
    ),
    "llmcompressor.modifiers.transform.smoothquant:SmoothQuantModifier": (
        "llmcompressor.modifiers.smoothquant:SmoothQuantModifier"
    ),
    "llmcompressor.modifiers.transform.spinquant:SpinQuantModifier": (
        "llmcompressor.modifiers.rotation:SpinQuantModifier"
    ),
    "llmcompressor.observers:MovingAverageMSEObserver": "llmcompressor.observers:MSEObserver",
    "llmcompressor.observers:Observer": "llmcompressor.observers.base:Observer",
    "llmcompressor.recipe:RecipeArgsInput": "llmcompressor.recipe.arguments:RecipeArgs",
    "llmcompressor.utils:get_main_device": "llmcompressor.utils.devices:best_device",
    "llmcompressor.utils:skip_weights_download": "llmcompressor.utils.dev:skip_weights_download",
    "llmcompressor.utils.helpers:disable_cache": (
        "llmcompressor.modeling.call_graph:without_cache"
    ),
    "llmcompressor.utils.helpers:get_embeddings": ("llmcompressor.modeling.weights:embeddings"),
    "llmcompressor.version:__version__": "llmcompressor:__version__",
    "llmcompressor.version:version": "llmcompressor:__version__",
}


def load(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_there(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("old", ALIASES)
def test_an_alias_is_the_thing_itself(old: str) -> None:
    assert load(old) is load(ALIASES[old])


@pytest.mark.skipif(
    not hasattr(transformers, "DeepseekV32ForCausalLM"), reason="of a later transformers"
)
def test_deepseek_v32_is_that_of_transformers() -> None:
    found = load("llmcompressor.modeling.deepseekv32.model:DeepseekV32ForCausalLM")
    assert found is transformers.DeepseekV32ForCausalLM


def test_tables_are_sorted() -> None:
    for table in (PUBLIC, ALIASES, *PUBLIC.values()):
        assert list(table) == sorted(table, key=lambda path: path.split(":"))


def test_the_front_page_exports_its_list() -> None:
    assert sorted(llmcompressor.__all__) == sorted(["__version__", *PUBLIC["llmcompressor"]])
    assert set(llmcompressor.__all__) <= set(dir(llmcompressor))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="oneshto"):
        llmcompressor.oneshto  # noqa: B018


def test_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert llmcompressor.__version__ == project["version"]
    numbers = importlib.import_module("llmcompressor.version").version_tuple
    assert ".".join(map(str, numbers)) == project["version"]
