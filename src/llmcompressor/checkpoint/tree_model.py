# SPDX-License-Identifier: Apache-2.0
"""A tree of modules made from the names in a checkpoint, for models that no class is known of.

Such a tree has no forward. It is enough for what works on weights alone: a module by name, its
kind, and which modules lie in which block. What a name tells:

- ``X.weight`` with two dimensions is a Linear; one is not meant if X ends in ``norm``;
- it is an Embedding where X is called so (``embed_tokens``, ``wte``, …); one is not meant where
  X is called nearly so;
- ``X.weight`` with three to five dimensions is a convolution, unless X is below ``experts``;
- ``X.3.…`` is one of several blocks, of which the outermost are loaded one by one.

Everything else is kept as it is, each tensor in its own dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import Embedding, Module, Parameter
from transformers import PretrainedConfig, PreTrainedModel

from llmcompressor.checkpoint.blueprint import Blueprint
from llmcompressor.checkpoint.existing_quantization import merge_quantization
from llmcompressor.checkpoint.layout import LoadedName
from llmcompressor.checkpoint.reading import DTYPES
from llmcompressor.checkpoint.shards import natural_key
from llmcompressor.checkpoint.source import SourceInfo, TensorHeader
from llmcompressor.checkpoint.undeclared import check_dense, codes_in, undeclared_error
from llmcompressor.errors import CheckpointError

__all__ = ["TreeModel", "build_tree", "tied_pair", "untied"]

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
_CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


_NUMBERED = re.compile(r"\.\d+\.")
_HEAD_NAME = "lm_head"
"""What transformers and the servers call the output head."""


class TreeConfig(PretrainedConfig):  # type: ignore[no-untyped-call]  # transformers has no types
    """A configuration that says nothing: ``config.json`` is carried over as it is."""

    model_type = ""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The same, whatever it is made from."""
        return cls()

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> Any:
        """Another one where the original has one within: names get a prefix when served then."""
        return PretrainedConfig() if getattr(self, "_is_wrapped", False) else self


class Linear(nn.Linear):
    """A Linear that spends no time on first values."""

    def reset_parameters(self) -> None:
        """Leave the weight as it is: it has no data."""


class TreePart(Module):
    """Holds modules and tensors of which nothing is known but their names."""


class TreeBlock(TreePart):
    """One of several numbered parts."""


class TreeModel(PreTrainedModel):  # type: ignore[no-untyped-call]  # transformers has no types
    """A model made of names; it cannot be run.

    Args:
        config: of no meaning.
        dtype: what its configuration says, or most of its tensors have.

    Attributes:
        doubtful: Linears that may be norms or embeddings: not to be quantized unless they
            are named.
        tied: heads that the configuration ties to an embedding: not to be quantized, because
            readers do not look at what is stored for them.
        compressed: modules that are quantized already, by name; stand-ins of the classes that
            readers give them.
        existing: what the original's configuration says of these.
    """

    config_class = TreeConfig
    base_model_prefix = "(none)"  # no tensor is called so
    _no_split_modules = [TreeBlock.__name__]  # noqa: RUF012  # as transformers declares it
    _weight_conversions: Sequence[Any] = ()

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
        """The dtype that the configuration keeps."""
        return self._stated_dtype

    def get_input_embeddings(self) -> Any:
        """The embedding of tokens, if it is another tensor than the output's."""
        return None if self._inputs is None else self.get_submodule(self._inputs)

    def get_output_embeddings(self) -> Any:
        """The head, if there is one."""
        return None if self._outputs is None else self.get_submodule(self._outputs)

    def merged(self, quantization: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """The configuration to write: this run's, and the original's of what it has quantized.

        Args:
            quantization: this run's.
            names: the modules that it quantizes.
        """
        quantization = dict(quantization)
        if self._outputs is None and _HEAD_NAME not in quantization["ignore"]:
            # a tied head has no tensor here, and is a Linear to whoever reads the checkpoint
            quantization["ignore"] = [*quantization["ignore"], _HEAD_NAME]
        if self.existing is None:
            return quantization
        modules = {name: self.get_submodule(name) for name in names}
        return merge_quantization(quantization, modules, self.existing, self.compressed)


def build_tree(
    source: SourceInfo,
    headers: Mapping[str, TensorHeader],
    existing: Mapping[str, Any] | None = None,
) -> Blueprint:
    """A model whose modules have the names of a checkpoint's tensors.

    Args:
        source: the checkpoint.
        headers: its tensors, or a view of them with other names.
        existing: the configuration of what is quantized already.

    Returns:
        The model, all of whose weights are on the meta device. Each tensor keeps its name.

    Raises:
        CheckpointError: there is a tensor that cannot be held, or that another method has
            quantized.
    """
    _check(headers, quantized=existing is not None)
    config = TreeConfig()
    config.name_or_path = str(source.directory)
    facts = _Facts.read(source.config)
    config._is_wrapped = facts.is_wrapped
    dtype = facts.dtype or _most_common_dtype(headers.values())
    model = TreeModel(config, dtype)
    model.existing = existing
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name in sorted(headers, key=natural_key):
        path, _, own = name.rpartition(".")
        modules.setdefault(path, {})[own] = headers[name]
    try:
        made: dict[str, Module] = {"": model}
        for path, tensors in _with_parents(modules):
            _add(made, path, tensors)
            if _is_compressed(path, tensors):
                model.compressed[path] = _stand_in(path.rpartition(".")[2])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"A tensor has a name that torch cannot hold: {error}.") from error
    model.doubtful += _unlike_linears(model)
    _find_embeddings(model, facts)
    model.doubtful = list(dict.fromkeys(model.doubtful))
    model.train(mode=False)
    names = {name: LoadedName(name, merged=False) for name in headers}
    return Blueprint(model, replace(source, tensors=headers), names, dtype)


def tied_pair(
    config: Mapping[str, Any], headers: Mapping[str, TensorHeader]
) -> tuple[str, str] | None:
    """The head that a configuration ties to an embedding, and that embedding.

    Args:
        config: the content of ``config.json``.
        headers: the tensors.

    Returns:
        Their paths; that of the head is the usual one where no tensor is stored for it. ``None`` if
        nothing is tied, or there is not one embedding that it may be tied to.
    """
    facts = _Facts.read(config)
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
    return next(iter(stored), _usual_head(inputs[0])), inputs[0]


def _usual_head(embedding: str) -> str:
    """What a head is called, beside the part that holds an embedding.

    >>> _usual_head("model.embed_tokens"), _usual_head("language_model.model.embed_tokens")
    ('lm_head', 'language_model.lm_head')
    """
    *outer, inner, _ = ["", *embedding.split(".")]
    return ".".join([*filter(None, outer), _HEAD_NAME]) if inner == "model" else _HEAD_NAME


def untied(
    source: SourceInfo, headers: Mapping[str, TensorHeader], pair: tuple[str, str]
) -> tuple[SourceInfo, dict[str, TensorHeader]]:
    """A checkpoint as it would be if a head had its own copy of an embedding.

    Args:
        source: the checkpoint.
        headers: its tensors.
        pair: of :func:`tied_pair`.
    """
    head, embedding = pair
    config = dict(source.config)
    for level in (config, config.get("text_config")):
        if isinstance(level, Mapping) and "tie_word_embeddings" in level:
            own = {**level, "tie_word_embeddings": False}
            config = own if level is config else {**config, "text_config": own}
    changed = {**headers, f"{head}.weight": headers[f"{embedding}.weight"]}
    return replace(source, config=config), changed


@dataclass(frozen=True)
class _Facts:
    """What a configuration says that matters here."""

    dtype: torch.dtype | None
    is_tied: bool
    is_wrapped: bool
    vocabulary: frozenset[int]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> _Facts:
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
        if header.dtype not in DTYPES:
            raise CheckpointError(
                f"The tensor {name} of {header.file} has the dtype {header.dtype}, which torch "
                "does not know.",
                "Convert the checkpoint.",
            )
        if not quantized and _BESIDE.match(name.rpartition(".")[2]):
            raise undeclared_error(name, header)
    if not quantized:
        check_dense(headers)


def _is_compressed(path: str, tensors: Mapping[str, TensorHeader]) -> bool:
    """Whether a module has codes, or what stands beside them."""
    whole = {f"{path}.{own}" if path else own: header for own, header in tensors.items()}
    return any(map(_BESIDE.match, tensors)) or next(codes_in(whole), None) is not None


def _most_common_dtype(headers: Iterable[TensorHeader]) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for header in headers:
        dtype = DTYPES[header.dtype]
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + header.nbytes
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _with_parents(
    modules: Mapping[str, Mapping[str, TensorHeader]],
) -> Iterable[tuple[str, Mapping[str, TensorHeader]]]:
    """Every module with its own tensors, parents first."""
    seen = {""}
    yield "", modules.get("", {})
    for path in modules:
        parts = path.split(".") if path else []
        for end in range(1, len(parts) + 1):
            inner = ".".join(parts[:end])
            if inner not in seen:
                seen.add(inner)
                yield inner, modules.get(inner, {})


def _add(made: dict[str, Module], path: str, tensors: Mapping[str, TensorHeader]) -> None:
    """Make one module and put it below its parent, which is made already."""
    module = made.get(path)
    if module is None:
        parent, _, own = path.rpartition(".")
        module = made[path] = _made(path, tensors)
        made[parent].add_module(own, module)
    for name, header in tensors.items():
        empty = torch.empty(header.shape, dtype=DTYPES[header.dtype], device="meta")
        module.register_parameter(name, Parameter(empty, requires_grad=False))


def _made(path: str, tensors: Mapping[str, TensorHeader]) -> Module:
    """A module of the kind that its name and the shape of its weight tell."""
    last = path.rpartition(".")[2]
    header = None if _is_compressed(path, tensors) else tensors.get("weight")
    if header is not None and DTYPES[header.dtype].is_floating_point and 0 not in header.shape:
        dimensions = len(header.shape)
        if dimensions == _MATRIX:
            rows, columns = header.shape
            if _is_embedding(last):
                return Embedding(rows, columns, device="meta")
            return Linear(columns, rows, bias=False, device="meta")
        if dimensions in _CONVOLUTIONS and "experts" not in path.split("."):
            rows, columns, *kernel = header.shape
            kind: Any = _CONVOLUTIONS[dimensions]
            return kind(columns, rows, tuple(kernel), bias=False, device="meta")  # type: ignore[no-any-return]  # of torch
    return TreeBlock() if last.isdigit() else TreePart()


def _stand_in(name: str) -> Linear | Embedding:
    if _is_embedding(name):
        return Embedding(1, 1, device="meta")
    return Linear(1, 1, device="meta")


def _is_embedding(name: str) -> bool:
    """Whether a module is called as embeddings are.

    >>> [_is_embedding(name) for name in ("embed_tokens", "wte", "embed_out", "patch_embedding")]
    [True, True, False, False]
    """
    return bool(_EMBEDDING.fullmatch(name))


def _is_like_embedding(name: str) -> bool:
    """Whether a module may be an embedding, going by its name.

    >>> names = "patch_embedding", "embed_tokens_per_layer", "embedding_projection", "embed_out"
    >>> [_is_like_embedding(name) for name in names]
    [True, True, False, False]
    """
    return bool(_LIKE_EMBEDDING.fullmatch(name)) and not _HEAD.fullmatch(name)


def _unlike_linears(model: TreeModel) -> list[str]:
    """Matrices of norms, and what is called nearly like an embedding.

    They are Linears here, because readers that go by shapes take them for such.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear)
        and (name.endswith("norm") or _is_like_embedding(name.rpartition(".")[2]))
    ]


def _find_embeddings(model: TreeModel, facts: _Facts) -> None:
    """Which modules are the embeddings of a model's input and output, and which may be."""
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
        twin = next((own for own, one in inputs.items() if _alike(one, module)), None)
        if twin is not None and facts.is_tied:
            model.tied.append(name)
        elif twin is not None:
            model._inputs = twin


def _alike(embedding: Embedding, head: Linear) -> bool:
    return embedding.weight.shape == head.weight.shape
