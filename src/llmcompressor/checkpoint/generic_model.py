# SPDX-License-Identifier: Apache-2.0
"""A module tree made from the tensor names of a checkpoint, for models without a known class.

Such a tree has no forward. It is enough for modifiers that work on weights alone: a module's name
and kind, and the block that it lies in. They follow from the names:

- ``X.weight`` with two dimensions is a Linear; it is doubtful if X ends in ``norm``;
- it is an Embedding if X has such a name (``embed_tokens``, ``wte``, …); it is doubtful if the
  name is similar;
- ``X.weight`` with three to five dimensions is a convolution, unless X is below ``experts`` or it
  holds matrices;
- ``X.3.…`` is one of several blocks; the outermost ones are loaded one by one.

Everything else is kept unchanged, each tensor in its own dtype.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import Embedding, Module, Parameter
from transformers import PretrainedConfig, PreTrainedModel

from llmcompressor.checkpoint.meta_model import MetaModel
from llmcompressor.checkpoint.names import LoadedName
from llmcompressor.checkpoint.quantization_config import merge_quantization
from llmcompressor.checkpoint.source import (
    SourceInfo,
    TensorHeader,
    check_dense,
    code_tensors,
    undeclared_error,
)
from llmcompressor.checkpoint.tensor_files import DTYPES, natural_key, torch_dtype, torch_shape
from llmcompressor.errors import CheckpointError
from llmcompressor.transformers_internals import keep_whole, set_conversions

_EMBEDDING = re.compile(
    r"emb|embeds?|embeddings?|embed_(?:in|tokens|positions)|wte|wpe|tok_embeddings"
    r"|(?:words?|tokens?|token_type|positions?|input)_embeddings?"
)
_LIKE_EMBEDDING = re.compile(
    r"(?!.*proj)(?:.*_)?emb(?:ed(?:ding)?s?)?(?:_.*)?|relative_attention_bias"
)
_HEAD = re.compile(r"(?:.*_)?(?:head|unembed|unembedding|embed_out|output|logits)(?:_.*)?")
_BESIDE = re.compile(r"(?:weight_(?:scale|scale_inv|zero_point|global_scale|shape)|qzeros)$")
"""What a quantized weight has beside it: names that those of a scheme would fall together with."""
_MATRIX = 2
_STACK = 3
_SMALLEST_SIDE = 16
_CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


_NUMBERED = re.compile(r"\.\d+\.")
_HEAD_NAME = "lm_head"
"""What transformers and the servers call the output head."""


class TreeConfig(PretrainedConfig):  # type: ignore[no-untyped-call]  # transformers has no types
    """An empty configuration: ``config.json`` is copied unchanged."""

    model_type = ""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return an empty configuration, whatever the arguments."""
        return cls()


class WrappedTreeConfig(TreeConfig):  # type: ignore[no-untyped-call]
    """Of a model with a text part, whose served names differ."""

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> Any:
        """Return another configuration, that of the text part."""
        return PretrainedConfig()


class Linear(nn.Linear):
    """A Linear without weight initialization."""

    def reset_parameters(self) -> None:
        """Do nothing, as the weight has no data."""


class TreePart(Module):
    """A module of unknown class, which holds modules and tensors by name."""


class TreeBlock(TreePart):
    """A numbered part, one of several."""


class TreeModel(PreTrainedModel):  # type: ignore[no-untyped-call]  # transformers has no types
    """A model built from tensor names; it has no forward.

    Attributes:
        doubtful: Linears that may be norms or embeddings: quantized only if they are named.
        tied: heads that the configuration ties to an embedding: never quantized, because
            loaders ignore the tensor stored for them.
        compressed: modules that are quantized already, by name; placeholders of the classes that
            loaders give them.
        existing: the quantization configuration of these in the original.
    """

    config_class = TreeConfig
    base_model_prefix = "(none)"  # no tensor is called so

    def __init__(self, config: TreeConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self._stated_dtype = dtype
        self.all_tied_weights_keys: dict[str, str] = {}
        self.doubtful: list[str] = []
        self.tied: list[str] = []
        self.compressed: dict[str, Linear | Embedding] = {}
        self.existing: Mapping[str, Any] | None = None
        self._inputs: str | None = None
        self._outputs: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the configuration declares."""
        return self._stated_dtype

    def get_input_embeddings(self) -> Any:
        """Return the token embedding, if it is another tensor than the head's."""
        return None if self._inputs is None else self.get_submodule(self._inputs)

    def get_output_embeddings(self) -> Any:
        """Return the output head, if there is one."""
        return None if self._outputs is None else self.get_submodule(self._outputs)

    def merged(self, quantization: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Merge this run's configuration of some modules with that of modules quantized before."""
        quantization = dict(quantization)
        if self._outputs is None and _HEAD_NAME not in quantization["ignore"]:
            # a tied head has no tensor here, and is a Linear in loaders of the checkpoint
            quantization["ignore"] = [*quantization["ignore"], _HEAD_NAME]
        if self.existing is None:
            return quantization
        modules = {name: self.get_submodule(name) for name in names}
        return merge_quantization(quantization, modules, self.existing, self.compressed)


keep_whole(TreeModel, [TreeBlock.__name__])
set_conversions(TreeModel, ())


def build_tree(
    source: SourceInfo,
    headers: Mapping[str, TensorHeader],
    existing: Mapping[str, Any] | None = None,
) -> MetaModel:
    """Build a model on the meta device whose modules have the names of a checkpoint's tensors.

    ``headers`` may be a view of the tensors with other names; ``existing`` is the configuration of
    the modules that are quantized already.

    Raises:
        CheckpointError: a tensor has an unsupported name or dtype, or was quantized by another
            method.
    """
    _check(headers, quantized=existing is not None)
    facts = _ConfigFacts.read(source.config)
    config = WrappedTreeConfig() if facts.is_wrapped else TreeConfig()
    config.name_or_path = str(source.directory)
    dtype = facts.dtype or _most_common_dtype(headers.values())
    model = TreeModel(config, dtype)
    model.existing = existing
    modules: dict[str, dict[str, TensorHeader]] = {"": {}}
    for name in sorted(headers, key=natural_key):
        path, _, own = name.rpartition(".")
        parts = path.split(".")
        for end in range(1, len(parts) + 1):  # parents first
            modules.setdefault(".".join(parts[:end]), {})
        modules[path][own] = headers[name]
    try:
        made: dict[str, Module] = {"": model}
        for path, tensors in modules.items():
            if path:
                parent, _, own = path.rpartition(".")
                made[path] = _make_module(path, tensors)
                made[parent].add_module(own, made[path])
            for name, header in tensors.items():
                shape = torch_shape(header.dtype, header.shape)
                empty = torch.empty(shape, dtype=DTYPES[header.dtype], device="meta")
                made[path].register_parameter(name, Parameter(empty, requires_grad=False))
            if _is_compressed(path, tensors):
                kind = Embedding if _is_embedding(path.rpartition(".")[2]) else Linear
                model.compressed[path] = kind(1, 1, device="meta")
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"A tensor has a name that torch cannot hold: {error}.") from error
    # norm matrices, and names similar to an embedding: patch_embedding, embed_tokens_per_layer,
    # but not embedding_projection and embed_out
    for name, module in model.named_modules():
        own = name.rpartition(".")[2]
        is_similar = _LIKE_EMBEDDING.fullmatch(own) and not _HEAD.fullmatch(own)
        if isinstance(module, Linear) and (name.endswith("norm") or is_similar):
            model.doubtful.append(name)
    _find_embeddings(model, facts)
    model.doubtful = list(dict.fromkeys(model.doubtful))
    model.train(mode=False)
    names = {name: LoadedName(name, merged=False) for name in headers}
    return MetaModel(model, replace(source, tensors=headers), names, dtype)


def tied_pair(
    config: Mapping[str, Any], headers: Mapping[str, TensorHeader]
) -> tuple[str, str] | None:
    """Return the paths of the head that a configuration ties to an embedding, and of that.

    The head's is the usual one if no tensor is stored for it. ``None`` if nothing is tied, or the
    embedding is ambiguous or missing.
    """
    facts = _ConfigFacts.read(config)
    matrices = {
        name.removesuffix(".weight"): header.shape
        for name, header in headers.items()
        if name.endswith(".weight")
        and len(header.shape) == _MATRIX
        and header.shape[0] in facts.vocabulary
        and not _NUMBERED.search(name)
    }
    inputs = [name for name in matrices if _is_embedding(name.rpartition(".")[2])]
    if not facts.is_tied or len(inputs) != 1:
        return None
    stored = [
        name
        for name, shape in matrices.items()
        if name not in inputs
        and shape == matrices[inputs[0]]
        and _HEAD.fullmatch(name.rpartition(".")[2])
    ]
    # the usual name stands next to the part that contains the embedding: language_model.lm_head
    # for language_model.model.embed_tokens
    *outer, inner, _ = ["", *inputs[0].split(".")]
    usual = ".".join([*filter(None, outer), _HEAD_NAME]) if inner == "model" else _HEAD_NAME
    return next(iter(stored), usual), inputs[0]


def untie_source(
    source: SourceInfo, headers: Mapping[str, TensorHeader], pair: tuple[str, str]
) -> tuple[SourceInfo, dict[str, TensorHeader]]:
    """Describe a checkpoint as if the head of a :func:`tied_pair` had its own copy."""
    head, embedding = pair
    config = dict(source.config)
    for level in (config, config.get("text_config")):
        if isinstance(level, Mapping) and "tie_word_embeddings" in level:
            own = {**level, "tie_word_embeddings": False}
            config = own if level is config else {**config, "text_config": own}
    changed = {**headers, f"{head}.weight": headers[f"{embedding}.weight"]}
    return replace(source, config=config), changed


@dataclass(frozen=True)
class _ConfigFacts:
    dtype: torch.dtype | None
    is_tied: bool
    is_wrapped: bool
    vocabulary: frozenset[int]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> _ConfigFacts:
        inner = config.get("text_config")
        levels = [config, inner] if isinstance(inner, Mapping) else [config]
        stated = [level.get(key) for level in levels for key in ("dtype", "torch_dtype")]
        dtypes = (getattr(torch, str(one).removeprefix("torch."), None) for one in stated if one)
        return cls(
            dtype=next((one for one in dtypes if isinstance(one, torch.dtype)), None),
            is_tied=any(level.get("tie_word_embeddings") is True for level in levels),
            is_wrapped=len(levels) > 1,
            vocabulary=frozenset(
                size for level in levels if isinstance(size := level.get("vocab_size"), int)
            ),
        )


def _check(headers: Mapping[str, TensorHeader], *, quantized: bool) -> None:
    for name, header in headers.items():
        torch_dtype(name, header)
        if not quantized and _BESIDE.match(name.rpartition(".")[2]):
            raise undeclared_error(name, header)
    if not quantized:
        check_dense(headers)


def _is_compressed(path: str, tensors: Mapping[str, TensorHeader]) -> bool:
    """Return True if a module has codes or quantization parameters."""
    whole = {f"{path}.{own}" if path else own: header for own, header in tensors.items()}
    return any(map(_BESIDE.match, tensors)) or next(code_tensors(whole), None) is not None


def _most_common_dtype(headers: Iterable[TensorHeader]) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for header in headers:
        sizes[DTYPES[header.dtype]] += header.nbytes
    return next((one for one, _ in sizes.most_common() if one.is_floating_point), torch.float32)


def _make_module(path: str, tensors: Mapping[str, TensorHeader]) -> Module:
    """Return a module of the kind that its name and its weight's shape indicate."""
    last = path.rpartition(".")[2]
    header = None if _is_compressed(path, tensors) else tensors.get("weight")
    if header is not None and DTYPES[header.dtype].is_floating_point and 0 not in header.shape:
        dimensions = len(header.shape)
        if dimensions == _MATRIX:
            rows, columns = header.shape
            if _is_embedding(last):
                return Embedding(rows, columns, device="meta")
            return Linear(columns, rows, bias=False, device="meta")
        is_stack = "experts" in path.split(".") or is_stack_of_matrices(header.shape)
        if dimensions in _CONVOLUTIONS and not is_stack:
            rows, columns, *kernel = header.shape
            kind: Any = _CONVOLUTIONS[dimensions]
            return kind(columns, rows, tuple(kernel), bias=False, device="meta")  # type: ignore[no-any-return]  # of torch
    return TreeBlock() if last.isdigit() else TreePart()


def is_stack_of_matrices(shape: Sequence[int]) -> bool:
    """Return True if a tensor has three dimensions, too large ones for a convolution.

    >>> is_stack_of_matrices((8, 64, 32)), is_stack_of_matrices((64, 1, 4))
    (True, False)
    """
    return len(shape) == _STACK and min(shape[1:]) >= _SMALLEST_SIDE


def _is_embedding(name: str) -> bool:
    """Return True if a module has the name of an embedding.

    >>> [_is_embedding(name) for name in ("embed_tokens", "wte", "embed_out", "patch_embedding")]
    [True, True, False, False]
    """
    return bool(_EMBEDDING.fullmatch(name))


def _find_embeddings(model: TreeModel, facts: _ConfigFacts) -> None:
    outside = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Linear | Embedding) and not _NUMBERED.search(name)
    ]
    inputs = {name: module for name, module in outside if isinstance(module, Embedding)}
    sizes = facts.vocabulary | {module.num_embeddings for module in inputs.values()}
    for name, module in outside:
        if not isinstance(module, Linear) or module.out_features not in sizes:
            continue
        if not _HEAD.fullmatch(name.rpartition(".")[2]):
            if module.out_features in facts.vocabulary:
                model.doubtful.append(name)
            continue
        model._outputs = name
        twin = next(
            (own for own, one in inputs.items() if one.weight.shape == module.weight.shape), None
        )
        if twin is not None and facts.is_tied:
            model.tied.append(name)
        elif twin is not None:
            model._inputs = twin
