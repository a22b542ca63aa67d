# SPDX-License-Identifier: Apache-2.0
"""The workspace of a run, which every call of a modifier receives.

It is imported wherever events are, so torch is imported only where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from llmcompressor.core.block_source import BlockSource
from llmcompressor.errors import InputError

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from torch import Tensor
    from torch.nn import Module

    from llmcompressor.core.modifier import Modifier
    from llmcompressor.modeling.call_graph import CallOrder
    from llmcompressor.numerics.input_sums import InputSums
    from llmcompressor.runtime.collectives import Ranks

__all__ = [
    "Calibration",
    "Data",
    "Hardware",
    "ModelParameterizedLayer",
    "ModifiedState",
    "ModuleFacts",
    "RunSettings",
    "Schedule",
    "State",
]


@dataclass
class Data:
    """The data sets of a run, by purpose."""

    train: Any = None
    val: Any = None
    test: Any = None
    calib: Any = None


class Device(str):
    """A device that compares equal to its name as well, with or without a number.

    ``"cuda:0"`` is ``torch.device("cuda:0")``, ``"cuda:0"`` and ``"cuda"``; torch takes it wherever
    it takes the name of a device.
    """

    @property
    def type(self) -> str:
        """The kind of device, such as ``"cuda"``."""
        return str(self).partition(":")[0]

    @property
    def index(self) -> int | None:  # type: ignore[override]  # as that of a torch.device
        """Its number; ``None`` without one."""
        number = str(self).partition(":")[2]
        return int(number) if number else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str) and type(other).__name__ != "device":
            return NotImplemented
        theirs, _, number = str(other).partition(":")
        kind, _, mine = str(self).partition(":")
        return theirs == kind and (not number or not mine or number == mine)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.type)


@dataclass
class Hardware:
    """The devices and processes of a run.

    Attributes:
        device: the device of the model's first parameter.
        devices: every device that holds parameters of the model, in the model's order.
        rank: this process among all processes of the run.
        world_size: the number of processes.
        local_rank: this process among those on the same machine.
        local_world_size: the number of processes on this machine.
        distributed: whether a process group is up.
        distributed_strategy: how the model is sharded over the processes: ``"none"``,
            ``"ddp"``, ``"fsdp"``, ``"deepspeed"``, ``"zero3"`` (DeepSpeed in pieces), or
            ``"replicated"`` when each process holds its own model.
    """

    device: Device | None = None
    devices: list[torch.device] | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    distributed: bool | None = None
    distributed_strategy: str | None = None

    @classmethod
    def detect(cls, model: Module | None = None) -> Hardware:
        """Detect every field from the running process and from the model's devices."""
        from torch import distributed as dist  # noqa: PLC0415

        devices = _devices_of(model)
        up = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if up else (0, 1)
        return cls(
            device=Device(devices[0]),
            devices=devices,
            rank=rank,
            world_size=world_size,
            # Without a launcher that says otherwise all processes are on this machine.
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            distributed=up,
            distributed_strategy=_detect_strategy(model) if up else "none",
        )


def _devices_of(model: Module | None) -> list[torch.device]:
    """The devices of the model's parameters, in order of appearance; never empty."""
    import torch  # noqa: PLC0415

    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    found = dict.fromkeys(parameter.device for parameter in parameters)
    real = [device for device in found if device.type != "meta"]
    if real:
        return real
    # Nothing is loaded yet: the work will be done on what the machine has.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [accelerator or torch.device("cpu")]


def _detect_strategy(model: Module | None) -> str:
    wrappers = {
        "FullyShardedDataParallel": "fsdp",
        "FSDPModule": "fsdp",
        "DistributedDataParallel": "ddp",
    }
    # By class name: importing the wrappers would load them into every run.
    for module in model.modules() if model is not None else ():
        for ancestor in type(module).__mro__:
            if ancestor.__name__ in wrappers:
                return wrappers[ancestor.__name__]
    return "replicated"


# --------------------
# What a run tells modifiers beside the model, a subject each.


@dataclass
class Schedule:
    """Progress and units of a run's schedule.

    Attributes:
        start: where a resumed run begins, counted as the schedules are.
        resumes: the run continues from a checkpoint that is not loaded yet: nothing starts before.
        aborted: an error has ended the run: on finalizing, a modifier undoes what it has begun,
            and does not complete it.
        steps_per_epoch: optimizer steps in an epoch.
        batches_per_step: batches that make up one optimizer step.
        invocations_per_step: calls of whatever steps the optimizer, for one step of it.
    """

    start: float | None = None
    resumes: bool = False
    aborted: bool = False
    steps_per_epoch: int | None = None
    batches_per_step: int | None = None
    invocations_per_step: int | None = None


@dataclass
class Calibration:
    """The current calibration pass; reset when it ends.

    Attributes:
        token_mask: bool ``[batch, tokens]``, true where the current batch has a token and not
            padding.
        batch_sizes: number of samples in each of the batches that are now run as one.
        batch_numbers: the places of these batches among those of all ranks.
        reference_inputs: for the current batch, the input of each module in the original model.
        propagates_error: error correction: modules are calibrated on the outputs of the compressed
            modules before them; else on the original ones.
        call_order: the order in which a forward calls modules, and which share an input tensor.
    """

    token_mask: Tensor | None = None
    batch_sizes: tuple[int, ...] | None = None
    batch_numbers: tuple[int, ...] | None = None
    reference_inputs: Mapping[Module, Tensor] | None = None
    propagates_error: bool = False
    call_order: CallOrder | None = None


@dataclass
class RunSettings:
    """Settings of the whole run that modifiers follow.

    Attributes:
        block_source: the blocks that pipelines load and modifiers finish one by one.
        activation_budget: bytes of activations that may be kept in main memory; ``None``: as the
            free memory allows.
        device_memory: maximum bytes that a run may use of an accelerator; ``None``: what is free.
        use_loss_mask: only tokens count whose ``loss_mask`` in a batch is 1.
        keeps_tied_embeddings: the user has asked for tied embeddings to stay tied.
        ranks: the ranks that share the samples and the work; ``None``: this process has all.
        divided: modules that all ranks solve together, each a part of the rows.
        kept_inputs: sums of the inputs of the Linears at work, where an earlier run has kept them
            and this one runs no data. Whoever changes inputs changes them too; ``None``: data runs.
    """

    block_source: BlockSource = field(default_factory=BlockSource, compare=False)
    activation_budget: int | None = None
    device_memory: int | None = None
    use_loss_mask: bool = False
    keeps_tied_embeddings: bool = False
    ranks: Ranks | None = field(default=None, compare=False)
    divided: set[Module] = field(default_factory=set, compare=False)
    kept_inputs: dict[Module, InputSums] | None = field(default=None, compare=False)


@dataclass
class ModuleFacts:
    """Facts that modifiers of a recipe tell each other, by module.

    Attributes:
        error_corrected: modules whose weight was already fitted, in this calibration, to the
            original model's outputs on its own inputs.
        changed_later: modules whose weight a modifier changes once they are calibrated, before
            later modifiers quantize it.
        quantizer: modules → the modifier of the recipe that quantizes them.
        kv_cache: attention modules whose keys and values a modifier quantizes → its arguments, and
            whether it quantizes their queries too.
        rotated_by: modules whose inputs or outputs a modifier will rotate in the forward → the name
            of the modifier.
        smoothed: norms whose gain a modifier will divide by scales of its own.
        outputs_changed_by: names of the modifiers that scale, rotate or remove outputs of Linears.
    """

    error_corrected: set[Module] = field(default_factory=set)
    changed_later: set[Module] = field(default_factory=set)
    quantizer: dict[Module, Modifier] = field(default_factory=dict)
    kv_cache: dict[Module, tuple[QuantizationArgs, bool]] = field(default_factory=dict)
    rotated_by: dict[Module, str] = field(default_factory=dict)
    smoothed: set[Module] = field(default_factory=set)
    outputs_changed_by: set[str] = field(default_factory=set)


@dataclass
class State:
    """The workspace of a run, shared by the session, the pipelines and the modifiers.

    Fields of earlier releases that are now in one of its parts, such as ``steps_per_epoch`` and
    ``token_mask``, are properties as well.

    Attributes:
        model: the model being compressed.
        teacher_model: the model to learn from, in distillation.
        optimizer: the optimizer of a training run.
        optim_wrapped: whether the caller attached the events to its optimizer.
        loss: the loss last calculated; a modifier may replace it.
        batch_data: the current batch, between ``BATCH_START`` and ``BATCH_END`` and while
            calibrating.
        data: the data sets.
        hardware: the devices and processes of the run.
        loggers: the ``LoggerManager`` of the run, if any.
        model_log_cadence: epochs between two logs of the model's own figures.
        schedule: progress and units of the schedule.
        calibration: the current calibration pass.
        run: settings of the whole run.
        facts: what the modifiers tell each other about modules.
    """

    model: Any = None
    teacher_model: Any = None
    optimizer: Any = None
    optim_wrapped: bool | None = None
    loss: Any = None
    batch_data: Any = None
    data: Data = field(default_factory=Data)
    hardware: Hardware = field(default_factory=Hardware)
    loggers: Any = None
    model_log_cadence: float | None = None
    schedule: Schedule = field(default_factory=Schedule)
    calibration: Calibration = field(default_factory=Calibration)
    run: RunSettings = field(default_factory=RunSettings)
    facts: ModuleFacts = field(default_factory=ModuleFacts)

    @property
    def compression_ready(self) -> bool:
        """Return True if there is a model and, where one is expected, an optimizer.

        An optimizer is expected with training data or attached optimizer events.
        """
        promised = bool(self.optim_wrapped) or self.data.train is not None
        return self.model is not None and (self.optimizer is not None or not promised)

    def update(
        self,
        model: Any = None,
        teacher_model: Any = None,
        optimizer: Any = None,
        attach_optim_callbacks: bool = True,
        train_data: Any = None,
        val_data: Any = None,
        test_data: Any = None,
        calib_data: Any = None,
        copy_data: bool = True,
        start: float | None = None,
        steps_per_epoch: int | None = None,
        batches_per_step: int | None = None,
        loggers: Any = None,
        invocations_per_step: int | None = None,
        model_log_cadence: float | None = None,
        device: torch.device | str | None = None,
        distributed_strategy: str | None = None,
        resumes: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Replace each field for which a value other than ``None`` is given.

        Arguments have the meaning of the fields of that name, of the state or of a part. Others:
        ``attach_optim_callbacks`` says that the caller fires the optimizer's events, ``copy_data``
        that a deep copy of the data is kept. ``device`` is reported instead of the one found.

        Returns:
            The keyword arguments that are no fields of the state.
        """
        sets = {"train": train_data, "val": val_data, "test": test_data, "calib": calib_data}
        if copy_data:
            for role, value in sets.items():
                try:
                    sets[role] = deepcopy(value)
                except TypeError as error:
                    raise InputError(
                        f"The {role} data ({type(value).__name__}) cannot be copied: {error}.",
                        "Pass copy_data=False to use the object itself.",
                    ) from error
        given: dict[Any, dict[str, Any]] = {
            "data": sets,
            "hardware": {
                "device": None if device is None else _as_device(device),
                "distributed_strategy": distributed_strategy,
            },
            "schedule": {
                "start": start,
                "steps_per_epoch": steps_per_epoch,
                "batches_per_step": batches_per_step,
                "invocations_per_step": invocations_per_step,
                "resumes": resumes,
            },
            None: {
                "model": model,
                "teacher_model": teacher_model,
                "optimizer": optimizer,
                "optim_wrapped": attach_optim_callbacks if optimizer is not None else None,
                "loggers": loggers,
                "model_log_cadence": model_log_cadence,
            },
        }
        for part, values in given.items():
            for name, value in values.items():
                if value is not None:
                    setattr(self if part is None else getattr(self, part), name, value)
        return kwargs


def _as_device(device: torch.device | str) -> Device:
    """Return a device, given by name or not."""
    import torch  # noqa: PLC0415

    try:
        return Device(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"The device {device!r} is none that torch knows.", 'Give a device such as "cuda:0".'
        ) from error


def _property_of_part(part: str, name: str) -> property:
    """A property of the state that reads and sets a field of one of its parts."""

    def read(state: State) -> Any:
        return getattr(getattr(state, part), name)

    def write(state: State, value: Any) -> None:
        setattr(getattr(state, part), name, value)

    return property(read, write, doc=f"The same as ``{part}.{name}``.")


for _part, _kind in (("schedule", Schedule), ("calibration", Calibration)):
    for _field in fields(_kind):
        setattr(State, _field.name, _property_of_part(_part, _field.name))


@dataclass
class ModifiedState:
    """The result of a session's call: the model, optimizer and loss to continue with.

    Attributes:
        model: the model, which a modifier may have replaced.
        optimizer: the optimizer.
        loss: the loss to differentiate.
        modifier_data: what the modifiers returned, in recipe order.
    """

    model: Any = None
    optimizer: Any = None
    loss: Any = None
    modifier_data: list[Any] = field(default_factory=list)


# --------------------
# A parameter, and the module that it belongs to.


@dataclass
class ModelParameterizedLayer:
    """A parameter with its module, each by name.

    Attributes:
        layer_name: of the module.
        layer: the module.
        param_name: of the parameter, within the model.
        param: the parameter.
    """

    layer_name: str
    layer: Any
    param_name: str
    param: Any
