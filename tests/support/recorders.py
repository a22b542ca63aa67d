# SPDX-License-Identifier: Apache-2.0
"""Modifiers that record what reaches them, and how to run a pipeline with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pydantic import Field, PrivateAttr
from tests.support.tiny_models import is_ignored
from torch import Tensor
from torch.nn import Module

from llmcompressor.args import DatasetArguments
from llmcompressor.core.contract import Granularity
from llmcompressor.modeling.call_graph import first_tensor
from llmcompressor.modifiers import Modifier
from llmcompressor.pipelines import PIPELINES
from llmcompressor.session.functions import create_session


class Recorder(Modifier):
    """Records the inputs of modules, batch by batch, and the events."""

    targets: list[str] = Field(default_factory=lambda: ["Linear"])
    ignore: list[str] = Field(default_factory=lambda: ["lm_head"])
    granularity: Granularity = Granularity.LINEAR
    twin: bool = False
    round_to: int = 0
    """Digits to round weights to, so that the model changes; 0: it does not."""

    _events: list[Any] = PrivateAttr(default_factory=list)
    _names: dict[Module, str] = PrivateAttr(default_factory=dict)
    _inputs: dict[str, list[Tensor]] = PrivateAttr(default_factory=dict)
    _masks: dict[str, list[Tensor | None]] = PrivateAttr(default_factory=dict)
    _batches: dict[str, list[Any]] = PrivateAttr(default_factory=dict)
    _references: dict[str, list[Tensor | None]] = PrivateAttr(default_factory=dict)
    _told: list[str] = PrivateAttr(default_factory=list)
    _seen_when_told: dict[str, int] = PrivateAttr(default_factory=dict)

    @property
    def requires_calibration_data(self) -> bool:
        return True

    @property
    def finest_granularity(self) -> Granularity:
        return self.granularity

    @property
    def twin_streams(self) -> bool:
        return self.twin

    def calibrated_modules(self, state: Any) -> list[Module]:
        return list(self._names)

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        for name, module in state.model.named_modules():
            named = type(module).__name__ in self.targets or name in self.targets
            if named and not is_ignored(name, self.ignore):
                self._names[module] = name
        return True

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        self._events.append("start")

        def record(module: Module, args: Any, kwargs: Any) -> None:
            name, tensor = self._names[module], first_tensor(args, kwargs)
            reference = (state.calibration.reference_inputs or {}).get(module)
            self._inputs.setdefault(name, []).append(tensor.clone())
            self._masks.setdefault(name, []).append(state.calibration.token_mask)
            self._batches.setdefault(name, []).append(state.batch_data)
            copy = None if reference is None else reference.clone()
            self._references.setdefault(name, []).append(copy)

        for module in self._names:
            self.register_hook(module, record, "forward_pre", with_kwargs=True)

    def on_sequential_epoch_end(
        self, state: Any, event: Any, modules: Iterable[Module], **kwargs: Any
    ) -> None:
        mine = [module for module in modules if module in self._names]
        self._events.append(tuple(self._names[module] for module in mine))
        for module in mine:
            name = self._names[module]
            self._told.append(name)
            self._seen_when_told[name] = len(self._inputs.get(name, []))
            if self.round_to and hasattr(module, "weight"):
                module.weight.data = module.weight.data.round(decimals=self.round_to)

    def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
        self._events.append("end")
        self.remove_hooks()


def run_pipeline(
    model: Module,
    batches: Sequence[Any],
    modifiers: Modifier | list[Modifier],
    pipeline: str = "sequential",
    **arguments: Any,
) -> None:
    """One calibration in a session of its own."""
    recipe = modifiers if isinstance(modifiers, list) else [modifiers]
    with create_session() as session:
        session.initialize(
            model=model, start=-1, recipe=recipe, calib_data=batches, copy_data=False
        )
        try:
            PIPELINES.load(pipeline)()(model, batches, DatasetArguments(**arguments))
        finally:
            session.finalize()


def plain_inputs(
    model: Module, batches: Sequence[Any], names: dict[Module, str]
) -> dict[str, list[Tensor]]:
    """What each module gets in an ordinary forward, by name and call."""
    found: dict[str, list[Tensor]] = {}

    def record(module: Module, args: Any, kwargs: Any) -> None:
        found.setdefault(names[module], []).append(first_tensor(args, kwargs).clone())

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in names]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    return found


def stubs_left(model: Module) -> list[str]:
    """Modules whose forward still pauses."""
    return [
        name
        for name, module in model.named_modules()
        if "paused" in getattr(module.forward, "__qualname__", "")
    ]


def hooks_left(model: Module) -> list[str]:
    """Modules with hooks that are not transformers' own."""

    def foreign(hooks: Any) -> bool:
        return any("transformers" not in getattr(one, "__module__", "") for one in hooks.values())

    return [
        name
        for name, module in model.named_modules()
        if foreign(module._forward_pre_hooks) or foreign(module._forward_hooks)
    ]
