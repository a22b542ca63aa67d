# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in memory, to be spoilt and written: read from a folder, or made of random weights.

The made ones are packed by compressed-tensors alone, so that families and schemes can be tried
which a compression of a tiny model does not give: experts by themselves, draft layers, towers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.quantization.utils.helpers import maybe_pad_tensor_for_block_quant
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmcompressor.schemes.presets import format_of, preset_scheme
from llmcompressor.verification import TensorInfo

HIDDEN, INNER, HEADS, VOCABULARY, EXPERTS = 128, 256, 4, 128, 3
INDEX = "model.safetensors.index.json"
Shapes = dict[str, tuple[int, int]]


@dataclass
class Sample:
    """A checkpoint: configuration, tensors, and files beside them."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Sample:
        config = json.loads((folder / "config.json").read_text())
        tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(path)
        files = {
            path.name: path.read_bytes()
            for path in folder.iterdir()
            if path.suffix in (".yaml", ".json", ".jinja")
            and path.name not in ("config.json", "manifest.json", INDEX)
        }
        return cls(config, tensors, files)

    def copy(self) -> Sample:
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return Sample(copy.deepcopy(self.config), tensors, dict(self.files))

    def write(self, folder: Path, *, shards: int = 2) -> Path:
        """Write it in ``shards`` files with an index."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        names = sorted(self.tensors)
        size = -(-len(names) // shards)
        weight_map = {}
        for index in range(shards):
            file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
            own = names[index * size : (index + 1) * size]
            save_file({name: self.tensors[name].contiguous() for name in own}, folder / file)
            weight_map |= dict.fromkeys(own, file)
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index_json))
        return folder

    def headers(self, folder: Path) -> dict[str, TensorInfo]:
        """What the headers of its files say, with the help of safetensors itself."""
        path = folder / "headers.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, path)
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no dict
            return {
                name: TensorInfo(part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    @property
    def groups(self) -> dict[str, Any]:
        found: dict[str, Any] = self.settings["config_groups"]
        return found

    @property
    def group(self) -> dict[str, Any]:
        """The last group; the one with all modules, where there is but one."""
        found: dict[str, Any] = self.groups[sorted(self.groups)[-1]]
        return found

    def own(self, module: str) -> dict[str, Tensor]:
        """The tensors of one module by their own names."""
        return {
            name.removeprefix(f"{module}."): tensor
            for name, tensor in self.tensors.items()
            if name.rpartition(".")[0] == module
        }

    def drop(self, start: str) -> None:
        """Remove every tensor whose name begins so."""
        found = [name for name in self.tensors if name.startswith(start)]
        assert found, start
        for name in found:
            del self.tensors[name]


def attention(path: str) -> Shapes:
    square = (HIDDEN, HIDDEN)
    return {f"{path}.self_attn.{own}_proj": square for own in "qkvo"}


def mlp(path: str, inner: int = INNER) -> Shapes:
    up = (inner, HIDDEN)
    return {f"{path}.gate_proj": up, f"{path}.up_proj": up, f"{path}.down_proj": (HIDDEN, inner)}


def mixture(
    path: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    found: Shapes = {f"{path}.gate": (EXPERTS, HIDDEN)}
    for index in range(EXPERTS):
        for name, shape in zip(
            names, [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)], strict=True
        ):
            found[f"{path}.experts.{index}.{name}"] = shape
    return found


def ends(prefix: str = "model") -> Shapes:
    return {f"{prefix}.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}


def dense(prefix: str = "model", layers: int = 2) -> Shapes:
    """The matrices of a Llama."""
    found = ends(prefix)
    for index in range(layers):
        path = f"{prefix}.layers.{index}"
        found |= attention(path) | mlp(f"{path}.mlp")
    return found


def sparse(block: str = "mlp", names: tuple[str, str, str] | None = None) -> Shapes:
    """The matrices of a mixture of experts."""
    found = ends()
    for index in range(2):
        path = f"model.layers.{index}"
        names = names or ("gate_proj", "up_proj", "down_proj")
        found |= attention(path) | mixture(f"{path}.{block}", names)
    return found


def _cells(weight: Tensor, args: Any) -> tuple[Tensor, tuple[int, ...]]:
    """The values that share a scale, and the shape of the scales."""
    rows = len(weight)
    if args.strategy == "tensor":
        return weight.reshape(1, -1), (1,)
    if args.strategy == "channel":
        return weight, (rows, 1)
    if args.strategy == "block":
        height, width = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, (height, width))
        blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)).transpose(1, 2)
        return blocks.flatten(2), tuple(blocks.shape[:2])
    cells = weight.reshape(rows, -1, args.group_size)
    return cells, tuple(cells.shape[:2])


def coded(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """A weight rounded to the nearest and packed, by compressed-tensors."""
    args = scheme.weights
    assert args is not None
    cells, shape = _cells(weight, args)
    own = {"weight": weight}
    overall = None
    if args.strategy == "tensor_group":
        overall = own["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(cells.amin(-1), cells.amax(-1), args, global_scale=overall)
    own["weight_scale"] = scale.reshape(shape)
    if not args.symmetric:
        own["weight_zero_point"] = zero.reshape(shape)
    inputs = scheme.input_activations
    if inputs is not None and inputs.strategy == "tensor_group":
        own["input_global_scale"] = torch.tensor([672.0])
    elif inputs is not None and inputs.dynamic is False:
        own["input_scale"] = torch.tensor([0.03125])
    compressor = BaseCompressor.get_value_from_registry(format_of(scheme))
    found: dict[str, Tensor] = compressor.compress(own, scheme)
    return found


def made(
    shapes: Mapping[str, tuple[int, int]],
    scheme: str | QuantizationScheme = "W4A16",
    *,
    only: Callable[[str], bool] = lambda name: True,
    ignore: tuple[str, ...] = (),
    **config: Any,
) -> Sample:
    """A checkpoint of random weights with one group for ``Linear``.

    Args:
        shapes: module → rows and columns.
        scheme: preset or scheme.
        only: which modules are quantized; gates, heads and embeddings never are.
        ignore: more entries for ``ignore``, beside the names of all modules that are not.
        config: entries of ``config.json``.
    """
    scheme = preset_scheme(scheme) if isinstance(scheme, str) else scheme
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    plain = []
    overall = None
    for name, shape in shapes.items():
        weight = torch.randn(shape, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
        is_end = name.endswith(("embed_tokens", "shared", "lm_head", ".gate"))
        if is_end or not only(name):
            own = {"weight": weight}
            plain += [] if name.endswith(("embed_tokens", "shared")) else [name]
        else:
            own = coded(weight, scheme)
        if "weight_global_scale" in own:  # joined shards share one
            overall = overall if overall is not None else own["weight_global_scale"]
            own["weight_global_scale"] = overall.clone()
        tensors |= {f"{name}.{each}": tensor for each, tensor in own.items()}
    group = {**scheme.model_dump(mode="json"), "format": format_of(scheme)}
    settings = {
        "quant_method": "compressed-tensors",
        "format": format_of(scheme),
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*plain, *ignore],
    }
    base = {
        # of nobody: these have no norms, and no class of transformers takes them for whole
        "architectures": ["SampleForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "tie_word_embeddings": False,
    }
    return Sample({**base, **config, "quantization_config": settings}, tensors)
