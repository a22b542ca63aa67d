# SPDX-License-Identifier: Apache-2.0
"""The state keeps what it is given, gives back what it has no use for, and knows the hardware."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import distributed, nn

from llmcompressor import core
from llmcompressor.core import Hardware, State
from llmcompressor.core.state import Schedule


def test_every_public_name_can_be_imported():
    assert all(getattr(core, name) is not None for name in core.__all__)
    assert sorted(core.__all__) == core.__all__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        core.Nothing  # noqa: B018


def test_update_replaces_only_what_is_given():
    state, model, optimizer = State(), nn.Linear(2, 2), object()
    state.update(model=model, optimizer=optimizer, steps_per_epoch=5)
    state.update(teacher_model="teacher", start=2.0, batches_per_step=3, loggers="loggers")
    assert state.model is model
    assert state.optimizer is optimizer
    assert state.optim_wrapped is True
    assert state.schedule == Schedule(start=2.0, steps_per_epoch=5, batches_per_step=3)
    assert (state.teacher_model, state.loggers) == ("teacher", "loggers")


def test_unknown_arguments_are_returned():
    state = State()
    assert state.update(model="model", sequential_targets=["Linear"]) == {
        "sequential_targets": ["Linear"]
    }
    assert not hasattr(state, "sequential_targets")


def test_data_is_copied_unless_asked_not_to():
    train, calib = [[1]], [[2]]
    state = State()
    state.update(train_data=train)
    state.update(calib_data=calib, copy_data=False)
    assert state.data.train == train
    assert state.data.train[0] is not train[0]
    assert state.data.calib is calib


def test_earlier_names_of_fields_read_and_set_those_of_the_parts():
    state = State()
    state.update(steps_per_epoch=5)
    state.token_mask = mask = torch.ones(1, 2)
    assert state.steps_per_epoch == 5
    assert state.calibration.token_mask is mask


def test_ready_with_a_model_and_a_promised_optimizer():
    state = State()
    assert not state.compression_ready
    state.update(model="model")
    assert state.compression_ready
    state.update(train_data=[1])
    assert not state.compression_ready
    state.update(optimizer="optimizer")
    assert state.compression_ready
    assert not State(model="model", optim_wrapped=True).compression_ready


def test_hardware_of_one_process(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    hardware = Hardware.detect(nn.Linear(2, 2))
    assert hardware == Hardware(
        device=torch.device("cpu"),
        devices=[torch.device("cpu")],
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        distributed=False,
        distributed_strategy="none",
    )


def test_hardware_of_a_process_group(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        hardware = Hardware.detect(nn.Linear(2, 2))
    finally:
        distributed.destroy_process_group()
    assert hardware.distributed is True
    assert hardware.distributed_strategy == "replicated"
    assert (hardware.rank, hardware.world_size) == (0, 1)
    assert (hardware.local_rank, hardware.local_world_size) == (3, 4)


@pytest.mark.parametrize(
    ("name", "equal", "other"),
    [
        ("cpu", ["cpu"], ["cuda", "cuda:0", "meta"]),
        ("cuda:0", ["cuda:0", "cuda"], ["cuda:1", "cpu", "xpu:0"]),
        ("cuda", ["cuda", "cuda:0"], ["cpu"]),
    ],
)
def test_a_device_equals_its_names_and_torch_takes_it(name, equal, other):
    state = State()
    state.update(device=torch.device(name))
    device = state.hardware.device
    for one in equal:
        assert device == one
        assert one == device
        assert device == torch.device(one)
        assert torch.device(one) == device
        assert not operator.ne(device, one)
    for one in other:
        assert device != one
        assert device != torch.device(one)
    assert device in (*other, *equal)
    assert device is not None
    assert device != 0
    assert (device.type, device.index) == (torch.device(name).type, torch.device(name).index)
    assert torch.device(device) == torch.device(name) == torch.device(copy.deepcopy(device))
    assert f"{device}" == str(device) == name
    assert torch.zeros(2).to(State().hardware.detect().device).shape == (2,)
