# SPDX-License-Identifier: Apache-2.0
"""Trial load: the headers of a quantized checkpoint, loaded by the installed transformers.

The class of ``config.json`` is prepared for its ``quantization_config`` on the meta device and
takes each tensor by name, dtype and shape, as ``from_pretrained`` does for a user; no data is read.
Its exception and its loading report are kept. A module that stops the load is made plain and the
load is tried again, so that one report names every kind of module that fails. Of a checkpoint with
many tensors one layer of each kind is loaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Any, TypeAlias

import torch
from torch.nn import Module

from llmcompressor.runtime.progress import hide_tqdm_bars
from llmcompressor.transformers_internals import watch_loading
from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.files import DTYPES
from llmcompressor.verification.modules import EXPERT
from llmcompressor.verification.scheme import settings_of
from llmcompressor.verification.transformers_model import (
    ModelNames,
    class_and_settings,
    class_model,
    config_text,
    float32_names,
    load_headers,
    quiet_compressors,
)

_MOST_FAILURES = 24
_MOST_SHOWN = 200
_TABLES = ("conversion_mapping.py", "core_model_loading.py")
_NUMBER = re.compile(r"\d+")
_MOST_ROWS = 256
_MOST_TENSORS = 20_000
_LAYER = re.compile(r"(?P<layer>(?:.*?\.)?(?:layers|h|blocks|block)\.\d+)\.(?P<rest>.+)")
_DIMENSIONS_OF_STACK = 3
_Headers: TypeAlias = "tuple[tuple[str, TensorInfo], ...]"


@dataclass(frozen=True)
class Failure:
    """Exception that ended a load.

    Attributes:
        message: its own words.
        modules: the modules of the class that it was raised for, and their like.
        is_quantized: they are prepared for codes.
        is_of_tables: it was raised where stored tensors are matched with those of the class.
    """

    message: str
    modules: tuple[str, ...] = ()
    is_quantized: bool = False
    is_of_tables: bool = False


@dataclass(frozen=True)
class TrialLoad:
    """Loading report of transformers, by the names of its class.

    Attributes:
        reader: the class.
        failures: exceptions; the rest is the report of a load without the modules that they name.
        missing: tensors of the class that nothing was loaded into.
        unexpected: tensors of the file without a place.
        mismatched: tensor → its shape in the file and in the class.
        conversions: tensor that is made of others → why it cannot be.
        dtypes: module or stack of experts → the dtype that its weight is unpacked to, where that
            is not the dtype of its inputs.
        caches: attention whose keys and values are rounded.
    """

    reader: str
    failures: tuple[Failure, ...] = ()
    missing: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    conversions: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    caches: frozenset[str] = frozenset()

    @property
    def is_clean(self) -> bool:
        """True if each tensor of the file and of the class has found the other."""
        return not (
            self.failures or self.missing or self.unexpected or self.mismatched or self.conversions
        )


_NOTHING_FOUND = "expected a non-empty list of Tensors"


def _reason(said: str) -> str:
    r"""Return what an error of a conversion says, without its repetitions.

    >>> _reason("expected a non-empty list of Tensors\nError: Concatenate on tensors")
    'it finds no tensor under the names that it looks for'
    """
    if _NOTHING_FOUND in said:
        return "it finds no tensor under the names that it looks for"
    return " ".join(dict.fromkeys(map(str.strip, said.splitlines())))[-_MOST_SHOWN:]


def trial_load(
    config: Mapping[str, Any],
    headers: Mapping[str, TensorInfo],
    dtype: str = "bfloat16",
    plain: Mapping[str, TensorInfo] | None = None,
) -> TrialLoad | None:
    """Load the headers of a quantized checkpoint.

    Args:
        config: the content of ``config.json``, with its ``quantization_config``.
        headers: tensor name → dtype and shape.
        dtype: of the model.
        plain: the tensors of the model before it was quantized, as far as they are known.

    Returns:
        ``None`` where the installed transformers has no class for it, or loads none without data.
    """
    # in one order: a run asks before it and after it, and pays for one load
    text, shapes = config_text(config, quantized=True), tuple(sorted((plain or {}).items()))
    kept, left_out = _one_of_each_kind(dict(sorted(headers.items())))
    if not text:
        return None
    with quiet_compressors():
        return _tried(text, tuple(kept.items()), dtype, shapes, left_out)


def _one_of_each_kind(
    headers: Mapping[str, TensorInfo],
) -> tuple[Mapping[str, TensorInfo], frozenset[str]]:
    """The tensors of one layer of each kind, and the layers that are left out.

    Layers are of one kind if they hold the same names, dtypes and shapes.
    """
    layers: dict[str, dict[str, TensorInfo]] = {}
    for name, info in headers.items() if len(headers) > _MOST_TENSORS else ():
        if found := _LAYER.match(name):
            layers.setdefault(found["layer"], {})[found["rest"]] = info
    kinds = {frozenset(own.items()): layer for layer, own in reversed(layers.items())}
    kept_layers = {layer.rpartition(".")[2] for layer in kinds.values()}
    left_out = frozenset(layer.rpartition(".")[2] for layer in layers) - kept_layers
    kept = {name: info for name, info in headers.items() if not _is_in(name, left_out)}
    return kept, left_out


@lru_cache(maxsize=8)  # a run asks once for each server before it, and once after it
def _tried(
    text: str, headers: _Headers, dtype: str, shapes: _Headers, left_out: frozenset[str]
) -> TrialLoad | None:
    config = json.loads(text)
    kind, plain = class_and_settings(config), class_model(config)
    if kind is None or plain is None:
        return None
    state, settings = dict(headers), dict(settings_of(config) or {})
    failures: list[Failure] = []
    while True:
        tried = _Attempt(kind, settings, state, getattr(torch, dtype, torch.bfloat16))
        if tried.is_of_no_data:
            return None
        if tried.error is None:
            found = tried.report(tuple(failures), _experts_of(state, dict(shapes), plain))
            missing = (name for name in found.missing if not _is_in(name, left_out))
            return replace(found, missing=frozenset(missing))
        failure = tried.failure()
        failures.append(failure)
        if not failure.is_quantized or len(failures) == _MOST_FAILURES:
            return TrialLoad(tried.reader, tuple(failures))
        _make_plain(failure.modules, state, settings, plain)


def _is_in(name: str, layers: frozenset[str]) -> bool:
    """True if a tensor lies in one of some layers, whatever a class puts before their names."""
    found = _LAYER.match(name) if layers else None
    return found is not None and found["layer"].rpartition(".")[2] in layers


def _make_plain(
    modules: tuple[str, ...], state: dict[str, TensorInfo], settings: dict[str, Any], plain: Any
) -> None:
    """Give modules of the class a plain weight in place of their codes."""
    names = ModelNames(plain)
    coded = {name.rpartition(".")[0] for name in state if name.endswith("weight_scale")}
    for name in coded:
        own = names.first(f"{name}.weight")
        if own.rpartition(".")[0] in modules:
            for each in [each for each in state if each.rpartition(".")[0] == name]:
                if not each.endswith(".bias"):
                    del state[each]
            state[f"{name}.weight"] = TensorInfo("BF16", tuple(plain.get_parameter(own).shape))
    settings["ignore"] = [*(settings.get("ignore") or ()), *modules]


class _Attempt:
    """A load, with what was known when it ended.

    Args:
        found: the class and its configuration.
        settings: the ``quantization_config``.
        state: tensor name → dtype and shape.
        dtype: of the model.
    """

    def __init__(
        self,
        found: tuple[Any, Any],
        settings: dict[str, Any],
        state: Mapping[str, TensorInfo],
        dtype: torch.dtype,
    ) -> None:
        self.reader, self.dtype = found[0].__name__, dtype
        self.model: Any = None
        self.info: Any = None
        self.error: Exception | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unpacking: Any = None
        self._load(found, settings, state)
        self.conversions: dict[str, str] = (
            {} if self.info is None else dict(self.info.conversion_errors)
        )
        if self.conversions:  # they are the reason, and the report is whole
            self.error = None

    def _load(
        self, found: tuple[Any, Any], settings: dict[str, Any], state: Mapping[str, TensorInfo]
    ) -> None:
        kind, config = found

        def begun(model: Any, given: tuple[Any, ...]) -> None:
            self.model = model
            self.unpacking = next(_unpacking_operations(given), None)
            self.shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}

        def loaded(info: Any) -> None:
            self.info = info

        if settings:
            config.quantization_config = json.loads(json.dumps(settings))
        tensors = {
            name: torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
            for name, info in state.items()
        }
        try:
            with hide_tqdm_bars(), contextlib.redirect_stderr(io.StringIO()):
                load_headers(watch_loading(kind, begun, loaded), config, tensors, self.dtype)
        except Exception as error:  # of whatever kind: it is what a user would see
            self.error = error
        finally:
            if settings:
                del config.quantization_config

    @property
    def is_of_no_data(self) -> bool:
        """True if it failed for want of data, which another load has."""
        return self.error is not None and "meta tensor" in str(self.error)

    def failure(self) -> Failure:
        """The exception, with the module that was worked on and all like it."""
        error = self.error
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST_SHOWN]}"
        paths = {} if self.model is None else {one: n for n, one in self.model.named_modules()}
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__ if error else None)]
        held = (
            frame.f_locals.get(name)
            for frame in reversed(frames)
            for name in ("self", "module", "mod")
        )
        found = next((one for one in held if isinstance(one, Module) and paths.get(one)), None)
        if found is None:
            files = {frame.f_code.co_filename for frame in frames}
            tables = any(one.endswith(_TABLES) for one in files)
            return Failure(message, is_of_tables=tables)
        form = _NUMBER.sub("*", paths[found])
        alike = [path for one, path in paths.items() if _NUMBER.sub("*", path) == form]
        return Failure(message, tuple(alike), hasattr(found, "quantization_scheme"))

    def report(self, failures: tuple[Failure, ...], experts: Iterable[_Expert]) -> TrialLoad:
        """The loading report.

        Args:
            failures: of the loads before.
            experts: one of each kind.
        """
        shapes = {
            name: (tuple(ours), tuple(theirs)) for name, ours, theirs in self.info.mismatched_keys
        }
        for name, one in self.model.state_dict().items():
            ours, theirs = tuple(one.shape), self.shapes.get(name, tuple(one.shape))
            if one.ndim == _DIMENSIONS_OF_STACK:  # without data columns are not unpacked exactly
                ours = (ours[0], *theirs[1:])
            # packed zero points and single numbers are looked at by some releases alone
            if ours != theirs and one.numel() != 1 and not name.endswith("zero_point"):
                shapes.setdefault(name, (ours, theirs))
        told = {
            name: _reason(str(said))
            for name, said in self.conversions.items()
            if "meta tensor" not in str(said)
        }
        for expert in experts if self.unpacking is not None else ():
            said = self._unpacked(expert)
            if said and expert.stack in self.shapes:
                told.setdefault(expert.stack, said)
        return TrialLoad(
            self.reader,
            failures,
            frozenset(self.info.missing_keys),
            frozenset(self.info.unexpected_keys),
            shapes,
            told,
            dict(self._dtypes()),
            frozenset(name for name, one in self.model.named_modules() if hasattr(one, "kv_cache")),
        )

    def _unpacked(self, expert: _Expert) -> str:
        """Why an expert is not unpacked to its weight, by the operation that is to do it."""
        weights: Any = getattr(getattr(self.unpacking, "scheme", None), "weights", None)
        packed: Any = expert.tensors.get("expert.weight_packed")
        is_packed = weights is not None and packed is not None and packed.dtype is torch.int32
        if is_packed and packed.shape[-1] != ceil(expert.shape[1] * weights.num_bits / 32):
            return f"its codes are read as {weights.num_bits}-bit integers, and are none"
        patterns = list(expert.tensors)
        try:
            found = self.unpacking.convert(
                {name: [tensor] for name, tensor in expert.tensors.items()},
                source_patterns=patterns,
                target_patterns=patterns[:1],
                full_layer_name=expert.stack,
                model=self.model,
                config=self.model.config,
            )
        except Exception as error:  # an operation of any kind
            return f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST_SHOWN]}"
        shapes = [list(one[0].shape[-2:]) for one in found.values()]
        if shapes == [list(expert.shape)]:
            return ""
        return f"its codes are unpacked to {shapes}, and it has the shape {list(expert.shape)}"

    def _dtypes(self) -> Iterator[tuple[str, str]]:
        """Weights that are unpacked to another dtype than their inputs have."""
        kept = float32_names(self.model, self.dtype)
        known: dict[object, torch.dtype | None] = {}
        for name, module in self.model.named_modules():
            scheme = getattr(module, "quantization_scheme", None)
            if scheme is None or scheme.weights is None or scheme.format is None:
                continue
            own = {each: one for each, one in module.named_parameters(recurse=False)}
            key = (id(scheme), *((each, one.dtype) for each, one in own.items()))
            if key not in known:
                known[key] = _unpacked_dtype(own, scheme)
            wanted = torch.float32 if kept(f"{name}.weight") else self.dtype
            if known[key] not in (None, wanted):
                yield name, str(known[key]).removeprefix("torch.")
        for name, stack in self.model.named_parameters():
            wanted = torch.float32 if kept(name) else self.dtype
            if "experts" in name and stack.ndim == 3 and stack.dtype != wanted:
                yield name, str(stack.dtype).removeprefix("torch.")


def _unpacked_dtype(own: dict[str, torch.Tensor], scheme: Any) -> torch.dtype | None:
    """The dtype that compressed-tensors unpacks a weight to, ``None`` if it does not."""
    from compressed_tensors.compressors import BaseCompressor  # noqa: PLC0415

    try:
        kind: Any = BaseCompressor.get_value_from_registry(scheme.format.value)
        found: torch.dtype = kind.decompress(dict(own), scheme)["weight"].dtype
    except Exception:  # what is missing is in the report
        return None
    return found


@dataclass(frozen=True)
class _Expert:
    """Codes of one expert, some rows of zeros.

    Attributes:
        stack: the tensor of the class that it is a part of.
        tensors: its own, by the names of a pattern.
        shape: rows and columns of its weight.
    """

    stack: str
    tensors: Mapping[str, torch.Tensor]
    shape: tuple[int, int]


def _experts_of(
    state: Mapping[str, TensorInfo], plain: Mapping[str, TensorInfo], model: Any
) -> Iterator[_Expert]:
    """An expert of each kind that is stored by itself."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in state.items():
        module, _, last = name.rpartition(".")
        if EXPERT.match(module):
            modules.setdefault(module, {})[last] = info
    seen: set[object] = set()
    names = ModelNames(model) if modules else None
    for module, own in modules.items():
        weight = plain.get(f"{module}.weight")
        kinds = sorted((each, info.dtype, info.shape) for each, info in own.items())
        form = (_NUMBER.sub("*", module), *kinds)
        if names is None or weight is None or "weight_scale" not in own or form in seen:
            continue
        seen.add(form)
        rows, columns = weight.shape
        scales = own["weight_scale"].shape
        kept = min(rows, _MOST_ROWS) if scales[:1] in ((), (1,), (rows,)) else rows
        tensors = {
            f"expert.{each}": torch.zeros(
                [kept if size == rows and not at else size for at, size in enumerate(info.shape)],
                dtype=DTYPES[info.dtype],
            )
            for each, info in own.items()
            if each.startswith("weight")
        }
        if "weight_shape" in own:
            tensors["expert.weight_shape"] = torch.tensor([kept, columns])
        yield _Expert(names.first(f"{module}.weight"), tensors, (kept, columns))


def _unpacking_operations(arguments: Iterable[Any]) -> Iterator[Any]:
    """Operations that unpack experts, of the tables of a load."""
    for config in arguments:
        for converter in getattr(config, "weight_mapping", None) or ():
            for one in getattr(converter, "operations", ()):
                if hasattr(one, "hf_quantizer"):
                    yield one
