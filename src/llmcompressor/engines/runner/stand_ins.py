# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for kernels of vLLM that a platform lacks.

vLLM itself still chooses the schemes, creates, renames, joins and loads the parameters. Then what
it has loaded is decoded, and a product with the decoded weight takes the place of the kernel. So
the file and its loading are tried, and no kernel is.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_PACKAGE = "vllm.model_executor.layers.quantization.compressed_tensors"
_CHOOSER = re.compile(r"choose_\w*kernel|init_\w*kernel")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _Kernel:
    """A kernel that is never called.

    Args:
        given: what kernels are created with.
        named: likewise.
    """

    supports_quant_input = False

    def __init__(self, *given: Any, **named: Any) -> None:
        self.config = self

    def input_quant_key(self) -> None:
        """It takes no rounded inputs."""


def install() -> None:
    """Put the stand-ins into vLLM, in this process."""
    schemes = importlib.import_module(f"{_PACKAGE}.schemes")
    for found in pkgutil.iter_modules(schemes.__path__, f"{schemes.__name__}."):
        module = importlib.import_module(found.name)
        for name in filter(_CHOOSER.fullmatch, vars(module).copy()):
            # the one gives a class, the other an object
            setattr(module, name, (lambda *_: _Kernel) if name[0] == "c" else _Kernel)
    linear: Any = importlib.import_module(f"{_PACKAGE}.compressed_tensors")
    config, method = linear.CompressedTensorsConfig, linear.CompressedTensorsLinearMethod
    config.get_scheme = _remember_args(config.get_scheme)
    method.process_weights_after_loading = _decode_layer
    method.apply = _apply
    turned: Any = importlib.import_module(f"{_PACKAGE}.transform.module")
    turned.dispatch_unquantized_gemm = lambda *_: _product
    table: Any = importlib.import_module(f"{_PACKAGE}.compressed_tensors_embedding")
    table.CompressedTensorsEmbeddingWNA16Int.embedding = _embedding


def _product(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def _remember_args(get_scheme: Any) -> Any:
    """Keep the arguments of a layer's weight with it, as vLLM has found them."""

    def remembering(config: Any, layer: Any, layer_name: str | None = None) -> Any:
        scheme = get_scheme(config, layer=layer, layer_name=layer_name)
        if scheme is not None:
            layer.weight_args = config.get_scheme_dict(layer, layer_name)["weights"]
        return scheme

    return remembering


def _decode_layer(method: Any, layer: Any) -> None:
    """Decode the weight that was loaded, and let go of its codes."""
    weight = decoded(dict(layer.named_parameters(recurse=False)), layer.weight_args, layer)
    for name in [name for name in layer._parameters if name.startswith("weight")]:
        del layer._parameters[name]
    kept = torch.nn.Parameter(weight.to(torch.get_default_dtype()), requires_grad=False)
    layer.register_parameter("weight", kept)


def _apply(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, layer.weight.to(x.dtype), bias)


def _embedding(method: Any, layer: Any, ids: Tensor) -> Tensor:
    packed, scale = layer.weight_packed.data[ids], layer.weight_scale.data[ids]
    flat = integers(packed.flatten(0, -2), method.num_bits, layer.hidden_size)
    cells = flat.reshape(len(flat), -1, layer.hidden_size // scale.shape[-1])
    found = cells * scale.float().reshape(len(flat), -1, 1)
    rows: Tensor = found.reshape(*ids.shape, -1).to(scale.dtype)
    return rows


def decoded(own: dict[str, Any], args: Any, layer: Any) -> Tensor:
    """The weight that parameters stand for, float32 ``[rows, columns]``.

    Args:
        own: the layer's parameters, as vLLM has loaded them.
        args: the weight's ``QuantizationArgs``.
        layer: of which ``logical_widths`` has the rows of each part that was joined.
    """
    codes = own.get("weight_packed", own.get("weight"))
    if codes is None:
        raise KeyError("weight")
    codes, scale = codes.data, own["weight_scale"].data
    if codes.dtype is torch.int32:
        fill = codes.shape[1] * 32 // args.num_bits
        columns = getattr(layer, "input_size_per_partition", fill)
        values = integers(codes, args.num_bits, columns)
    elif codes.dtype is torch.uint8:
        values = six_bits(codes) if args.num_bits == 6 else four_bits(codes)
    else:
        values = codes.float()
    zero = own.get("weight_zero_point")
    if zero is not None and not args.symmetric:
        points = zero.data
        if points.dtype is torch.int32:
            points = integers(points.T.contiguous(), args.num_bits, len(values)).T
        values = values - _spread(points.float(), values, args, layer)
    factors = torch.exp2(scale.float() - 127) if scale.dtype is torch.uint8 else scale.float()
    overall = own.get("weight_global_scale")
    if overall is not None:
        factors = factors / overall.data.float().max()
    return values * _spread(factors, values, args, layer)


def _spread(scale: Tensor, values: Tensor, args: Any, layer: Any) -> Tensor:
    """Scales for each value: of the parts that were joined, of channels, groups or blocks."""
    rows, columns = values.shape
    block = getattr(args, "block_structure", None)
    if block and scale.ndim == 2 and str(args.strategy).endswith("block"):
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return wide[:rows, :columns]
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.ndim == 1 and len(scale) != rows:
        widths = torch.tensor(layer.logical_widths, device=scale.device)
        return scale.repeat_interleave(widths).reshape(-1, 1)
    scale = scale.reshape(rows, -1)
    return scale.repeat_interleave(-(-columns // scale.shape[1]), 1)[:, :columns]


def integers(words: Tensor, bits: int, count: int) -> Tensor:
    """Signed codes of packed int32 ``[rows, words]``, a dense stream of bits, as float32."""
    wide = words.to(torch.int64) & 0xFFFFFFFF
    place = torch.arange(count, device=words.device) * bits
    index, offset = place // 32, place % 32
    low = wide[:, index] >> offset
    following = wide[:, (index + 1).clamp(max=wide.shape[1] - 1)]
    high = torch.where(offset + bits > 32, following << (32 - offset), 0)
    codes = (low | high) & ((1 << bits) - 1)
    return (codes - (1 << (bits - 1))).float()


def four_bits(octets: Tensor) -> Tensor:
    """E2M1 codes of uint8 ``[rows, bytes]``, the low half first, as float32."""
    table = torch.tensor([*_E2M1, *(-one for one in _E2M1)], device=octets.device)
    halves = torch.stack([octets & 15, octets >> 4], -1).long()
    return table[halves].reshape(len(octets), -1)


def six_bits(octets: Tensor) -> Tensor:
    """E2M3 codes of uint8 ``[rows, bytes]``, the lowest bits first, as float32."""
    three = octets.reshape(len(octets), -1, 3).long()
    word = three[..., 0] | (three[..., 1] << 8) | (three[..., 2] << 16)
    codes = torch.stack([(word >> (6 * place)) & 63 for place in range(4)], -1)
    exponent, mantissa = (codes >> 3) & 3, (codes & 7).float()
    size = torch.where(exponent == 0, mantissa / 8, (1 + mantissa / 8) * 2.0 ** (exponent - 1))
    return torch.where(codes >= 32, -size, size).reshape(len(octets), -1)
