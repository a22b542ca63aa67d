# SPDX-License-Identifier: Apache-2.0
"""What ``oneshot`` wrote, read by transformers in a process without this package."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import small_models as small
from tests.support.caches import as_read, is_passed_over
from tests.support.presets import LIKE_OTHERS
from tests.support.releases import refuses_packed_zero_points
from tests.support.thinned import few
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.schemes.presets import PRESETS
from llmcompressor.verification import Severity

DECODED = """
def decoded(model, tokens):
    '''The last logits, where the last two tokens come one by one, beside what is cached.'''
    from inspect import signature
    names = signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    state = model(tokens[:, :-2], use_cache=True)
    for position in (-2, -1):
        token = tokens[:, position:][:, :1]
        state = model(token, **{name: state[name]}, use_cache=True)
    return state.logits
"""
READER = (
    DECODED
    + """
import sys, torch
from transformers import AutoModelForCausalLM

try:
    model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
except RuntimeError as error:
    found = {"error": str(error)}
else:
    with torch.no_grad():
        tokens = torch.load(sys.argv[2])
        found = {
            "logits": model.eval()(tokens).logits,
            "decoded": decoded(model, tokens),
            **{key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys")},
        }
assert not any(name.partition(".")[0] == "llmcompressor" for name in sys.modules)
torch.save(found, sys.argv[3])
"""
)

FLOAT8 = {"num_bits": 8, "type": "float"}
INT8_CHANNEL = {"num_bits": 8, "strategy": "channel"}


def rtn(**fields: Any) -> QuantizationModifier:
    return QuantizationModifier(**{"targets": "Linear", "ignore": ["lm_head"], **fields})


def gptq(**fields: Any) -> GPTQModifier:
    return GPTQModifier(**{"targets": "Linear", "ignore": ["lm_head"], **fields})


def group(**arguments: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], **arguments}}}


def attention(strategy: str = "tensor", **arguments: Any) -> dict[str, Any]:
    """A group that quantizes queries, keys and values."""
    return {
        "targets": ["LlamaAttention"],
        "input_activations": {"strategy": strategy, **arguments},
    }


def blocks(rows: int, columns: int) -> dict[str, Any]:
    return group(weights={**FLOAT8, "strategy": "block", "block_structure": [rows, columns]})


@dataclass(frozen=True)
class Case:
    """A recipe, and the model, its blocks and arguments that it is run with."""

    recipe: Any
    model: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    blocks: int = 1

    def built(self) -> Any:
        """One block shows how a scheme is stored; two, what comes from one to the next."""
        return small.llama(num_hidden_layers=self.blocks, **self.model)


FLOAT8_ROWS = {**FLOAT8, "strategy": "channel"}
KV = {"kv_cache_scheme": {**FLOAT8, "strategy": "tensor"}}
INT4_ASYMMETRIC = {"num_bits": 4, "group_size": 64, "symmetric": False}
DYNAMIC_ASYMMETRIC = {"symmetric": False, "dynamic": True}
STATIC_ASYMMETRIC = {"num_bits": 8, "strategy": "tensor", "symmetric": False}
# Packed, which is what servers read, transformers cannot load an embedding: it initializes the
# `weight` that a packed one does not have. In int-quantized form it keeps that name.
EMBEDDING = {"targets": ["Embedding"], "weights": INT8_CHANNEL, "format": "int-quantized"}
CASES: dict[str, Case] = {
    **{name: Case(rtn(scheme=name)) for name in PRESETS},
    **{
        f"gptq-{name}": Case(gptq(scheme=name), blocks=2 if name in ("W4A16", "W8A8") else 1)
        for name in (
            "W4A16",
            "W4A16_ASYM",
            "W8A8",
            "FP8_BLOCK",
            "NVFP4",
        )
    },
    "gptq-one-stream": Case(gptq(scheme="W4A16", asymmetric=False, actorder=None), blocks=2),
    "cache": Case(rtn(**KV), blocks=2),
    "cache-and-weights": Case(rtn(scheme="W4A16", **KV)),
    "cache-per-head": Case(
        rtn(scheme="FP8_DYNAMIC", kv_cache_scheme={**FLOAT8, "strategy": "attn_head"})
    ),
    "cache-int8-asymmetric": Case(rtn(scheme="W4A16", kv_cache_scheme=STATIC_ASYMMETRIC)),
    "cache-dynamic": Case(
        rtn(scheme="FP8", kv_cache_scheme={**FLOAT8, "strategy": "token", "dynamic": True})
    ),
    "attention-int8": Case(
        rtn(config_groups={"W8A16": ["Linear"], "group_1": attention(num_bits=8)})
    ),
    "attention-dynamic": Case(
        rtn(config_groups={"group_0": attention(**FLOAT8, strategy="token", dynamic=True)})
    ),
    "attention-and-cache": Case(
        rtn(
            config_groups={"W4A16": ["Linear"], "group_1": attention(**FLOAT8)},
            kv_cache_scheme={**FLOAT8, "strategy": "tensor"},
        ),
        blocks=2,
    ),
    "attention": Case(
        rtn(
            config_groups={
                "group_0": {"targets": ["Linear"], "weights": INT8_CHANNEL},
                "group_1": {
                    "targets": ["LlamaAttention"],
                    "input_activations": {**FLOAT8, "strategy": "tensor"},
                },
            }
        )
    ),
    "mixed-groups": Case(
        rtn(
            config_groups={
                "W4A16": ["re:.*self_attn.*"],
                "FP8_DYNAMIC": ["re:.*(gate|up)_proj"],
                "NVFP4A16": ["re:.*down_proj"],
            }
        )
    ),
    "mixed-modifiers": Case(
        [
            gptq(scheme="W4A16", targets=["re:.*self_attn.*"], ignore=[]),
            rtn(scheme="FP8", targets=["re:.*mlp.*"], ignore=[]),
        ]
    ),
    "mixed-of-five": Case(
        rtn(
            config_groups={
                "W4A16_ASYM": ["re:.*[qkv]_proj"],
                "W8A8": ["re:.*o_proj"],
                "FP8_BLOCK": ["re:.*(gate|up)_proj"],
                "MXFP4": ["re:.*0.mlp.down_proj"],
                "NVFP4": ["re:.*1.mlp.down_proj"],
            }
        ),
        blocks=2,
    ),
    "embedding": Case(
        rtn(config_groups={"group_0": EMBEDDING, "W4A16": ["Linear"]}),
    ),
    "embedding-tied": Case(
        rtn(config_groups={"group_0": EMBEDDING, "W4A16": ["Linear"]}),
        model={"tie_word_embeddings": True},
    ),
    "embedding-fp8": Case(
        rtn(config_groups={"group_0": {"targets": ["Embedding"], "weights": FLOAT8_ROWS}}),
        model={"tie_word_embeddings": True},
    ),
    "head": Case(rtn(scheme="W8A16", ignore=[])),
    "tied": Case(rtn(scheme="W4A16"), model={"tie_word_embeddings": True}, blocks=2),
    "static-asymmetric": Case(
        rtn(**group(weights=INT8_CHANNEL, input_activations=STATIC_ASYMMETRIC))
    ),
    "dynamic-asymmetric": Case(
        rtn(
            **group(
                weights=INT8_CHANNEL,
                input_activations={**INT8_CHANNEL, "strategy": "token", **DYNAMIC_ASYMMETRIC},
            )
        )
    ),
    "outputs": Case(rtn(**group(weights=INT8_CHANNEL, output_activations=STATIC_ASYMMETRIC))),
    "blocks-ragged": Case(rtn(**blocks(48, 56)), model={"intermediate_size": 200}),
    "int8-weights-per-tensor": Case(
        gptq(**group(weights={"num_bits": 8, "strategy": "tensor", "symmetric": False}))
    ),
    "groups-of-32-mse": Case(
        rtn(
            **group(weights={"num_bits": 4, "group_size": 32, "symmetric": False}),
            weight_observer="mse",
        )
    ),
    "nvfp4-expanded": Case(rtn(scheme="NVFP4A16", weight_observer="nvfp4_expanded_mse")),
    "imatrix": Case(rtn(scheme="W4A16", weight_observer="imatrix_mse")),
    **{
        f"observer-{name}": Case(
            rtn(
                **group(
                    weights={**INT4_ASYMMETRIC, "observer": name},
                    input_activations={**STATIC_ASYMMETRIC, "observer": name},
                ),
                kv_cache_scheme={**FLOAT8, "strategy": "tensor", "observer": name},
            )
        )
        for name in ("mse",)
    },
    "bias": Case(rtn(scheme="W4A16_ASYM"), model={"attention_bias": True, "mlp_bias": True}),
}
UNTOUCHED = {"UNQUANTIZED"}
"""Cases whose logits are those of the original model."""
ALIKE = {*LIKE_OTHERS}
"""Cases of which another one has each part."""


@dataclass(frozen=True)
class Outcome:
    """Both sides of one case; ``error`` is what transformers alone says, empty if it reads it."""

    folder: Path
    written: Tensor
    written_decoded: Tensor
    read: Tensor
    read_decoded: Tensor
    missing: list[str]
    unexpected: list[str]
    error: str


@pytest.fixture(scope="module", params=few(CASES, *(CASES.keys() - ALIKE)))
def name(request: pytest.FixtureRequest) -> str:
    """One case, for all tests of this file before the next one."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def outcome(
    name: str, tmp_path_factory: pytest.TempPathFactory, read_alone: Callable[..., None]
) -> Outcome:
    root = tmp_path_factory.mktemp("read-back")
    folder, files = root / "out", [root / "tokens.pt", root / "found.pt"]
    written = _write(CASES[name], folder)
    torch.save(small.probe(), files[0])
    read_alone(READER, folder, *files)
    alone = torch.load(files[1])
    read = alone if "error" not in alone else read_by_the_package(folder)
    lists = (read["missing_keys"], read["unexpected_keys"])
    return Outcome(
        folder, *written, read["logits"], read["decoded"], *lists, alone.get("error", "")
    )


def read_by_the_package(folder: Path) -> dict[str, Any]:
    """What the reader finds, of a folder that transformers alone refuses."""
    with loading_compressed():
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    logits, decoded = _logits(model.eval())
    lists = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys")}
    return {"logits": logits, "decoded": decoded, **lists}


def _write(case: Case, folder: Path) -> tuple[Tensor, Tensor]:
    model = oneshot(
        model=case.built(),
        recipe=case.recipe,
        dataset=small.token_rows(),
        num_calibration_samples=8,
        output_dir=folder,
        **case.arguments,
    )
    return _logits(model)


def _logits(model: Any) -> tuple[Tensor, Tensor]:
    known: dict[str, Any] = {}
    exec(DECODED, known)
    with torch.no_grad(), as_read(model):
        return small.logits(model), known["decoded"](model, small.probe())


def test_reads_back_as_the_model_in_memory(name: str, outcome: Outcome) -> None:
    assert outcome.missing == []
    assert [one for one in outcome.unexpected if not is_of_unknown_attention(one)] == []
    assert bool(torch.isfinite(outcome.written).all())
    assert torch.equal(outcome.read, outcome.written)
    assert torch.equal(outcome.read_decoded, outcome.written_decoded)
    check_it_changes_what_the_model_computes(name, outcome)
    check_serving_rules(name, outcome)


def test_what_transformers_alone_refuses_is_said(outcome: Outcome) -> None:
    """Packed zero points, in the releases that do, and nothing else."""
    headers = load_file(outcome.folder / "model.safetensors")
    is_packed = any(
        each.endswith("weight_zero_point") and tensor.dtype is torch.int32
        for each, tensor in headers.items()
    )
    assert bool(outcome.error) == (is_packed and refuses_packed_zero_points())
    assert ("mismatched_sizes" in outcome.error) == bool(outcome.error)
    found = verify(outcome.folder, serve="transformers").findings
    rules = {one.rule for one in found if one.severity is Severity.ERROR}
    assert ("L9" in rules) == bool(outcome.error)


def is_of_unknown_attention(tensor: str) -> bool:
    """Whether it is a scale of attention that readers leave as it is."""
    own = tensor.rpartition(".")[2]
    is_of_states = own[1:] in ("_scale", "_zero_point") and own[0] in "qkv"
    return is_of_states and is_passed_over(small.llama().model.layers[0].self_attn)


def check_it_changes_what_the_model_computes(name: str, outcome: Outcome) -> None:
    """Guards the comparison: a reader that quantized nothing would agree as well."""
    original = small.logits(CASES[name].built())
    if name in UNTOUCHED:
        assert torch.equal(outcome.read, original)
        return
    config = json.loads((outcome.folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"].values()
    if not any(group["weights"] or group["targets"] != ["LlamaAttention"] for group in groups):
        is_left_out = is_passed_over(small.llama().model.layers[0].self_attn)
        assert torch.equal(outcome.read, original) == is_left_out
        return
    assert not torch.equal(outcome.read, original)


def check_serving_rules(name: str, outcome: Outcome) -> None:
    """The rules of the quantization_config that servers break on, without a word or with one."""
    written = json.loads((outcome.folder / "config.json").read_text())
    if name in UNTOUCHED:
        assert "quantization_config" not in written
        return
    config = written["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["quantization_status"] == "compressed"
    assert isinstance(config["ignore"], list)
    groups = config["config_groups"]
    assert isinstance(groups, dict)
    assert groups or config["kv_cache_scheme"]
    targets: list[str] = []
    formats = set()
    for one in groups.values():
        assert isinstance(one["targets"], list)
        assert one["targets"]
        targets += one["targets"]
        skipped = len(one["targets"]) == 1 and one["targets"][0].endswith("Attention")
        assert skipped or isinstance(one["weights"], dict)
        if not skipped:
            formats.add(one["format"])
            assert one["format"] not in (None, "mixed-precision")
    assert len(targets) == len(set(targets)), "a target of two groups: the later one would win"
    if len(formats) > 1:
        assert config["format"] == "mixed-precision"
    elif formats:
        assert formats == {config["format"]}
    for one in groups.values():  # integer weights alone are served packed only
        alone = one["weights"] and not (one["input_activations"] or one["output_activations"])
        if alone and one["weights"]["type"] == "int" and one["targets"] != ["Embedding"]:
            assert one["format"] == "pack-quantized"
