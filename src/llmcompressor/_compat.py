# SPDX-License-Identifier: Apache-2.0
"""Import paths of earlier releases: one table, and the finder that makes modules of its rows.

``from llmcompressor.transformers import oneshot`` finds no file. Python asks the finder below,
which makes a module that has the names of the row and imports each when it is used (PEP 562).
To keep an old path, add a row; when a thing moves, change the ``from`` that leads to it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder

    class _Protocol(MetaPathFinder, Loader): ...
else:  # importing importlib.abc takes 13 ms, and Python asks for the methods only
    _Protocol = object

# Old paths within the package, comma-separated, and below them what each of these modules has.
# ``*`` stands for the rest of a name.
_ROWS = """
args.recipe_arguments
    from llmcompressor.args import RecipeArguments

core.events.event
    from llmcompressor.core.events import Event, EventType
core.lifecycle
    from llmcompressor.core import CompressionLifecycle
core.model_layer
    from llmcompressor.core import ModelParameterizedLayer
core.session
    from llmcompressor.core import CompressionSession
core.session_functions
    from llmcompressor.core import LifecycleCallbacks, active_session, callbacks, create_session
    from llmcompressor.core import finalize, initialize, reset_session

datasets.utils
    from llmcompressor.datasets import format_calibration_data, get_calibration_dataloader
    from llmcompressor.datasets import get_processed_dataset, get_rank_partition
    from llmcompressor.datasets.collate import DataCollatorWithTruncation
    from llmcompressor.datasets.sampling import LengthAwareSampler

evaluation.stdlib_text
    from llmcompressor.datasets.stdlib_text import SourceFile, calibration_passages
    from llmcompressor.datasets.stdlib_text import calibration_texts, held_out_texts
    from llmcompressor.datasets.stdlib_text import is_held_out, source_files

modeling.call_order
    from llmcompressor.modeling.call_graph import first_tensor
modeling.deepseekv32, modeling.granite4, modeling.kimi_k3, modeling.moe, modeling.patch
modeling.deepseek_v3
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE as CalibrationDeepseekV3MoE
modeling.deepseekv32.model
    from transformers import DeepseekV32ForCausalLM
modeling.glm4_moe
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE as CalibrationGlm4MoeMoE
modeling.glm_moe_dsa
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaMoE as CalibrationGlmMoeDsaMoE
modeling.gpt_oss
    from llmcompressor.modeling import replace_modules_for_calibration as convert_model_for_quantization_gptoss
modeling.llama4
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe as SequentialLlama4TextMoe
modeling.minimax_m2
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock as CalibrationMiniMaxM2SparseMoeBlock
modeling.moe.context
    from llmcompressor.modeling import moe_calibration_context
modeling.moe.conversion_mappings
    from llmcompressor.modeling import patch_moe_mappings
modeling.moe.linear_experts
modeling.moe.linearize
    from llmcompressor.modeling import replace_modules_for_calibration as linearize_moe
    from llmcompressor.utils.loading import load_context as load_quantizable_moe
modeling.moe_context
    from llmcompressor.modeling import moe_calibration_context
    from llmcompressor.moe.noop_compat import MoECalibrationModule
modeling.patch.qwen3_omni_patch
    from llmcompressor.moe.noop_compat import fast_pos_embed_interpolate
modeling.prepare
    from llmcompressor.modeling import moe_calibration_context, replace_modules_for_calibration
modeling.qwen3_5_moe
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock as CalibrationQwen3_5MoeSparseMoeBlock
modeling.qwen3_moe
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as CalibrationQwen3MoeSparseMoeBlock

modifiers.awq.dynamic_mappings, modifiers.transform.awq.dynamic_mappings
    from llmcompressor.modifiers.awq.base import AWQ_MAPPING_REGISTRY, AWQMapping
    from llmcompressor.modifiers.awq.base import default_mappings, get_layer_mappings_from_model
modifiers.awq.mappings, modifiers.transform.awq.mappings
    from llmcompressor.modifiers.awq.base import AWQ_MAPPING_REGISTRY, AWQMapping
    from llmcompressor.modifiers.awq.base import default_mappings, get_layer_mappings_from_architecture
modifiers.factory
    from llmcompressor.modifiers import ModifierFactory
modifiers.modifier
    from llmcompressor.modifiers import Modifier
modifiers.interface
    from llmcompressor.modifiers import Modifier as ModifierInterface
modifiers.logarithmic_equalization, modifiers.logarithmic_equalization.base
    from llmcompressor.modifiers.smoothquant import LogarithmicEqualizationModifier
modifiers.obcq, modifiers.obcq.base, modifiers.obcq.sgpt_base, modifiers.pruning.sparsegpt, modifiers.pruning.sparsegpt.base
    from llmcompressor.modifiers.sparsity import SparseGPTModifier
modifiers.pruning.constant, modifiers.pruning.constant.base
    from llmcompressor.modifiers.pruning import ConstantPruningModifier
modifiers.pruning.magnitude, modifiers.pruning.magnitude.base
    from llmcompressor.modifiers.pruning import MagnitudePruningModifier
modifiers.pruning.reap, modifiers.pruning.reap.base
    from llmcompressor.modifiers.reap import REAPPruningModifier
modifiers.pruning.wanda, modifiers.pruning.wanda.base
    from llmcompressor.modifiers.sparsity import WandaPruningModifier
modifiers.quantization.gptq, modifiers.quantization.gptq.base
    from llmcompressor.modifiers.gptq import GPTQModifier
modifiers.quantization.quantization
    from llmcompressor.modifiers.quantization import QuantizationMixin, QuantizationModifier
modifiers.quantization.quantization.base
    from llmcompressor.modifiers.quantization import QuantizationModifier
modifiers.quantization.quantization.mixin
    from llmcompressor.modifiers.quantization import QuantizationMixin
modifiers.stage
    from llmcompressor.modifiers import StageModifiers
modifiers.smoothquant.utils, modifiers.transform.smoothquant.utils
    from llmcompressor.modifiers.smoothquant.base import DEFAULT_SMOOTHQUANT_MAPPINGS, MAPPINGS_REGISTRY
    from llmcompressor.modifiers.smoothquant.base import LayerMap, get_layer_mappings_from_architecture
modifiers.transform.awq.base
    from llmcompressor.modifiers.awq.base import AWQMapping, AWQModifier
modifiers.transform.quip.base
    from llmcompressor.modifiers.rotation import QuIPModifier
modifiers.transform.smoothquant.base
    from llmcompressor.modifiers.smoothquant import SmoothQuantMapping, SmoothQuantModifier
modifiers.transform.smoothquant.dynamic_mappings
    from llmcompressor.modifiers.smoothquant.base import get_layer_mappings_from_model
modifiers.transform.spinquant.base
    from llmcompressor.modifiers.rotation import SpinQuantModifier
modifiers.transform.spinquant.mappings
    from llmcompressor.modifiers.rotation.parts import SPINQUANT_MAPPING_REGISTRY, SpinQuantMapping
modifiers.transform.spinquant.norm_mappings
    from llmcompressor.modifiers.rotation.parts import NORM_MAPPING_REGISTRY, NormMapping
modifiers.utils, modifiers.utils.hooks
    from llmcompressor.modeling.hooks import HooksMixin

observers.helpers
    from llmcompressor.observers import flatten_for_calibration

pipelines.independent
    from llmcompressor.pipelines.basic import IndependentPipeline

pytorch, transformers.compression
pytorch.utils
    from llmcompressor.utils.tensors import ModuleSparsificationInfo, tensor_sparsity, tensors_to_device
pytorch.utils.helpers
    from llmcompressor.utils.tensors import tensor_sparsity, tensors_to_device
pytorch.utils.sparsification
    from llmcompressor.utils.tensors import ModuleSparsificationInfo

transformers, transformers.finetune, transformers.finetune.text_generation
    from llmcompressor import oneshot, run_stages as apply, run_stages as compress, train
    from llmcompressor.args import DatasetArguments, DatasetArguments as DataTrainingArguments
    from llmcompressor.args import ModelArguments, RecipeArguments, TrainingArguments
    from llmcompressor.datasets import TextGenerationDataset
    from llmcompressor.moe.noop_compat import wrap_hf_model_class
    from llmcompressor.training import SessionManagerMixIn, Trainer
    from transformers import AutoModelForCausalLM as SparseAutoModelForCausalLM
transformers.compression.compressed_tensors_utils, transformers.sparsification.compressed_tensors_utils
    from llmcompressor.entrypoints.verify import modify_save_pretrained
transformers.compression.helpers
    from llmcompressor.utils import calculate_offload_device_map, custom_offload_device_map
transformers.data, transformers.finetune.data
    from llmcompressor.datasets import TextGenerationDataset
    from llmcompressor.datasets.named import PerfectBlend as PerfectBlendDataset, UltraChat as UltraChatDataset
    from llmcompressor.datasets.named import Flickr30k as Flickr30K, PeoplesSpeech
    from llmcompressor.datasets.named import C4 as C4Dataset, WikiText as WikiTextDataset
    from llmcompressor.datasets.named import CNNDailyMail as CNNDailyMailDataset, GSM8K as GSM8KDataset
    from llmcompressor.datasets.named import EvolCodeAlpaca as EvolCodeAlpacaDataset
    from llmcompressor.datasets.named import OpenPlatypus as OpenPlatypusDataset
transformers.data.base, transformers.finetune.data.base
    from llmcompressor.datasets import TextGenerationDataset
transformers.finetune.data.data_args
    from llmcompressor.args import DatasetArguments, DatasetArguments as DataTrainingArguments
transformers.finetune.model_args
    from llmcompressor.args import ModelArguments
transformers.finetune.session_mixin
    from llmcompressor.training import SessionManagerMixIn
transformers.finetune.trainer
    from llmcompressor.training import Trainer
transformers.finetune.training_args
    from llmcompressor.args import TrainingArguments
transformers.sparsification
    from llmcompressor.entrypoints.verify import modify_save_pretrained
    from transformers import AutoModelForCausalLM as SparseAutoModelForCausalLM
transformers.sparsification.sparse_model
    from transformers import AutoModelForCausalLM as SparseAutoModelForCausalLM
transformers.tracing
    from transformers import * as Traceable*
transformers.utils, transformers.utils.helpers
    from llmcompressor.utils.loading import is_model_ct_quantized_from_path
transformers.utils.data_collator
    from llmcompressor.datasets.collate import llava_data_collator, mllama_data_collator
    from llmcompressor.datasets.collate import pixtral_data_collator, qwen2_vl_data_collator

utils.dev
    from llmcompressor.utils import dispatch_for_generation, get_high_precision, get_main_device
    from llmcompressor.utils import load_context, patch_transformers_logger_level
    from llmcompressor.utils import skip_weights_download, skip_weights_initialize
utils.helpers
    from llmcompressor.utils.devices import DisableQuantization, calibration_forward_context
    from llmcompressor.utils.devices import disable_cache, eval_context, get_embeddings
    from llmcompressor.utils.devices import targets_embeddings, untie_word_embeddings
utils.pytorch, utils.pytorch.module
    from llmcompressor.utils.devices import get_no_split_params
"""  # noqa: E501

_TAKEN_APART = "each run takes the experts of a model apart by itself. Load the model as it is"
_ONE_BY_ONE = (
    "servers read quantized experts one by one, and so they are written. Save the model as it is."
)
_NO_EVAL = {
    "eval": "llmcompressor.evaluate(model) measures perplexity, train(..., eval_strategy=...) the "
    "loss in a training."
}
_GRANITE = f"{_TAKEN_APART}, and leave out what replaces its experts."
ABSENT: dict[str, dict[str, str]] = {
    "modeling.granite4": {
        "GraniteMoeHybridParallelExpertsLinear": _GRANITE,
        "pack_3d_experts": _ONE_BY_ONE,
        "replace_granite_moe_with_linear_experts": _GRANITE,
    },
    "modeling.kimi_k3": {
        "KimiK3ForConditionalGeneration": (
            "it holds no model's code. Load the model with transformers, with "
            "trust_remote_code=True if the checkpoint brings its code."
        ),
    },
    "modeling.moe.linear_experts": {"LinearExperts2D": f"{_TAKEN_APART}."},
    "modeling.moe.linearize": {"repack_moe": _ONE_BY_ONE},
    "transformers": _NO_EVAL,
    "transformers.finetune": _NO_EVAL,
    "transformers.finetune.text_generation": _NO_EVAL,
}
"""Old path → name that nothing here stands for → the remedy that its import gives."""


def _parse(rows: str) -> dict[str, dict[str, str]]:
    r"""The table of a text.

    >>> _parse("old.path, older\n    from package.module import A, B as C")["older"]
    {'A': 'package.module:A', 'C': 'package.module:B'}
    """
    table: dict[str, dict[str, str]] = {}
    paths: list[str] = []
    for line in filter(None, rows.splitlines()):
        if not line.startswith(" "):
            paths = line.split(", ")
            table.update((path, {}) for path in paths)
            continue
        _, module, _, names = line.split(maxsplit=3)
        for name, _, alias in (one.partition(" as ") for one in names.split(", ")):
            for path in paths:
                table[path][alias or name] = f"{module}:{name}"
    return table


OLD_PATHS = _parse(_ROWS)
"""Old path → name → ``"module:name"`` of today."""


class _Finder(_Protocol):
    """Finds the modules of :data:`OLD_PATHS`, and makes them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that has a row; nothing for all others."""
        package, _, old = fullname.partition(".")
        if package != __name__.partition(".")[0] or old not in OLD_PATHS:
            return None
        is_package = any(row.startswith(f"{old}.") for row in OLD_PATHS)
        return ModuleSpec(fullname, self, origin=__file__, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python, which makes an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names, none of which is imported yet."""
        old = module.__name__.partition(".")[2]
        homes = OLD_PATHS[old]
        public = sorted(name for name in homes if "*" not in name)

        def find(name: str) -> Any:
            if f"{old}.{name}" in OLD_PATHS:
                return importlib.import_module(f"{module.__name__}.{name}")
            if name in ABSENT.get(old, {}):
                raise ImportError(f"There is no {name} in this package: {ABSENT[old][name]}")
            if (home := _home(name, homes)) is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            from llmcompressor.runtime.registry import resolve  # noqa: PLC0415  # few runs need it

            return resolve(home)

        now = [f"{name}: now {home.replace(':', '.')}" for name, home in sorted(homes.items())]
        vars(module).update(
            __doc__="\n".join(["Import path of earlier releases.", "", *now]).strip(),
            __all__=public,
            __getattr__=find,
            __dir__=lambda: sorted({*vars(module), *public}),
        )


def _home(name: str, homes: Mapping[str, str]) -> str | None:
    """``"module:name"`` for a name that has an entry, or fits one that ends in ``*``."""
    for known, home in homes.items():
        prefix, star, _ = known.partition("*")
        if name == known or (star and name.startswith(prefix)):
            return home.replace("*", name.removeprefix(prefix))
    return None


def install() -> None:
    """Have Python ask here first: folders that an update has left behind are packages to it."""
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
