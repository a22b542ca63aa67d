# SPDX-License-Identifier: Apache-2.0
"""Tiny random models, and schemes put on them with compressed-tensors, where it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.quantization.utils.helpers import (
    is_module_quantized,
    maybe_pad_tensor_for_block_quant,
)
from compressed_tensors.utils.match import match_targets
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from llmcompressor.quantization.attach import (
    attach_attention,
    cached_attention_modules,
    enable_attention_hooks,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": torch.bfloat16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _cast(model: PreTrainedModel) -> PreTrainedModel:
    """Parameters in the configured dtype; buffers stay in float32, as after loading."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(model.config.dtype)
    return model.eval()


def llama(*, tied: bool = False, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**{**SIZES, "tie_word_embeddings": tied, **changes})
    return _cast(LlamaForCausalLM(config))


def qwen2(*, tied: bool = False, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(**{**SIZES, "tie_word_embeddings": tied})
    model = _cast(Qwen2ForCausalLM(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def tokens() -> Tensor:
    return torch.arange(3, 27).reshape(2, 12)


def save_dense(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def quantize_model(
    model: PreTrainedModel,
    groups: dict[str, QuantizationScheme],
    *,
    ignore: tuple[str, ...] = ("lm_head",),
    kv_cache: QuantizationArgs | None = None,
) -> PreTrainedModel:
    """Give every matched module min-max scales and a weight on its grid."""
    config = QuantizationConfig(config_groups=groups, ignore=list(ignore), kv_cache_scheme=kv_cache)
    apply_quantization_config(model, config, show_progress=False)
    _quantize_attention(model, config)
    for module in model.modules():
        if not is_module_quantized(module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if name in {"input_scale", "output_scale", "k_scale", "v_scale", "q_scale"}:
                parameter.fill_(0.03125)
            elif name == "input_global_scale":
                parameter.fill_(2688.0 / 4)
        if module.quantization_scheme.weights is not None:
            _round_weight(module, module.quantization_scheme.weights)
        # the weight lies on its grid: rounding it again in bfloat16 would move some codes
        module.quantization_status = QuantizationStatus.DECOMPRESSED
    return model


def _quantize_attention(model: PreTrainedModel, config: QuantizationConfig) -> None:
    """Attention that compressed-tensors passes over, as it has another name for the cache."""
    own = {target: one for one in config.config_groups.values() for target in one.targets}
    for module, name in cached_attention_modules(model).items():
        targets = match_targets(name, module, own)
        args = own[targets[0]].input_activations if targets else config.kv_cache_scheme
        if args is None or is_module_quantized(module):
            continue
        enable_attention_hooks(model, module, queries=bool(targets))
        attach_attention(module, args, {}, own[targets[0]] if targets else None)


def _round_weight(module: torch.nn.Module, args: QuantizationArgs) -> None:
    weight = module.weight.data
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(global_scale)
    cells = _cells(weight, args)
    scale, zero = calculate_qparams(cells.amin(-1), cells.amax(-1), args, global_scale=global_scale)
    scale = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
    zero = zero.reshape(scale.shape)
    module.weight_scale.data.copy_(scale)
    module.weight_zero_point.data.copy_(zero)
    padded = (
        maybe_pad_tensor_for_block_quant(weight, tuple(args.block_structure))
        if args.strategy == "block"
        else weight
    )
    options = {"zero_point": None if args.symmetric else zero, "args": args}
    codes = quantize(padded, scale=scale, global_scale=global_scale, **options)
    values = dequantize(codes, scale=scale, global_scale=global_scale, **options)
    rows, columns = weight.shape
    module.weight.data.copy_(values.to(weight.dtype)[:rows, :columns])


def _cells(weight: Tensor, args: QuantizationArgs) -> Tensor:
    rows = len(weight)
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "channel":
        return weight.reshape(rows, -1)
    if args.strategy == "block":
        height, width = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, (height, width))
        blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))
        return blocks.transpose(1, 2).reshape(-1, height * width)
    return weight.reshape(rows, -1, args.group_size)
