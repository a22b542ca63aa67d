# SPDX-License-Identifier: Apache-2.0
"""Calibration batches of a run, with the masks of their real (non-padding) tokens."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.inputs import model_inputs
from llmcompressor.observers.tokens import token_mask
from llmcompressor.pipelines.merging import merge_batches
from llmcompressor.pipelines.model_runs import calibration_mode
from llmcompressor.pipelines.quick_linears import quick_linears
from llmcompressor.threads import short_waits

if TYPE_CHECKING:
    from llmcompressor.core.state import State

__all__ = ["CalibrationBatches", "calibrating"]


_IGNORED_LABEL = -100
"""What stands in labels where there is nothing to predict."""


class CalibrationBatches(Sequence[Mapping[str, Any]]):
    """Calibration batches, small ones merged, with token masks and the model's forward on them.

    Args:
        model: the model to run.
        batches: mappings of the model's arguments.
        use_loss_mask: count only the tokens of each batch's ``loss_mask``.
    """

    def __init__(
        self, model: Module, batches: Iterable[Mapping[str, Any]], *, use_loss_mask: bool = False
    ) -> None:
        self._model = model
        merged = list(merge_batches(batches))
        self._batches = [one.batch for one in merged]
        self._sizes = [one.sizes for one in merged]
        if not self._batches:
            raise DatasetError(
                "The calibration data holds no batch.", "Give at least one sample to calibrate on."
            )
        if use_loss_mask and not any("loss_mask" in batch for batch in self._batches):
            logger.warning("use_loss_mask has no effect: no sample has a loss_mask.")
        self._masks = [self._mask(batch, use_loss_mask) for batch in self._batches]

    def __getitem__(self, index: int) -> Mapping[str, Any]:  # type: ignore[override]
        return self._batches[index]

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def tokens(self) -> int:
        """Total number of positions, padding included, as it determines activation memory."""
        return sum(_positions(batch) for batch in self._batches)

    @property
    def real_tokens(self) -> int:
        """Total number of real tokens (positions that are not masked)."""
        masks = zip(self._batches, self._masks, strict=True)
        return sum(_positions(one) if mask is None else int(mask.sum()) for one, mask in masks)

    def mask(self, index: int) -> Tensor | None:
        """Mask ``[batch, tokens]`` of the real tokens of a batch; ``None`` if all are real."""
        return self._masks[index]

    def sizes(self, index: int) -> tuple[int, ...]:
        """Number of samples of each original batch that was merged into this one."""
        return self._sizes[index]

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
def calibrating(
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
    batches = CalibrationBatches(model, dataloader, use_loss_mask=use_loss_mask)
    with (
        calibration_mode(model),
        quick_linears(),
        short_waits(),
        _two_masks(model, batches, state),
    ):
        try:
            yield batches
        finally:
            state.batch_data = state.token_mask = state.reference_inputs = None
            state.batch_sizes = None
            state.call_order = None
            state.propagates = False


@contextlib.contextmanager
def _two_masks(model: Module, batches: CalibrationBatches, state: State) -> Iterator[None]:
    """Set ``state.token_mask`` per module in an encoder-decoder: the encoder's or the decoder's.

    Modules of the encoder use the encoder's mask, and so do the keys and values of cross
    attention, which get the encoder's output. Other modules of the decoder use the decoder's.
    """
    encoder = _encoder_of(model)
    if encoder is None:
        yield
        return
    inside, padding = set(encoder.modules()), _padding_of(model)
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
        crossed = encoded is not None and _is_same(first_tensor(args, kwargs), encoded())
        encodes = module in inside or crossed
        state.token_mask = token_mask(batch) if encodes else _decoder_mask(batch, padding)

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
        padding: result of :func:`_padding_of`.
    """
    if "decoder_attention_mask" in batch:
        return token_mask(batch, "decoder_attention_mask")
    labels, ids = batch.get("labels"), batch.get("decoder_input_ids")
    if isinstance(labels, Tensor) and labels.ndim == 2 and _fits(labels, ids):
        wanted_BT = labels.ne(_IGNORED_LABEL)
        return _up_to_last(
            wanted_BT if padding is None else wanted_BT & _no_padding(labels, *padding)
        )
    if isinstance(ids, Tensor):
        return None if padding is None else _up_to_last(_no_padding(ids, *padding))
    return token_mask(batch)


def _fits(labels: Tensor, ids: Any) -> bool:
    return not isinstance(ids, Tensor) or ids.shape == labels.shape


def _up_to_last(wanted_BT: Tensor) -> Tensor | None:
    """Mask of each row up to its last wanted token, always with the first; ``None`` if all True."""
    real_BT = wanted_BT.flip(-1).cumsum(-1).flip(-1) > 0
    real_BT[:, 0] = True  # the token that starts every sequence, often the padding token
    return None if bool(real_BT.all()) else real_BT


def _no_padding(ids_BT: Tensor, padding: int, is_end: bool) -> Tensor:
    """Mask of non-padding tokens; if padding is the end token too, its first occurrence counts."""
    real_BT = ids_BT.ne(padding)
    if is_end:
        real_BT[:, 1:] |= real_BT[:, :-1].clone()
    return real_BT


def _padding_of(model: Module) -> tuple[int, bool] | None:
    """Return the padding token id and whether it is an end token too; ``None`` if undefined."""
    config = getattr(model, "config", None)
    padding, ends = (getattr(config, f"{name}_token_id", None) for name in ("pad", "eos"))
    if padding is None:
        return None
    return padding, padding in (ends if isinstance(ends, list) else [ends])


def _is_same(tensor: Tensor | None, other: Tensor | None) -> bool:
    """Return True if two tensors are the same or start at the same memory address."""
    if tensor is None or other is None:
        return False
    return tensor is other or tensor.data_ptr() == other.data_ptr()


def _encoder_of(model: Module) -> Module | None:
    config, get_encoder = getattr(model, "config", None), getattr(model, "get_encoder", None)
    if not getattr(config, "is_encoder_decoder", False) or get_encoder is None:
        return None
    encoder = get_encoder()
    return encoder if isinstance(encoder, Module) and encoder is not model else None
