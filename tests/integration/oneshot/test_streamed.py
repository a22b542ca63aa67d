# SPDX-License-Identifier: Apache-2.0
"""From checkpoint to checkpoint, block by block: the same files as with the model in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from tests.support import small_models as small
from tests.support.caches import as_read
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from llmcompressor import oneshot
from llmcompressor.checkpoint.block_reader import BlockWeights
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.entrypoints import run as run_module
from llmcompressor.errors import ArgumentError
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

_SIZES: dict[str, Any] = {
    "vocab_size": small.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": torch.bfloat16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=small.VOCABULARY, n_embd=128, n_layer=3, n_head=4, n_positions=64
    )
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": small.llama,
    "deep": lambda: small.llama(num_hidden_layers=3),
    "tied": lambda: small.llama(num_hidden_layers=3, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=32)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(
            **{**_SIZES, "num_hidden_layers": 2},
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    ),
    "gpt2": gpt2,
}
_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def _group(**fields: Any) -> QuantizationModifier:
    return QuantizationModifier(
        config_groups={"g": {"targets": ["Linear"], **fields}}, ignore=["lm_head"]
    )


RECIPES: dict[str, Callable[[], Any]] = {
    "W4A16": lambda: QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    "W4A16_ASYM": lambda: QuantizationModifier(
        targets="Linear", scheme="W4A16_ASYM", ignore=["lm_head"]
    ),
    "FP8_DYNAMIC": lambda: QuantizationModifier(
        targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"]
    ),
    "NVFP4A16": lambda: QuantizationModifier(
        targets="Linear", scheme="NVFP4A16", ignore=["lm_head"]
    ),
    "FP8": lambda: QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"]),
    "GPTQ": lambda: GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    "dense": lambda: _group(weights={"num_bits": 4, "strategy": "channel"}, format="dense"),
    "INT16": lambda: _group(weights={"num_bits": 16, "strategy": "channel"}),
    "INT12_ASYM": lambda: _group(weights={"num_bits": 12, "group_size": 32, "symmetric": False}),
    "FP8_ASYM": lambda: _group(weights={"num_bits": 8, "type": "float", "symmetric": False}),
    "wide scales": lambda: _group(
        weights={"num_bits": 4, "group_size": 32, "scale_dtype": "torch.float32"}
    ),
    "cache": lambda: QuantizationModifier(kv_cache_scheme=_CACHE),
    "cache, some Linears": lambda: QuantizationModifier(
        targets=["re:.*layers.1.mlp.*proj"], scheme="FP8", kv_cache_scheme=_CACHE
    ),
    "two": lambda: [
        GPTQModifier(targets=["re:.*mlp.*proj"], scheme="W4A16"),
        QuantizationModifier(targets=["re:.*self_attn.*_proj"], scheme="FP8"),
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            made[name] = tmp_path_factory.mktemp("models") / name
            model = MODELS[name]().to(torch.bfloat16)
            model.save_pretrained(made[name], max_shard_size="300KB")
        return made[name]

    return of


def both_ways(
    folder: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any
) -> tuple[Path, Path, Any]:
    """The output of a streamed run, of one in memory, and the model that the first returned."""
    calls: list[str] = []
    load = BlockWeights.load
    monkeypatch.setattr(
        BlockWeights, "load", lambda self, name: (calls.append(name), load(self, name))[1]
    )
    given = {"dataset": small.token_rows(), "max_seq_length": 16, **arguments}
    streamed = oneshot(
        model=str(folder), recipe=RECIPES[recipe](), output_dir=tmp_path / "streamed", **given
    )
    assert len(calls) > 1, "it was to be streamed"
    calls.clear()
    monkeypatch.setattr(run_module, "streamable_source", lambda job: None)
    oneshot(model=str(folder), recipe=RECIPES[recipe](), output_dir=tmp_path / "memory", **given)
    assert not calls, "it was to be in memory"
    return tmp_path / "streamed", tmp_path / "memory", streamed


CASES = [
    *(("llama", recipe) for recipe in RECIPES),
    ("tied", "GPTQ"),
    ("qwen3", "FP8_DYNAMIC"),
    ("mixtral", "FP8"),
    ("mixtral", "GPTQ"),
]


LIKE_OTHERS = {
    *(("llama", one) for one in ("W4A16", "FP8_DYNAMIC", "INT16", "GPTQ", "cache")),
    ("mixtral", "FP8"),
}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [pytest.param(*one, marks=[pytest.mark.slow] if one in LIKE_OTHERS else []) for one in CASES],
)
def test_the_files_are_those_of_a_run_in_memory(
    name: str,
    recipe: str,
    folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streamed, memory, model = both_ways(folders(name), recipe, tmp_path, monkeypatch)
    assert small.tree(streamed) == small.tree(memory)
    with loading_compressed():
        reader = AutoModelForCausalLM.from_pretrained(streamed, dtype="auto").eval()
    if name == "mixtral":
        reader.set_experts_implementation("eager")  # others sum in another order
    with torch.no_grad(), as_read(model):
        found, wanted = model(small.probe()).logits, reader(small.probe()).logits
    if (name, recipe) == ("mixtral", "FP8"):  # transformers stacks experts: it rounds no inputs
        assert float((found - wanted).abs().max()) < 0.05 * float(wanted.abs().max())
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("bits", [4, 16])
def test_a_streamed_weight_is_rounded_to_its_bits(
    bits: int, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also where the format stores no codes, and where the dtype does not resolve them."""
    given = {"num_bits": bits, "strategy": "channel"}
    recipe = _group(weights=given, format="dense" if bits == 4 else None)
    oneshot(model=str(folders("llama")), recipe=recipe, output_dir=tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained
    original, found = read(folders("llama"), dtype="auto"), read(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        found(small.probe())  # transformers unpacks weights in the first forward
    for name, one in original.named_modules():
        if not name.endswith("_proj"):
            continue
        weight, rounded = one.weight, found.get_submodule(name).weight
        error = (weight.float() - rounded.float()).abs().amax(1, keepdim=True)
        step = weight.float().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 0.5)
        resolution = weight.float().abs().amax() * torch.finfo(torch.bfloat16).eps
        assert bool((error <= step / 2 + resolution).all())
        assert len(rounded[0].unique()) <= 2**bits


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_wider_than_the_weights(
    symmetric: bool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """The file has them in the dtype that was named, with the values that they have without it."""
    weights = {"num_bits": 4, "group_size": 32, "symmetric": symmetric}
    for name, named in {"wide": {"scale_dtype": "torch.float32"}, "own": {}}.items():
        recipe = _group(weights=weights | named)
        oneshot(model=str(folders("llama")), recipe=recipe, output_dir=tmp_path / name)
    wide, own = (load_file(tmp_path / name / "model.safetensors") for name in ("wide", "own"))
    assert wide.keys() == own.keys()
    for name, tensor in wide.items():
        is_scale = name.endswith("weight_scale")
        assert tensor.dtype is (torch.float32 if is_scale else own[name].dtype)
        assert torch.equal(tensor.to(own[name].dtype), own[name])


@pytest.mark.parametrize(
    "arguments",
    [{"save_compressed": False}, {"tie_word_embeddings": False}, {"precision": "float32"}],
    ids=lambda given: next(iter(given)),
)
def test_arguments_mean_the_same(
    arguments: dict[str, Any],
    folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streamed, memory, _ = both_ways(folders("tied"), "W4A16", tmp_path, monkeypatch, **arguments)
    assert small.tree(streamed) == small.tree(memory)


def test_two_blocks_are_in_memory_at_most(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """The one that is written, and the one that the batches have come to."""
    from llmcompressor.checkpoint.block_stream import StreamedBlocks

    seen: list[int] = []
    leave = StreamedBlocks.leave

    def counting(self: StreamedBlocks, block: str) -> None:
        full = [
            name
            for one, name in self.names.items()
            if not any(parameter.is_meta for parameter in one.parameters())
        ]
        seen.append(len(full))
        leave(self, block)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StreamedBlocks, "leave", counting)
        oneshot(
            model=str(folders("deep")),
            recipe=RECIPES["GPTQ"](),
            dataset=small.token_rows(),
            max_seq_length=16,
            output_dir=tmp_path / "output",
        )
    assert seen == [2, 2, 1]


def test_what_is_returned_is_a_whole_model(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model: Any = oneshot(
        model=str(folders("llama")), recipe=RECIPES["W4A16"](), output_dir=tmp_path / "output"
    )
    twin = copy.deepcopy(model)
    state = model.state_dict()
    assert not any(tensor.is_meta for tensor in state.values())
    assert sum(1 for _ in twin.parameters()) == sum(1 for _ in model.parameters())
    again = model.to(torch.float32)
    ids = again.generate(small.probe()[:1], max_new_tokens=3, do_sample=False)
    assert ids.shape[1] == small.probe().shape[1] + 3


def test_a_model_of_the_hub(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hub's cache has it; there is no hub."""
    cache = tmp_path / "cache"
    repository = cache / "models--some-owner--some-model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot.symlink_to(folders("llama"), target_is_directory=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    oneshot(
        model="some-owner/some-model",
        recipe=RECIPES["W4A16"](),
        output_dir=tmp_path / "hub",
        cache_dir=str(cache),
    )
    oneshot(model=str(folders("llama")), recipe=RECIPES["W4A16"](), output_dir=tmp_path / "folder")
    one, other = small.tree(tmp_path / "hub"), small.tree(tmp_path / "folder")
    assert one["model.safetensors"] == other["model.safetensors"]
    assert one["config.json"] == other["config.json"]


def test_a_limit_without_room_for_a_block(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="Allow at least"):
        oneshot(
            model=str(folders("llama")),
            recipe=RECIPES["W4A16"](),
            output_dir=tmp_path / "output",
            max_memory="10MiB",
        )
    assert not list(tmp_path.iterdir())
