# SPDX-License-Identifier: Apache-2.0
"""Calibration batches of a run, with the masks of their real (non-padding) tokens."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.state import Calibration, State
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import first_tensor, model_inputs, without_cache
from llmcompressor.modeling.patches import (
    eval_mode,
    float32_linears,
    marked_quantized,
    quantization_disabled,
)
from llmcompressor.observers.tokens import token_mask
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.threads import short_spin_waits

# --------------------
# Merging of small calibration batches into larger ones.
#
# Calibration usually runs one sample at a time, which is slow: operations are so short that launch
# overhead and waiting for the slowest thread dominate. Text batches of the same shape are
# therefore run as one. The sizes of the original batches are kept, for observers that count
# batches.

_MERGEABLE = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "loss_mask"}
)
RUN_TOKENS = 2048
"""Tokens that are run at once, where samples are shorter: enough for large products."""


class MergedBatch(NamedTuple):
    """Batches that are run as one."""

    batch: Mapping[str, Any]
    """Their tensors, one below the other."""
    sizes: tuple[int, ...]
    """How many samples each of them brought."""


def merge_batches(
    batches: Iterable[Mapping[str, Any]], tokens: int | None = None
) -> Iterator[MergedBatch]:
    """Merge successive batches of the same shape, up to ``tokens`` (``RUN_TOKENS``) tokens.

    Only batches of plain text with samples of equal length are merged: nothing is padded and
    nothing is reordered.

    >>> ones = [{"input_ids": torch.ones(1, 4, dtype=torch.long)}] * 3
    >>> [merged.sizes for merged in merge_batches(ones, tokens=8)]
    [(1, 1), (1,)]
    """
    tokens = RUN_TOKENS if tokens is None else tokens
    held: list[Mapping[str, Any]] = []
    for batch in batches:
        joined = [*held, batch]
        if held and (
            _merge_key(batch) != _merge_key(held[0])
            or sum(one["input_ids"].numel() for one in joined) > tokens
        ):
            yield _merged(held)
            joined = [batch]
        held = joined
        if _merge_key(batch) is None:
            yield _merged(held)
            held = []
    if held:
        yield _merged(held)


def is_text(batch: Mapping[str, Any]) -> bool:
    """Return True if all of a batch is text, of which each row is a sample of its own."""
    return _merge_key(batch) is not None


def _merge_key(batch: Mapping[str, Any]) -> object:
    """Key that is equal for batches that can be merged; ``None`` if a batch cannot be merged."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not set(batch) <= _MERGEABLE:
        return None
    if any(not isinstance(v, Tensor) or v.shape != ids.shape for v in batch.values()):
        return None
    return tuple(sorted(batch)), ids.shape[1], ids.device


def _merged(batches: list[Mapping[str, Any]]) -> MergedBatch:
    if len(batches) == 1:
        ids = batches[0].get("input_ids")
        size = len(ids) if isinstance(ids, Tensor) and ids.ndim else 1
        return MergedBatch(batches[0], (size,))
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    return MergedBatch(joined, tuple(len(batch["input_ids"]) for batch in batches))


# --------------------
# Calibration mode of a model, and small batches for dry runs.

_TEXT_KEYS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "loss_mask"}
)
_PROBE_TOKENS = 8


@contextlib.contextmanager
def calibration_mode(model: Module) -> Iterator[None]:
    """Set evaluation mode, no gradients, no cache and no fake quantization while the body runs.

    The model is marked as quantized, as some models run another forward then.

    Modules that an earlier modifier has quantized run with its weights, but their activations
    are not quantized, so that only the error of the weights is measured.
    """
    with (
        eval_mode(model),
        quantization_disabled(model),
        torch.no_grad(),
        without_cache(model),
        marked_quantized(model),
        float32_linears(),
    ):
        yield


def small_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small slice of a text batch for dry runs; other batches are returned whole."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    if set(tensors) != set(batch) or not set(batch) <= _TEXT_KEYS:
        return dict(batch)
    if "input_ids" not in batch:
        return dict(batch)
    shape = batch["input_ids"].shape
    if any(value.shape != shape for value in tensors.values()):  # masks of four dimensions
        return dict(batch)
    return {key: value[:1, :_PROBE_TOKENS] for key, value in batch.items()}


# --------------------
# Calibration batches of a run, with the masks of their real (non-padding) tokens.

_IGNORED_LABEL = -100
"""What stands in labels where there is nothing to predict."""


class CalibrationBatches(Sequence[Mapping[str, Any]]):
    """Calibration batches, small ones merged, with token masks and the model's forward on them.

    Args:
        model: the model to run.
        batches: mappings of the model's arguments.
        use_loss_mask: count only the tokens of each batch's ``loss_mask``.
        ranks: the ranks that run the batches, each a part of them.

    Attributes:
        first: the first batch of all ranks.
    """

    def __init__(
        self,
        model: Module,
        batches: Iterable[Mapping[str, Any]],
        *,
        use_loss_mask: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self._model = model
        self._ranks = ranks or Ranks()
        every = list(batches)
        merged = list(merge_batches(every[self._ranks.rank :: self._ranks.count]))
        self._batches = [one.batch for one in merged]
        self._sizes = [one.sizes for one in merged]
        ends = list(accumulate(len(sizes) for sizes in self._sizes))
        places = [range(end - len(own), end) for end, own in zip(ends, self._sizes, strict=True)]
        self._ranks.tally["samples"] = sum(map(sum, self._sizes))
        step, begin = self._ranks.count, self._ranks.rank
        self._numbers = [tuple(begin + step * place for place in own) for own in places]
        if not self._batches:
            raise DatasetError(
                "The calibration data holds no batch.", "Give at least one sample to calibrate on."
            )
        self.first = every[0] if self._ranks.count > 1 else self._batches[0]
        if use_loss_mask and not any("loss_mask" in batch for batch in self._batches):
            logger.warning("use_loss_mask has no effect: no sample has a loss_mask.")
        self._masks = [self._mask(batch, use_loss_mask) for batch in self._batches]

    def __getitem__(self, index: int) -> Mapping[str, Any]:  # type: ignore[override]
        return self._batches[index]

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def tokens(self) -> int:
        """Number of positions that this rank runs, padding included, which fill its memory."""
        return sum(_positions(batch) for batch in self._batches)

    @cached_property
    def real_tokens(self) -> int:
        """Number of real tokens (positions that are not masked) of all ranks, which all ask."""
        masks = zip(self._batches, self._masks, strict=True)
        own = sum(_positions(one) if mask is None else int(mask.sum()) for one, mask in masks)
        return int(self._ranks.sum_all(torch.tensor(own), what="number of tokens"))

    def mask(self, index: int) -> Tensor | None:
        """Mask ``[batch, tokens]`` of the real tokens of a batch; ``None`` if all are real."""
        return self._masks[index]

    def sizes(self, index: int) -> tuple[int, ...]:
        """Number of samples of each original batch that was merged into this one."""
        return self._sizes[index]

    def numbers(self, index: int) -> tuple[int, ...]:
        """Places of these original batches among those of all ranks."""
        return self._numbers[index]

    def run(self, batch: Mapping[str, Any]) -> object:
        """Run the model's forward on a batch."""
        return self._model(**model_inputs(self._model, batch))

    def runner(self, batch: Mapping[str, Any]) -> Callable[[], object]:
        """Return :meth:`run` with the batch bound, to be called later."""
        return lambda: self.run(batch)

    @staticmethod
    def _mask(batch: Mapping[str, Any], use_loss_mask: bool) -> Tensor | None:
        mask = token_mask(batch)
        loss_mask = batch.get("loss_mask") if use_loss_mask else None
        if isinstance(loss_mask, Tensor):
            return loss_mask.bool() if mask is None else mask & loss_mask.bool()
        return mask


def _positions(batch: Mapping[str, Any]) -> int:
    """Number of token positions of a batch; for inputs without ids, estimated from their shapes."""
    ids = batch.get("input_ids")
    if isinstance(ids, Tensor):
        return ids.numel()
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.ndim > 1]
    return max((tensor.shape[0] * tensor.shape[-1] for tensor in tensors), default=1)


@contextlib.contextmanager
def calibration_batches(
    model: Module,
    dataloader: Iterable[Mapping[str, Any]] | None,
    state: State,
    *,
    use_loss_mask: bool = False,
) -> Iterator[CalibrationBatches]:
    """Put the model into calibration mode and yield its batches; reset the state afterwards."""
    if dataloader is None:
        raise DatasetError(
            "The recipe needs calibration data and none was given.",
            "Pass dataset=...",
        )
    batches = CalibrationBatches(
        model, dataloader, use_loss_mask=use_loss_mask, ranks=state.run.ranks
    )
    with (
        calibration_mode(model),
        short_spin_waits(),
        _encoder_decoder_masks(model, batches, state),
    ):
        try:
            yield batches
        finally:
            state.batch_data = None
            state.calibration = Calibration()


calibrating = calibration_batches
"""The name that pipelines written for earlier releases import."""


@contextlib.contextmanager
def _encoder_decoder_masks(
    model: Module, batches: CalibrationBatches, state: State
) -> Iterator[None]:
    """Set the state's token mask per module in an encoder-decoder: the encoder's or the decoder's.

    Modules of the encoder use the encoder's mask, and so do the keys and values of cross
    attention, which get the encoder's output. Other modules of the decoder use the decoder's.
    """
    encoder = _encoder_of(model)
    if encoder is None:
        yield
        return
    inside, padding = set(encoder.modules()), _padding_token(model)
    # Keyed by batch: all batches pass the encoder before the first one enters the decoder.
    returned: dict[int, weakref.ref[Tensor]] = {}

    def remember(module: Module, args: tuple[Any, ...], output: Any) -> None:
        values = output.values() if isinstance(output, Mapping) else (output,)
        tensor = first_tensor(tuple(values), {})
        if tensor is not None and state.batch_data is not None:
            returned[id(state.batch_data)] = weakref.ref(tensor)

    def choose(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = state.batch_data
        if batch is None:
            return
        encoded = returned.get(id(batch))
        given, known = first_tensor(args, kwargs), None if encoded is None else encoded()
        crossed = (
            given is not None
            and known is not None
            and (given is known or given.data_ptr() == known.data_ptr())
        )
        encodes = module in inside or crossed
        state.calibration.token_mask = (
            token_mask(batch) if encodes else _decoder_mask(batch, padding)
        )

    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    handles = [encoder.register_forward_hook(remember)]
    handles += [
        leaf.register_forward_pre_hook(choose, with_kwargs=True, prepend=True) for leaf in leaves
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _decoder_mask(batch: Mapping[str, Any], padding: tuple[int, bool] | None) -> Tensor | None:
    """Mask of a decoder's real tokens, for which most collators provide no attention mask.

    Args:
        batch: has decoder inputs, or labels from which they are made by a shift of one position.
        padding: result of :func:`_padding_token`.
    """
    if "decoder_attention_mask" in batch:
        return token_mask(batch, "decoder_attention_mask")
    labels, ids = batch.get("labels"), batch.get("decoder_input_ids")
    if (
        isinstance(labels, Tensor)
        and labels.ndim == 2
        and (not isinstance(ids, Tensor) or ids.shape == labels.shape)
    ):
        wanted_BT = labels.ne(_IGNORED_LABEL)
        return _mask_up_to_last(
            wanted_BT if padding is None else wanted_BT & _non_padding_mask(labels, *padding)
        )
    if isinstance(ids, Tensor):
        return None if padding is None else _mask_up_to_last(_non_padding_mask(ids, *padding))
    return token_mask(batch)


def _mask_up_to_last(wanted_BT: Tensor) -> Tensor | None:
    """Mask of each row up to its last wanted token, always with the first; ``None`` if all True."""
    real_BT = wanted_BT.flip(-1).cumsum(-1).flip(-1) > 0
    real_BT[:, 0] = True  # the token that starts every sequence, often the padding token
    return None if bool(real_BT.all()) else real_BT


def _non_padding_mask(ids_BT: Tensor, padding: int, is_end: bool) -> Tensor:
    """Mask of non-padding tokens; if padding is the end token too, its first occurrence counts."""
    real_BT = ids_BT.ne(padding)
    if is_end:
        real_BT[:, 1:] |= real_BT[:, :-1].clone()
    return real_BT


def _padding_token(model: Module) -> tuple[int, bool] | None:
    """Return the padding token id and whether it is an end token too; ``None`` if undefined."""
    config = getattr(model, "config", None)
    padding, ends = (getattr(config, f"{name}_token_id", None) for name in ("pad", "eos"))
    if padding is None:
        return None
    return padding, padding in (ends if isinstance(ends, list) else [ends])


def _encoder_of(model: Module) -> Module | None:
    config, get_encoder = getattr(model, "config", None), getattr(model, "get_encoder", None)
    if not getattr(config, "is_encoder_decoder", False) or get_encoder is None:
        return None
    encoder = get_encoder()
    return encoder if isinstance(encoder, Module) and encoder is not model else None
