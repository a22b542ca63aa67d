# SPDX-License-Identifier: Apache-2.0
"""Recipes in the styles that are in circulation, with the package's own modifiers."""

from __future__ import annotations

import pytest
import yaml
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.recipe import Recipe
from llmcompressor.schemes.presets import preset_scheme

ONE_STAGE = """
quant_stage:
  quant_modifiers:
    GPTQModifier:
      ignore: ["lm_head"]
      dampening_frac: 0.05
      config_groups:
        group_0:
          weights:
            num_bits: 4
            type: "int"
            symmetric: true
            strategy: "group"
            group_size: 128
          targets: ["Linear"]
"""

BY_SCHEME = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      scheme: FP8_DYNAMIC
      targets: [Linear]
      ignore: ["re:.*lm_head", "re:.*mlp.gate$"]
"""

CACHE = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      kv_cache_scheme:
        num_bits: 8
        type: float
        strategy: tensor
        dynamic: false
        symmetric: true
"""

STAGES = """
# Two runs, one after the other.
version: 1.1.0
args:
  bits: 8
  lr_scale: 1e-1
  damp: eval(lr_scale / 10)
warm_oneshot_stage:
  run_type: oneshot
  warm_modifiers:
    QuantizationModifier: {scheme: W8A8, targets: Linear}
fine_stage:
  run_type: train
  args: {skip: lm_head}
  fine_modifiers:
    GPTQModifier:
      dampening_frac: eval(damp)
      ignore: [eval(skip)]
      block_size: eval(bits * 16)
      config_groups:
        all:
          targets: [Linear]
          weights: {num_bits: eval(bits), group_size: -1}
"""

_TAG = "!!python/object/apply:compressed_tensors.quantization.quant_args."
SAVED_BY_ANOTHER_TOOL = f"""
default_stage:
  default_modifiers:
    AWQModifier:
      offload_device: !!python/object/apply:torch.device [cpu]
    GPTQModifier:
      config_groups:
        g:
          targets: [Linear]
          weights:
            num_bits: 4
            type: {_TAG}QuantizationType [
              int]
            symmetric: true
            group_size: 128
            strategy: {_TAG}QuantizationStrategy [
              group]
            block_structure: null
            dynamic: false
            actorder: null
            scale_dtype: null
            zp_dtype: null
            observer: memoryless_minmax
            observer_kwargs: {{}}
          input_activations: null
          output_activations: null
          format: null
      targets: [Linear]
      ignore: []
      bypass_divisibility_checks: false
      requires_calibration_data: true
      actorder: static
"""

STAGELESS = """
modifiers:
  - QuantizationModifier: {scheme: NVFP4A16, targets: "re:.*mlp.*"}
  - QuantizationModifier: {scheme: W8A16, targets: "re:.*self_attn.*"}
"""

PUBLISHED = [ONE_STAGE, BY_SCHEME, CACHE, STAGES, SAVED_BY_ANOTHER_TOOL, STAGELESS]


@pytest.mark.parametrize("text", PUBLISHED)
def test_published_styles_read_and_save_and_read_again(text):
    recipe = Recipe.create_instance(text)
    saved = recipe.yaml()
    assert recipe
    assert Recipe.create_instance(saved) == recipe
    assert Recipe.create_instance(saved).yaml() == saved
    yaml.safe_load(saved)


def test_values_arrive():
    gptq = Recipe.create_instance(ONE_STAGE).modifiers[0]
    assert isinstance(gptq, GPTQModifier)
    assert (gptq.dampening_frac, gptq.ignore, gptq.group) == (0.05, ["lm_head"], "quant")
    fine = Recipe.create_instance(STAGES, recipe_args=["bits=4"]).stage("fine")
    assert fine.run_type == "train"
    (gptq,) = fine.modifiers
    assert gptq.dampening_frac == pytest.approx(0.01)
    assert (gptq.block_size, gptq.ignore) == (64, ["lm_head"])
    two = Recipe.create_instance(STAGELESS).modifiers
    assert [modifier.scheme for modifier in two] == ["NVFP4A16", "W8A16"]


W4 = QuantizationArgs(num_bits=4, group_size=32, symmetric=False)
MODIFIERS = [
    QuantizationModifier(scheme="W4A16"),
    QuantizationModifier(scheme={"W4A16": ["re:.*q_proj"], "FP8_DYNAMIC": ["re:.*mlp.*"]}),
    QuantizationModifier(
        config_groups={"a": QuantizationScheme(targets=["Linear"], weights=W4)}, ignore="lm_head"
    ),
    QuantizationModifier(scheme="FP8", kv_cache_scheme=QuantizationArgs(num_bits=8, type="float")),
    QuantizationModifier(scheme="W8A8", observer={"weights": "mse", "input": "minmax"}),
    GPTQModifier(scheme="W4A16", actorder=None),
    GPTQModifier(scheme="W4A16", dampening_frac=1e-5, asymmetric=False),
    GPTQModifier(scheme="W4A16", sequential_targets=["LlamaDecoderLayer"]),
    AutoRoundModifier(scheme="W4A16"),
]


@pytest.mark.parametrize("modifier", MODIFIERS, ids=range(len(MODIFIERS)))
def test_objects_load_back_equal(modifier):
    recipe = Recipe.from_modifiers(modifier)
    again = Recipe.create_instance(recipe.yaml())
    assert again == recipe
    assert again.modifiers == Recipe.create_instance(recipe.yaml()).modifiers
    mine, theirs = (each.modifiers[0].resolve_quantization_config() for each in (recipe, again))
    assert mine.groups == theirs.groups


@pytest.mark.parametrize(
    "name",
    ["W4A16", "W4A16_ASYM", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4", "W4AFP8"],
)
def test_every_kind_of_scheme_loads_back_equal(name):
    groups = {"group_0": preset_scheme(name, ["Linear"]), "1": preset_scheme("W8A16", ["re:x"])}
    recipe = Recipe.from_modifiers([GPTQModifier(config_groups=groups)] * 2)
    again = Recipe.create_instance(recipe.yaml())
    assert again == recipe
    assert len(again.modifiers) == 2
    mine, theirs = (each.modifiers[0].resolve_quantization_config() for each in (recipe, again))
    assert mine.groups == theirs.groups


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM"])
def test_every_argument_is_written_in_one_spelling(name):
    groups = {"group_0": preset_scheme(name, ["Linear"])}
    stage = yaml.safe_load(Recipe.from_modifiers(GPTQModifier(config_groups=groups)).yaml())
    ((fields,),) = ([*each.values()] for each in stage["default_stage"].values())
    assert fields["config_groups"]["group_0"]["weights"] == {
        "num_bits": 4,
        "type": "int",
        "symmetric": name == "W4A16",
        "group_size": 128,
        "strategy": "group",
        "dynamic": False,
        "zp_dtype": "torch.int8",
        "observer_kwargs": {},
    }
