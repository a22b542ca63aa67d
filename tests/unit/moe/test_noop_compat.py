# SPDX-License-Identifier: Apache-2.0
"""What scripts of other releases do to a model before a run: it stays as it is."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from llmcompressor.logger import logger
from llmcompressor.modeling import moe_calibration_context, replace_modules_for_calibration
from llmcompressor.modeling.gpt_oss import convert_model_for_quantization_gptoss
from llmcompressor.modeling.moe_context import MoECalibrationModule
from llmcompressor.transformers import wrap_hf_model_class

MODEL = nn.Linear(2, 2)


def test_nothing_is_replaced_for_calibration() -> None:
    for function in (convert_model_for_quantization_gptoss, replace_modules_for_calibration):
        assert function(MODEL) is MODEL
        assert function(MODEL, calibrate_all_experts=True) is MODEL
    assert wrap_hf_model_class(nn.Linear) is nn.Linear


def test_a_class_for_a_mixture_is_left_as_it_is_and_named() -> None:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="WARNING")

    @MoECalibrationModule.register("OtherMoE")
    class Mine(MoECalibrationModule):
        def __init__(self, original: nn.Module, config: object, calibrate_all_experts: bool = True):
            super().__init__()
            self.experts = original

    logger.remove(sink)
    [line] = lines
    assert "Mine is registered for OtherMoE" in line
    mine = Mine(MODEL, None)
    assert (mine.experts, mine.restore(MODEL)) == (MODEL, MODEL)


def test_the_context_of_experts_is_entered_as_each_release_did() -> None:
    for given in ((), (MODEL,), (MODEL, True), (MODEL, ExitStack())):
        with moe_calibration_context(*given) as entered:
            assert entered is None


def test_routed_tokens_alone_are_an_argument_of_oneshot() -> None:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="WARNING")
    replace_modules_for_calibration(MODEL, calibrate_all_experts=False)
    moe_calibration_context(MODEL, calibrate_all_experts=False)
    moe_calibration_context(MODEL, False)
    logger.remove(sink)
    assert len(lines) == 3
    assert all("moe_calibrate_all_experts=False" in line for line in lines)
