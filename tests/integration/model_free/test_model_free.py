# SPDX-License-Identifier: Apache-2.0
"""Quantizing a checkpoint whose architecture nothing knows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file
from tests.support import mixtures
from tests.support import small_models as small
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from llmcompressor import model_free_ptq, oneshot, verify
from llmcompressor.checkpoint.block_reader import BlockWeights
from llmcompressor.cli.app import app
from llmcompressor.errors import CheckpointError, TargetError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.schemes.presets import PRESETS

OF_6_BITS = [name for name in ("MXFP6A16", "MXFP6A8") if name in PRESETS]
HIDDEN, INNER, WORDS, EXPERTS = 128, 128, 320, 3


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def same(first: Tensor, second: Tensor) -> bool:
    alike = first.dtype == second.dtype and first.shape == second.shape
    return alike and torch.equal(
        first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    )


def invented(*, transposed: bool = False) -> dict[str, Tensor]:
    """Two blocks of an architecture that does not exist."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, generator=generator) / 16).to(dtype)

    tensors = {
        "trunk.tok_embeddings.weight": random(WORDS, HIDDEN),
        "trunk.final_norm.weight": random(HIDDEN),
        "trunk.steps": torch.arange(3),
        "trunk.patch_embedding.weight": random(HIDDEN, HIDDEN),
        "lm_head.weight": random(WORDS, HIDDEN),
    }
    for number in range(2):
        at = f"trunk.stages.{number}"
        gate_up, down = random(EXPERTS, 2 * INNER, HIDDEN), random(EXPERTS, HIDDEN, INNER)
        if transposed:
            gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
        tensors |= {
            f"{at}.mix.q_proj.weight": random(HIDDEN, HIDDEN),
            f"{at}.mix.q_proj.bias": random(HIDDEN),
            f"{at}.mix.k_proj.weight": random(INNER, HIDDEN) / 4,
            f"{at}.mix.v_proj.weight": random(INNER, HIDDEN),
            f"{at}.mix.odd.weight": random(HIDDEN, HIDDEN),
            f"{at}.mix.decay": random(8, dtype=torch.float32),
            f"{at}.mix.short.weight": random(HIDDEN, 1, 4),
            f"{at}.moe.gate.weight": random(EXPERTS, HIDDEN),
            f"{at}.moe.experts.gate_up_proj": gate_up,
            f"{at}.moe.experts.down_proj": down,
            f"{at}.wide_norm.weight": random(4, HIDDEN),
        }
    return tensors


CONFIG = {
    "model_type": "frobnicator",
    "architectures": ["FrobnicatorModel"],
    "vocab_size": WORDS,
    "dtype": "bfloat16",
    "twists": {"deep": [1, None]},
    "tie_word_embeddings": False,
}


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = CONFIG) -> Path:
    """A checkpoint in two files, neighbours in different ones."""
    folder.mkdir()
    names = list(tensors)
    files = [f"model-0000{half + 1}-of-00002.safetensors" for half in range(2)]
    for half, file in enumerate(files):
        save_file({name: tensors[name] for name in names[half::2]}, folder / file)
    places = {name: files[position % 2] for position, name in enumerate(names)}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_frobnicator.py").write_text("raise SystemExit  # not to be run\n")
    return folder


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("source") / "odd", invented())


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16", "NVFP4A16", "FP8_BLOCK"])
@pytest.mark.parametrize("ignore", [["lm_head"], []], ids=["", "head"])
def test_the_same_bytes_as_oneshot(
    one_block: Path, tmp_path: Path, scheme: str, ignore: list[str]
) -> None:
    """That a model class is known changes nothing in what is written."""
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=ignore)
    oneshot(model=str(one_block), recipe=recipe, output_dir=tmp_path / "class")
    model_free_ptq(one_block, tmp_path / "names", scheme, ignore=ignore)

    expected, found = tensors_of(tmp_path / "class"), tensors_of(tmp_path / "names")
    assert list(found) == list(expected)
    assert [name for name in expected if not same(expected[name], found[name])] == []
    assert config_of(tmp_path / "names") == config_of(tmp_path / "class")
    written = sorted(path.name for path in (tmp_path / "class").iterdir())
    assert sorted(path.name for path in (tmp_path / "names").iterdir()) == written


@pytest.mark.parametrize("ignore", [[], ["re:.*block_sparse_moe.*"]], ids=["", "ignored"])
def test_granites_stacks_are_written_as_by_oneshot(ignore: list[str], tmp_path: Path) -> None:
    """They have names of their own in the file, and servers look single experts up."""
    mixtures.saved("granitemoe", tmp_path / "model")
    recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head", *ignore])
    oneshot(model=str(tmp_path / "model"), recipe=recipe, output_dir=tmp_path / "class")
    model_free_ptq(tmp_path / "model", tmp_path / "names", "W4A16", ignore=["lm_head", *ignore])
    expected, found = tensors_of(tmp_path / "class"), tensors_of(tmp_path / "names")
    assert [name for name in expected if not same(expected[name], found[name])] == []
    assert expected.keys() == found.keys()
    assert ("model.layers.0.block_sparse_moe.experts.0.up_proj.weight_packed" in found) != bool(
        ignore
    )
    assert verify(tmp_path / "names", serve="vllm", tp=1).ok


@pytest.mark.parametrize(
    "stacks",
    [
        {"moe.gate_proj.weight": (4, 32, 64), "moe.down_proj.weight": (4, 64, 32)},
        {"experts.fc1.weight": (4, 64, 64), "experts.fc2.weight": (4, 32, 64)},
        {"ffn.experts.mlp.w1": (128, 64), "ffn.experts.mlp.w2": (128, 64)},
    ],
    ids=["of three", "transposed", "in rows"],
)
def test_stacks_of_unknown_layout_are_ignored_by_servers(
    stacks: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """They build experts there all the same, and look for the scheme of the first."""
    shapes = {"mixer.weight": (64, 64), **stacks}
    tensors = {f"model.layers.0.{name}": torch.randn(shape) for name, shape in shapes.items()}
    source = write(tmp_path / "source", tensors)
    ignore = ["re:.*moe.*"]  # without a gate, down_proj alone would be an error
    folder = model_free_ptq(source, tmp_path / "out", "W4A16", ignore=ignore)
    assert same(tensors_of(folder)[(name := list(tensors)[1])], tensors[name])
    found = verify(folder, serve="vllm", tp=1).findings
    assert not [one for one in found if one.rule == "S19"]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear"]
    (folder / "config.json").write_text(json.dumps(config))
    found = verify(folder, serve="vllm", tp=1).findings
    assert {one.module.endswith("experts") for one in found if one.rule == "S19"} == {True}


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    """The file holds the head too: it must not be packed away from the embedding."""
    tensors = {
        "model.embed_tokens.weight": torch.randn(WORDS, HIDDEN),
        "lm_head.weight": torch.randn(WORDS, HIDDEN),
        "model.layers.0.up.weight": torch.randn(HIDDEN, HIDDEN),
    }
    source = write(tmp_path / "source", tensors, {**CONFIG, "tie_word_embeddings": True})
    folder = model_free_ptq(source, tmp_path / "out", "FP8_DYNAMIC")
    written = tensors_of(folder)
    assert same(written["lm_head.weight"], tensors["lm_head.weight"])
    assert written["model.layers.0.up.weight"].dtype == torch.float8_e4m3fn
    assert config_of(folder)["tie_word_embeddings"] is True
    assert "lm_head" in config_of(folder)["quantization_config"]["ignore"]


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("targets", [["lm_head"], ["Embedding"], ["re:.*lm_head", "Embedding"]])
def test_a_tied_head_that_is_meant_is_untied(
    targets: list[str], is_stored: bool, tmp_path: Path
) -> None:
    """It gets the embedding's weight, which readers take for it, whatever is stored beside that."""
    embedding = torch.randn(WORDS, HIDDEN)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.layers.0.up.weight": torch.randn(HIDDEN, HIDDEN),
    }
    if is_stored:
        tensors["lm_head.weight"] = torch.randn(WORDS, HIDDEN)
    source = write(tmp_path / "source", tensors, {**CONFIG, "tie_word_embeddings": True})
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": [*targets, "re:.*up"], "weights": weights}
    folder = model_free_ptq(source, tmp_path / "out", config={"group_0": group})
    written = tensors_of(folder)
    assert config_of(folder)["tie_word_embeddings"] is False
    both = {"lm_head": targets != ["Embedding"], "model.embed_tokens": "Embedding" in targets}
    for name, meant in both.items():
        weight, scale = written[f"{name}.weight"], written.get(f"{name}.weight_scale")
        if scale is None:
            assert not meant
            assert same(weight, embedding)
        else:
            assert meant
            torch.testing.assert_close(weight.float() * scale, embedding, rtol=0.07, atol=0.01)


@pytest.mark.parametrize("is_stored", [True, False])
def test_an_ignored_tied_head_stays_tied(
    is_stored: bool, tmp_path: Path, warned: list[str]
) -> None:
    """One that no file holds is no misspelt name, even beside another module called a head."""
    tensors = {
        "model.embed_tokens.weight": torch.randn(WORDS, HIDDEN),
        "lm_head.weight": torch.randn(WORDS, HIDDEN),
        "model.layers.0.up.weight": torch.randn(HIDDEN, HIDDEN),
        "model.pool.head.weight": torch.randn(HIDDEN, HIDDEN),
    }
    head = tensors["lm_head.weight"] if is_stored else tensors.pop("lm_head.weight")
    source = write(tmp_path / "source", tensors, {**CONFIG, "tie_word_embeddings": True})
    groups = {"FP8_DYNAMIC": ["Linear", *(["lm_head"] if is_stored else [])]}
    folder = model_free_ptq(source, tmp_path / "out", config=groups, ignore="lm_head")
    assert config_of(folder)["tie_word_embeddings"] is True
    assert "lm_head" in config_of(folder)["quantization_config"]["ignore"]
    assert not is_stored or same(tensors_of(folder)["lm_head.weight"], head)
    assert not [text for text in warned if "ignore entry" in text]


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16", "MXFP4", *OF_6_BITS])
def test_an_invented_architecture_is_quantized(odd: Path, tmp_path: Path, scheme: str) -> None:
    folder = model_free_ptq(odd, tmp_path / "out", scheme, ignore=["lm_head"])
    report = verify(folder, odd, serve="vllm", tp=1)
    unserved = {"S21", "S63"} if scheme in OF_6_BITS else set()  # by vLLM
    assert {one.rule for one in report.findings if one.severity.name == "ERROR"} == unserved
    assert report.quantized == 2 * (4 + 3 * EXPERTS)

    written, original = tensors_of(folder), tensors_of(odd)
    kept = {name for name in original if "experts" not in name} & set(written)
    of_linears = re.compile(r"mix\.\w+\.weight$|experts")
    assert kept >= {name for name in original if not of_linears.search(name)}
    changed = {name for name in kept if not same(written[name], original[name])}
    assert all(of_linears.search(name) for name in changed)

    config = config_of(folder)
    own = config.pop("quantization_config")
    assert config == CONFIG
    assert own["ignore"].count("trunk.stages.1.wide_norm") == 1
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert (folder / "modeling_frobnicator.py").exists()


def test_stacked_experts_are_taken_apart(odd: Path, tmp_path: Path) -> None:
    """Each piece is what quantizing that piece alone gives."""
    folder = model_free_ptq(odd, tmp_path / "out", "FP8_DYNAMIC", ignore=["lm_head"])
    written, original = tensors_of(folder), tensors_of(odd)
    at = "trunk.stages.1.moe.experts"
    assert not [name for name in written if "gate_up_proj" in name]
    for number in range(EXPERTS):
        gate, up = original[f"{at}.gate_up_proj"][number].chunk(2)
        pieces = {
            "gate_proj": gate,
            "up_proj": up,
            "down_proj": original[f"{at}.down_proj"][number],
        }
        for part, piece in pieces.items():
            scale = written[f"{at}.{number}.{part}.weight_scale"].float()
            codes = written[f"{at}.{number}.{part}.weight"].float()
            assert torch.allclose(codes * scale, piece.float(), rtol=0.1, atol=2e-4)


@pytest.mark.parametrize("entry", ["re:.*experts", "re:.*experts$", "trunk.stages.0.moe.experts"])
def test_ignored_experts_stay_stacked(odd: Path, tmp_path: Path, entry: str) -> None:
    folder = model_free_ptq(odd, tmp_path / "out", "W4A16", ignore=["lm_head", entry])
    written, original = tensors_of(folder), tensors_of(odd)
    name = "trunk.stages.0.moe.experts.gate_up_proj"
    assert same(written[name], original[name])
    other = "trunk.stages.1.moe.experts.gate_up_proj"
    assert (other in written) == entry.startswith("re:")


def test_what_is_served_as_one_shares_a_global_scale(odd: Path, tmp_path: Path) -> None:
    written = tensors_of(model_free_ptq(odd, tmp_path / "out", "NVFP4A16", ignore=["lm_head"]))

    def scales(at: str, *parts: str) -> set[float]:
        return {float(written[f"{at}.{part}.weight_global_scale"]) for part in parts}

    assert len(scales("trunk.stages.0.mix", "q_proj", "k_proj", "v_proj")) == 1
    assert len(scales("trunk.stages.0.mix", "q_proj", "odd")) == 2
    assert len(scales("trunk.stages.1.moe.experts.2", "gate_proj", "up_proj")) == 1
    assert len(scales("trunk.stages.1.moe.experts.2", "gate_proj", "down_proj")) == 2


def test_a_configuration_of_several_groups(odd: Path, tmp_path: Path) -> None:
    weights = QuantizationArgs(num_bits=8, strategy="channel")
    config = QuantizationConfig(
        config_groups={
            "mixers": QuantizationScheme(targets=["re:.*mix"], weights=weights),
            "W4A16": ["re:.*experts"],
        },
        ignore=["re:.*odd"],
    )
    for number, given in enumerate((config, config.model_dump(mode="json"))):
        folder = model_free_ptq(odd, tmp_path / str(number), config=given, ignore="lm_head")
        written = tensors_of(folder)
        assert written["trunk.stages.0.mix.odd.weight"].dtype == torch.bfloat16
        at = "trunk.stages.0.mix.k_proj"
        assert written[f"{at}.weight_scale"].shape == (INNER, 1)
        assert written["trunk.stages.0.moe.experts.0.up_proj.weight_packed"].shape == (INNER, 16)


def test_a_run_that_was_broken_off_is_continued(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> Path:
        return model_free_ptq(odd, tmp_path / name, "W4A16", ignore=["lm_head"])

    loaded: list[str] = []
    load: Callable[..., None] = BlockWeights.load

    def counted(self: BlockWeights, block: str) -> None:
        loaded.append(block)
        if block == "trunk.stages.1" and len(loaded) == 3:
            raise OSError("the cable came off")
        load(self, block)

    monkeypatch.setattr(BlockWeights, "load", counted)
    with pytest.raises(OSError, match="cable"):
        run("out")
    assert loaded == ["", "trunk.stages.0", "trunk.stages.1"]
    assert not (tmp_path / "out").exists()
    run("out")
    assert loaded[3:] == ["", "trunk.stages.1"]
    run("whole")
    assert small.tree(tmp_path / "out") == small.tree(tmp_path / "whole")


def test_the_command(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcompressor.logger.configure_logger", lambda *_: None)
    out = tmp_path / "out"
    line = ["model-free-ptq", str(odd), "--scheme", "FP8_DYNAMIC", "--ignore", "lm_head", "-o"]
    result = CliRunner().invoke(app, [*line, str(out)], color=False)
    assert (result.exit_code, f"Written: {out}" in result.stdout) == (0, True)
    result = CliRunner().invoke(app, [*line[:-1], "--ignore", "lm_haed", "-o", str(out) + "2"])
    assert result.exit_code == 2
    assert "Did you mean 'lm_head'?" in result.output


def in_blocks(weight: Tensor) -> dict[str, Tensor]:
    """8-bit floats in blocks of 128 x 128, as DeepSeek stores them."""
    rows, columns = weight.shape[0] // 128, weight.shape[1] // 128
    blocks = weight.reshape(rows, 128, columns, 128).float()
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn).reshape(weight.shape)
    return {"weight": codes, "weight_scale_inv": scale.reshape(rows, columns)}


@pytest.fixture
def blocks(tmp_path: Path) -> tuple[Path, Tensor]:
    """A checkpoint in FP8 blocks, and the weight that was rounded to them."""
    weight = torch.randn(256, 128)
    tensors = {"model.embed_tokens.weight": torch.randn(WORDS, 128).bfloat16()}
    tensors |= {f"model.layers.0.up.{name}": each for name, each in in_blocks(weight).items()}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config = {**CONFIG, "quantization_config": quantization, "dtype": "bfloat16"}
    return write(tmp_path / "blocks", tensors, config), weight


def test_a_checkpoint_in_another_layout_is_converted_first(
    blocks: tuple[Path, Tensor], tmp_path: Path
) -> None:
    source, weight = blocks
    with pytest.raises(CheckpointError):
        model_free_ptq(source, tmp_path / "out", "W8A16")
    converter = FP8BlockDequantizer(targets=["re:.*up$"])
    folder = model_free_ptq(source, tmp_path / "out", "W8A16", converter=converter)
    assert {path.name for path in tmp_path.iterdir()} == {"blocks", "out"}
    assert verify(folder, serve="vllm", tp=1).ok
    own = {name.rpartition(".")[2] for name in tensors_of(folder) if ".up." in name}
    assert own == {"weight_packed", "weight_scale", "weight_shape"}
    assert config_of(folder)["quantization_config"]["quant_method"] == "compressed-tensors"
    model_free_ptq(source, tmp_path / "again", "FP8_DYNAMIC", converter=[converter])
    written = tensors_of(tmp_path / "again")
    decoded = (
        written["model.layers.0.up.weight"].float() * written["model.layers.0.up.weight_scale"]
    )
    assert float((decoded - weight).norm() / weight.norm()) < 0.06


def test_blocks_that_reach_beyond_a_matrix_are_converted(tmp_path: Path) -> None:
    """Their codes and scales lie in two shards, one of which holds nothing but scales."""
    weight = torch.randn(192, 320)
    whole = in_blocks(torch.nn.functional.pad(weight, (0, 64, 0, 64), value=1e-3))
    up = "model.layers.0.up"
    tensors = {
        f"{up}.weight": whole["weight"][:192, :320].contiguous(),
        f"{up}.weight_scale_inv": whole["weight_scale_inv"],  # the only one of the second shard
        "model.embed_tokens.weight": torch.randn(WORDS, 320).bfloat16(),
    }
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config = {**CONFIG, "quantization_config": quantization, "dtype": "bfloat16"}
    source = write(tmp_path / "blocks", tensors, config)
    (source / "pytorch_model.bin").write_text("weights")
    (source / "1_Dense").mkdir()
    save_file({"linear.weight": torch.zeros(2, 2)}, source / "1_Dense" / "model.safetensors")
    out = tmp_path / "out"
    converter = FP8BlockDequantizer(targets=["re:.*up$"])
    model_free_ptq(source, out, "FP8_DYNAMIC", ignore=["lm_head"], converter=converter)
    written = tensors_of(out)
    decoded = written[f"{up}.weight"].float() * written[f"{up}.weight_scale"]
    assert decoded.shape == weight.shape
    assert float((decoded - weight).norm() / weight.norm()) < 0.06
    report = json.loads((out / "compression_report.json").read_text())
    assert report["left_behind"] == ["1_Dense/", "pytorch_model.bin"]
    wrong = FP8BlockDequantizer(targets=["re:.*up$"], weight_block_size=(64, 64))
    with pytest.raises(CheckpointError, match="FP8BlockDequantizer cannot convert"):
        model_free_ptq(source, tmp_path / "no", "FP8_DYNAMIC", converter=wrong)
    assert {path.name for path in tmp_path.iterdir()} == {"blocks", "out"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "None of them was given"),
        ({"scheme": "W4A16", "config": {"W4A16": ["Linear"]}}, "Several were given"),
        ({"scheme": "W4A17"}, "W4A16"),
        ({"scheme": "FP8"}, "calibration data"),
        ({"scheme": "NVFP4"}, "calibration data"),
        ({"scheme": "W4A16", "max_workers": 0}, "max_workers"),
        ({"scheme": "W4A16", "converter": object()}, "converter"),
        ({"scheme": "W4A16", "device": "gpu"}, "device"),
        ({"scheme": "W4A16", "device": []}, "device"),
        ({"scheme": "W4A16", "resume": "perhaps"}, "resume"),
        ({"config": {"config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme"),
        ({"config": "W4A16"}, "config"),
        ({"scheme": "W4A16", "ignore": 5}, "'ignore' cannot be 5"),
        ({"scheme": "W4A16", "ignore": "re:"}, "empty name or pattern"),
        (
            {"scheme": {"input_activations": {"num_bits": 8, "dynamic": True}}},
            "quantizes no weights",
        ),
    ],
)
def test_arguments_that_cannot_be_used(
    odd: Path, tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        model_free_ptq(odd, tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with a head of its own."""
    folder = tmp_path_factory.mktemp("source") / "gpt2"
    sizes = {"vocab_size": 192, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_transposed_weights_are_refused(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"h\.0\.attn\.c_attn.*gpt2.*\[in, out\].*re:") as error:
        model_free_ptq(gpt2, tmp_path / "out", "W4A16")
    assert not list(tmp_path.iterdir())
    pattern = str(error.value).split('"')[1]
    model_free_ptq(gpt2, tmp_path / "out", "W4A16", ignore=pattern)
    stored, original = tensors_of(tmp_path / "out"), tensors_of(gpt2)
    assert "lm_head.weight_packed" in stored
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        whole = f"transformer.h.1.{name}.weight"
        assert same(stored[whole], original[whole])


@pytest.mark.parametrize(
    ("ignore", "refused"), [("lm_heads", True), ("re:.*vision", False), ("vision_tower", False)]
)
def test_a_misspelt_ignore_is_refused_and_a_general_one_is_not(
    odd: Path, tmp_path: Path, ignore: str, refused: bool
) -> None:
    if refused:
        with pytest.raises(TargetError, match="Did you mean 'lm_head'"):
            model_free_ptq(odd, tmp_path / "out", "W4A16", ignore=ignore)
    else:
        model_free_ptq(odd, tmp_path / "out", "W4A16", ignore=ignore)


def test_what_is_quantized_already_is_kept(odd: Path, tmp_path: Path) -> None:
    """Two runs with a scheme each give the tensors that each of them gives alone."""
    halves = {"FP8_DYNAMIC": ["re:.*experts"], "W4A16": ["re:.*mix"]}
    first = model_free_ptq(odd, tmp_path / "1", "FP8_DYNAMIC", ignore=["lm_head", "re:.*mix"])
    both = model_free_ptq(first, tmp_path / "2", "W4A16", ignore=["lm_head"])
    written = tensors_of(both)

    expected = tensors_of(model_free_ptq(odd, tmp_path / "3", config=halves))
    assert written.keys() == expected.keys()
    assert [name for name in expected if not same(written[name], expected[name])] == []

    own = config_of(both)["quantization_config"]
    assert own["format"] == "mixed-precision"
    assert {group["format"] for group in own["config_groups"].values()} == {
        "float-quantized",
        "pack-quantized",
    }
    report = verify(both, serve="vllm", tp=1)
    assert [one for one in report.findings if one.severity.name == "ERROR"] == []
    assert report.quantized == 2 * (4 + 3 * EXPERTS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "fp8"}, "already quantized by fp8"),
        ({"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        ({"quantization_status": "frozen"}, "frozen"),
        ({"ignore": ["re:.*experts"]}, "does not say how"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    odd: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    first = model_free_ptq(odd, tmp_path / "1", "FP8_DYNAMIC", ignore=["lm_head", "re:.*mix"])
    config = config_of(first)
    config["quantization_config"] |= changes
    (first / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        model_free_ptq(first, tmp_path / "2", "W4A16", ignore=["lm_head"])
    assert not (tmp_path / "2").exists()
