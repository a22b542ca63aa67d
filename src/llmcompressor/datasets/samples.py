# SPDX-License-Identifier: Apache-2.0
"""Samples: the common form of model inputs from tokenizers, processors and tokenized data.

A sample is a dict from a model input's name to its value. Values of :data:`SEQUENCES` are plain
lists with one integer per token; everything else (pixels, audio) is a tensor with a leading
axis along which the samples of a batch are concatenated.

Errors of a sample say what it does ("has input_ids that …"): :func:`errors_naming` puts its name
before them.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, TypeAlias

import torch

from llmcompressor.errors import DatasetError

Sample: TypeAlias = dict[str, Any]

IGNORED_LABEL = -100
"""What the loss functions of transformers leave out."""

FILL: Mapping[str, int] = {"labels": IGNORED_LABEL}
"""What padding is where it is not zero; ``input_ids`` get the tokenizer's own."""

_MASKS = frozenset({"attention_mask", "decoder_attention_mask", "loss_mask"})
_PLACES = ("mm_token_type_ids", "position_ids", "token_type_ids")
_TOKENS = ("input_ids", "decoder_input_ids", "labels")
_DIMS_OF_EMBEDS = 3
"""Those of ``inputs_embeds``: a batch of one, steps, and numbers of each."""
SEQUENCES = _MASKS.union(_PLACES, _TOKENS)
"""Inputs with one integer per token."""

MAIN_INPUTS = frozenset(
    {
        *("flattened_patches", "input_features", "input_ids"),
        *("input_values", "inputs_embeds", "pixel_values"),
    }
)
"""A row with one of these, or with what the model calls so, needs no processor any more."""

_BY_PRODUCTS = frozenset(
    {
        *("length", "offset_mapping", "overflow_to_sample_mapping"),
        *("special_tokens_mask", "token_type_ids"),
    }
)
"""What tokenizers may add, and not every model takes."""


@contextmanager
def errors_naming(where: str) -> Iterator[None]:
    """Put the name of a sample before the errors that the body raises."""
    try:
        yield
    except DatasetError as error:
        joint = " " if error.problem[:1].islower() else ": "
        raise type(error)(f"{where}{joint}{error.problem}", error.remedy) from error


def token_list(value: Any) -> list[int] | None:
    """Convert a sequence of integers, also nested in lists of one, to a list; ``None`` otherwise.

    >>> token_list([[1, 2]]), token_list([[1], [2]]), token_list(3)
    ([1, 2], None, None)
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, (list, tuple)) and len(value) == 1 and _is_sequence(value[0]):
        value = value[0].tolist() if hasattr(value[0], "tolist") else value[0]
    if not isinstance(value, (list, tuple)):
        return None
    try:
        return [operator.index(token) for token in value]
    except TypeError:
        return None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or bool(getattr(value, "ndim", 0))


def from_tokenized(
    row: Mapping[str, Any],
    model_input_names: Collection[str],
    *,
    use_loss_mask: bool,
    keep_labels: bool,
) -> Sample:
    """Convert a tokenized row to a sample, without columns that are not model inputs.

    Args:
        row: has a main input of the model.
        model_input_names: the inputs of the model; if empty, every numeric column is kept.
        use_loss_mask: keep ``loss_mask``.
        keep_labels: for training; otherwise only encoder-decoder models get ``labels``.

    Raises:
        DatasetError: token ids are not a sequence of integers, or a mask has another length.
    """
    dropped = set() if use_loss_mask else {"loss_mask"}
    if not keep_labels and "decoder_input_ids" not in model_input_names:
        dropped.add("labels")
    inputs = (SEQUENCES - _BY_PRODUCTS).union(model_input_names)
    ids: Any = row.get("input_ids")
    # a batch of one: [[...]]
    is_list = isinstance(ids, (list, tuple)) and bool(ids)
    batched = ids.ndim == 2 if hasattr(ids, "ndim") else is_list and _is_sequence(ids[0])
    sample: Sample = {}
    for name, value in row.items():
        if value is None or name in dropped or (model_input_names and name not in inputs):
            continue
        tokens = token_list(value) if name in SEQUENCES else None
        if tokens is None and name in _MASKS:
            tokens = _float_mask(value, name)
        if tokens is not None:
            sample[name] = tokens
            continue
        tensor = None if name == "input_ids" else _as_tensor(value)
        if tensor is not None:
            if tensor.ndim:
                is_batch = batched or (name == "inputs_embeds" and tensor.ndim == 3)
                sample[name] = tensor if is_batch else tensor.unsqueeze(0)
        elif name in {"input_ids", *_MASKS} or (name in SEQUENCES and _is_sequence(value)):
            raise DatasetError(
                f"has {name} that are no sequence of whole numbers: {_find_fault(value)}.",
                "Give one whole number for each token, or leave out what is no input.",
            )
    return _with_mask(sample, decodes="decoder_input_ids" in model_input_names)


def _find_fault(value: Any) -> str:
    """Return the reason why a value is not a sequence of integers."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, (list, tuple)):
        return f"they are a {type(values).__name__}"
    if len(values) > 1 and all(_is_sequence(each) for each in values):
        return f"they are {len(values)} sequences"
    for place, each in enumerate(values):
        if not hasattr(each, "__index__"):
            return f"number {place} of them is {reprlib.repr(each)}"
    return "they are nested"


def _as_tensor(value: Any) -> torch.Tensor | None:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # strings, images, ragged lists
        return None


def _float_mask(value: Any, name: str) -> list[int] | None:
    """Convert a floating-point mask to integers; ``None`` for anything else."""
    tensor = _as_tensor(value)
    if tensor is None or not tensor.is_floating_point():
        return None
    if tensor.numel() != max(tensor.shape, default=0):  # it has rows and columns
        return None
    if not bool((tensor == tensor.round()).all()):
        raise DatasetError(
            f"has values in {name} that are no whole numbers.",
            "Give 1 for a token that counts, and 0 for one that does not.",
        )
    return [int(token) for token in tensor.flatten().tolist()]


def _with_mask(sample: Sample, *, decodes: bool) -> Sample:
    """Add a mask of ones where there is none, and compare the lengths of all sequences."""
    main = "input_ids" if "input_ids" in sample else "inputs_embeds"
    ids: Any = sample.get(main)
    if main == "inputs_embeds":
        if not isinstance(ids, torch.Tensor) or ids.ndim != _DIMS_OF_EMBEDS:
            return sample
        ids = ids[0]
    beside = _PLACES if decodes else (*_PLACES, "labels")  # else labels are the decoder's
    for name in ("attention_mask", "loss_mask", *beside):
        if isinstance(sample.get(name), list) and len(sample[name]) != len(ids):
            raise DatasetError(
                f"has {len(ids)} {main}, but {len(sample[name])} in {name}.",
                "Give as many of both.",
            )
    if main == "input_ids":
        sample.setdefault("attention_mask", [1] * len(ids))
    return sample


def from_processor(
    outputs: Mapping[str, Any], model_input_names: Collection[str], *, keep_labels: bool
) -> Sample:
    """Convert the outputs of a tokenizer or processor for a row to a sample.

    Args:
        outputs: token lists flat or as a batch of one, other values as a batch of one.
        model_input_names: the inputs of the model; empty if unknown.
        keep_labels: for training; otherwise a transcript becomes the decoder's input.

    Raises:
        DatasetError: the outputs are no mapping, have no valid token ids, or no model input.
    """
    if not isinstance(outputs, Mapping):
        raise _unusable(f"a {type(outputs).__name__}", "a dict of the model's inputs")
    sample: Sample = {}
    for name, value in outputs.items():
        if value is None or (name in _BY_PRODUCTS and name not in model_input_names):
            continue
        tokens = token_list(value) if name in SEQUENCES else None
        sample[name] = own = tokens if tokens is not None else _batch_of_one(value)
        if name != "input_ids" or tokens is not None:
            continue
        if not isinstance(own, torch.Tensor) or own.is_floating_point() or own.is_complex():
            raise _unusable(f"input_ids where {_find_fault(value)}", "a sequence of token ids")
    # A forward that only passes its arguments on names none of them.
    if MAIN_INPUTS.intersection(model_input_names) and not set(model_input_names) & sample.keys():
        made = ", ".join(sorted(map(str, sample))) or "nothing"
        raise _unusable(f"{made}, no input of the model", "a dict of the model's inputs")
    decodes = "decoder_input_ids" in model_input_names
    if decodes and "labels" in sample and not keep_labels:  # a transcript of speech
        sample.setdefault("decoder_input_ids", sample["labels"])
        del sample["labels"]
    return _with_mask(sample, decodes=decodes)


def _unusable(made: str, wanted: str) -> DatasetError:
    return DatasetError(
        f"becomes {made} in the tokenizer or processor.",
        f"Give one that makes {wanted}, or data with input_ids.",
    )


def _batch_of_one(value: Any) -> Any:
    """Convert a batch of one to a tensor if possible, also a list of one array."""
    is_list = isinstance(value, (list, tuple)) and len(value) == 1
    tensor = _as_tensor(value[0] if is_list else value)
    if tensor is None:
        return value
    return tensor.unsqueeze(0) if is_list else tensor


def without_batch_axis(sample: Sample) -> Sample:
    """Remove leading axes of one, as users' collators expect samples."""
    return {
        name: value[0] if name not in SEQUENCES and len(value) == 1 else value
        for name, value in sample.items()
    }


def num_tokens(sample: Mapping[str, Any]) -> int | None:
    """Number of real tokens of a sample; ``None`` for a sample without token ids."""
    if "input_ids" not in sample:
        return None
    ids, mask = token_list(sample["input_ids"]), token_list(sample.get("attention_mask"))
    return len(ids or []) if mask is None else sum(mask)


def text_tokens(samples: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Token ids of the samples that are text and nothing else, without padding."""
    found = []
    for sample in samples:
        if "input_ids" in sample and sample.keys() <= SEQUENCES:
            ids, mask = token_list(sample["input_ids"]), token_list(sample.get("attention_mask"))
            found.append((ids or []) if mask is None else list(compress(ids or [], mask)))
    return found


def add_labels(sample: Sample, prompt: Sequence[int]) -> Sample:
    """Add labels to a sample: its token ids, with -100 for the prompt and for padding.

    A ``loss_mask`` is merged into the labels: positions with 0 become -100.

    Args:
        sample: has ``input_ids`` and ``attention_mask``; existing labels are kept.
        prompt: token ids of the prompt; the common prefix with the sample is not learned.
    """
    if "input_ids" not in sample:
        return sample
    made = dict(sample)
    if "labels" not in made:
        labels = _masked(made["input_ids"], made["attention_mask"])
        for place, (token, own) in enumerate(zip(prompt, made["input_ids"], strict=False)):
            if token != own:
                break
            labels[place] = IGNORED_LABEL
        made["labels"] = labels
    if "loss_mask" in made and len(made["loss_mask"]) == len(made["labels"]):
        made["labels"] = _masked(made["labels"], made.pop("loss_mask"))
    return made


def _masked(tokens: Sequence[int], mask: Sequence[int]) -> list[int]:
    return [own if real else IGNORED_LABEL for own, real in zip(tokens, mask, strict=True)]


def pad(sample: Sample, name: str, length: int, *, pad_id: int, side: str) -> list[int]:
    """Return a sequence of a sample, padded to ``length`` on ``side`` "left" or "right"."""
    tokens: list[int] = sample[name]
    fill = pad_id if name in ("input_ids", "decoder_input_ids") else FILL.get(name, 0)
    missing = [fill] * (length - len(tokens))
    return missing + tokens if side == "left" else tokens + missing


def truncate(sample: Sample, name: str, length: int) -> list[int]:
    """Return a sequence of a sample, truncated to ``length``, dropping left padding before text.

    The result begins with the first real token. If fewer than ``length`` tokens follow it, some
    left padding is kept, so that samples of equal length stay equal.
    """
    tokens: list[int] = sample[name]
    # labels of encoder-decoder models are the decoder's
    of_decoder = name.startswith("decoder_") or (name == "labels" and "decoder_input_ids" in sample)
    mask = sample.get("decoder_attention_mask" if of_decoder else "attention_mask")
    start = first_kept(mask, len(tokens), length)
    return tokens[start : start + length]


def first_kept(mask: Any, size: int, length: int) -> int:
    """Return where :func:`truncate` begins in ``size`` tokens with this mask, if it is one."""
    if not isinstance(mask, list) or len(mask) != size or 1 not in mask:
        return 0
    return max(0, min(mask.index(1), size - length))


def truncate_all(sample: Sample, length: int) -> Sample:
    """Truncate each token sequence of a sample to ``length`` tokens."""
    cut = {name: truncate(sample, name, length) for name in token_sequences([sample])}
    return {**sample, **cut}


def token_sequences(samples: Sequence[Sample]) -> list[str]:
    """Names of the token sequences that all samples have, in the first one's order."""
    return [
        name
        for name in samples[0]
        if name in SEQUENCES and all(isinstance(sample.get(name), list) for sample in samples)
    ]


def check_token_ids(sample: Mapping[str, Any], vocab_size: int | None) -> None:
    """Refuse token ids outside ``[0, vocab_size)``; a label may also be -100.

    Raises:
        DatasetError: names the first id without an embedding.
    """
    if vocab_size is None:
        return
    for name in _TOKENS:
        ids = (token_list(sample[name]) if name in sample else None) or []
        if name == "labels":
            ids = [token for token in ids if token != IGNORED_LABEL]
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise DatasetError(
                f"holds the token id {wrong} in its {name}, and the model's vocabulary ends at "
                f"{vocab_size - 1}.",
                "Tokenize with the model's own tokenizer.",
            )
