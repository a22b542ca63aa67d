# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import hashlib
import json
import pickle
import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from tests.support import tiny_checkpoints as tiny
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    LlamaForCausalLM,
    LlavaProcessor,
    PreTrainedModel,
)

import llmcompressor
from llmcompressor.checkpoint.copied_files import side_files
from llmcompressor.checkpoint.load import load_model
from llmcompressor.checkpoint.save import SaveOptions, modify_save_pretrained, save_checkpoint
from llmcompressor.checkpoint.side_files import extra_ignore_patterns
from llmcompressor.errors import ArgumentError
from llmcompressor.schemes.presets import preset_scheme

PICO = Path(llmcompressor.__file__).parent / "data" / "pico-stdlib"


def w4a16(model: PreTrainedModel) -> PreTrainedModel:
    return tiny.quantize_model(model, {"g": preset_scheme("W4A16", ["Linear"])})


def tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint as found in the wild: odd keys, code, templates, and a draft head."""
    folder = tmp_path / "source"
    tiny.llama().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(PICO / name, folder / name)
    config = config_of(folder)
    config["made_by"] = {"whom": "somebody"}
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}  \n")
    (folder / "modeling_own.py").write_text("x = 1\n")
    (folder / "LICENSE").write_text("free")
    (folder / "README.md").write_text("# not about the compressed model")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("tools")
    own = tensors(folder)
    extra = {
        "mtp.fc.weight": torch.randn(8, 16).to(torch.float8_e4m3fn),
        "mtp.layers.0.norm.weight": torch.randn(8),
        "model.layers.2.eh_proj.weight": torch.randn(8, 16, dtype=torch.bfloat16),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4),
    }
    safetensors.torch.save_file(own | extra, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_model_in_memory_is_not_touched(tmp_path: Path) -> None:
    model = w4a16(tiny.llama(tied=True))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = copy.deepcopy(model.config.to_dict())
    logits = model(tiny.tokens()).logits
    save_checkpoint(model, tmp_path / "out")
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.to_dict() == config
    assert torch.equal(model(tiny.tokens()).logits, logits)
    assert "save_pretrained" not in vars(model)


def test_two_saves_are_the_same_bytes(tmp_path: Path, source: Path) -> None:
    for name in ("a", "b"):
        options = SaveOptions(recipe="r: 1", report={"b": 1, "a": 2})
        save_checkpoint(w4a16(load_model(source)), tmp_path / name, options)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.is_file()}
        for name in ("a", "b")
    )
    assert first == second
    assert len(first) > 8


class TestFiles:
    def test_everything_of_the_source(self, tmp_path: Path, source: Path) -> None:
        options = SaveOptions(recipe=lambda: "a: b\n", report={"fallbacks": ["x"]})
        save_checkpoint(w4a16(load_model(source)), tmp_path / "out", options)
        out = tmp_path / "out"
        for name in (
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "modeling_own.py",
            "LICENSE",
            "generation_config.json",
            "additional_chat_templates/tools.jinja",
        ):
            assert (out / name).read_bytes() == (source / name).read_bytes(), name
        line, recipe = (out / "recipe.yaml").read_text().split("\n", 1)
        assert line == "# yaml-language-server: $schema=recipe.schema.json"
        assert recipe == "a: b\n"
        assert json.loads((out / "recipe.schema.json").read_text())["type"] == "object"
        file = out / "compression_report.json"
        assert json.loads(file.read_text()) == {"fallbacks": ["x"]}
        assert not (out / "README.md").exists()

    def test_code_in_folders(self, tmp_path: Path, source: Path) -> None:
        copied = (
            "custom_generate/generate.py",
            "custom_generate/requirements.txt",
            "own/layers/attention.py",
            "own/requirements.txt",
        )
        left = (
            "custom_generate/README.md",
            "own/__pycache__/old.py",
            "own/.hidden/secret.py",
            ".git/hook.py",
            "other/config.json",
            "other/modeling_other.py",
            "onnx/model.onnx",
        )
        for name in (*copied, *left):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(f"# {name}")
        (source / "linked").symlink_to(source / "own")
        save_checkpoint(w4a16(load_model(source)), tmp_path / "out")
        out = tmp_path / "out"
        assert {name for name in (*copied, *left) if (out / name).exists()} == set(copied)
        assert not (out / "linked").exists()
        assert all((out / name).read_text() == f"# {name}" for name in copied)
        assert {path.relative_to(source).as_posix() for path in side_files(source)} > set(copied)

    def test_a_tokenizer_that_was_used_does_not_change_its_files(
        self, tmp_path: Path, source: Path
    ) -> None:
        """Scripts choose how samples are padded and cut; readers would do so too."""
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
        tokenizer(["def f"], truncation=True, max_length=1, padding="max_length")
        save_checkpoint(
            w4a16(load_model(source)), tmp_path / "out", SaveOptions(processor=tokenizer)
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()

    def test_a_changed_tokenizer_is_written_as_it_is(self, tmp_path: Path, source: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.add_tokens(["<surprise>"])
        tokenizer.chat_template = "{{ messages[0].content }}!"
        tokenizer(["def f"], truncation=True, max_length=1)
        save_checkpoint(
            w4a16(load_model(source)), tmp_path / "out", SaveOptions(processor=tokenizer)
        )
        read = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert len(read) == len(AutoTokenizer.from_pretrained(source)) + 1
        assert read.chat_template == tokenizer.chat_template
        stored = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
        assert stored["truncation"] is stored["padding"] is None

    def test_a_processor_of_parts_is_written_whole(self, tmp_path: Path, source: Path) -> None:
        """The folder of its tokenizer holds nothing else of it."""
        # processors of transformers leave the files in this folder open
        shutil.rmtree(source / "additional_chat_templates")
        processor = LlavaProcessor(
            CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16),
            AutoTokenizer.from_pretrained(source),
            patch_size=4,
        )
        save_checkpoint(
            w4a16(load_model(source)), tmp_path / "out", SaveOptions(processor=processor)
        )
        read = LlavaProcessor.from_pretrained(tmp_path / "out")
        assert read.patch_size == 4
        assert read.image_processor.crop_size == processor.image_processor.crop_size

    def test_another_tokenizer_replaces_all_files_of_the_source(
        self, tmp_path: Path, source: Path
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(PICO / name, elsewhere / name)
        with (elsewhere / "tokenizer_config.json").open("a") as stream:
            stream.write("\n\n")
        (source / "tokenizer.model.v3").write_text("of the source")
        (elsewhere / "tokenizer.sp").write_text("of the other")
        tokenizer = AutoTokenizer.from_pretrained(elsewhere)
        save_checkpoint(
            w4a16(load_model(source)), tmp_path / "out", SaveOptions(processor=tokenizer)
        )
        assert not (tmp_path / "out" / "tokenizer.model.v3").exists()
        assert (tmp_path / "out" / "tokenizer.sp").exists()
        name = "tokenizer_config.json"
        assert (tmp_path / "out" / name).read_bytes() == (elsewhere / name).read_bytes()
        assert not (tmp_path / "out" / "chat_template.jinja").exists()
        assert (tmp_path / "out" / "modeling_own.py").exists()

    @pytest.mark.parametrize("kind", ["folder of another processor", "changed"])
    def test_a_tokenizer_alone_leaves_the_rest_of_the_processor(
        self, tmp_path: Path, source: Path, kind: str
    ) -> None:
        shutil.rmtree(source / "additional_chat_templates")
        images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16)
        own = AutoTokenizer.from_pretrained(source)
        LlavaProcessor(images, own, patch_size=4).save_pretrained(source)
        images.save_pretrained(source)
        elsewhere = tmp_path / "elsewhere"
        tokenizer = AutoTokenizer.from_pretrained(PICO)
        tokenizer.add_tokens(["<surprise>"])
        tokenizer.save_pretrained(elsewhere)
        if kind == "folder of another processor":
            LlavaProcessor(images, tokenizer, patch_size=8).save_pretrained(elsewhere)
            tokenizer = AutoTokenizer.from_pretrained(elsewhere)
        save_checkpoint(
            w4a16(load_model(source)), tmp_path / "out", SaveOptions(processor=tokenizer)
        )
        for name in ("preprocessor_config.json", "processor_config.json", "chat_template.jinja"):
            assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
        read = LlavaProcessor.from_pretrained(tmp_path / "out")
        assert len(read.tokenizer) == len(own) + 1
        assert read.patch_size == 4


class TestConfig:
    def test_only_what_changed_is_patched(self, tmp_path: Path, source: Path) -> None:
        save_checkpoint(w4a16(load_model(source)), tmp_path / "out")
        before, after = config_of(source), config_of(tmp_path / "out")
        assert after.pop("quantization_config")["quantization_status"] == "compressed"
        assert after == before

    def test_what_was_changed_in_memory(self, tmp_path: Path, source: Path) -> None:
        model = w4a16(load_model(source))
        model.config.rms_norm_eps = 1e-4
        model.config.use_cache = False  # a setting of the run, not of the model
        save_checkpoint(model, tmp_path / "out")
        config = config_of(tmp_path / "out")
        assert config["rms_norm_eps"] == 1e-4
        assert config["use_cache"] is True

    def test_an_unquantized_model_has_no_quantization_config(
        self, tmp_path: Path, source: Path
    ) -> None:
        save_checkpoint(load_model(source), tmp_path / "out")
        assert "quantization_config" not in config_of(tmp_path / "out")
        before, after = tensors(source), tensors(tmp_path / "out")
        before.pop("model.layers.0.self_attn.rotary_emb.inv_freq")
        assert before.keys() == after.keys()
        assert all(before[k].view(torch.uint8).equal(after[k].view(torch.uint8)) for k in before)


class TestTies:
    @pytest.mark.parametrize("tied", [True, False])
    def test_a_tie_is_stored_as_it_is(self, tied: bool, tmp_path: Path) -> None:
        save_checkpoint(w4a16(tiny.llama(tied=tied)), tmp_path / "out")
        assert ("lm_head.weight" in tensors(tmp_path / "out")) == (not tied)
        assert config_of(tmp_path / "out")["tie_word_embeddings"] is tied

    @pytest.mark.parametrize("tied", [True, False])
    def test_equal_embeddings_become_one_if_tied(self, tied: bool, tmp_path: Path) -> None:
        model = w4a16(tiny.llama(tied=tied))
        weight = model.model.embed_tokens.weight
        model.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
        save_checkpoint(model, tmp_path / "out")
        assert ("lm_head.weight" in tensors(tmp_path / "out")) == (not tied)
        assert config_of(tmp_path / "out")["tie_word_embeddings"] is tied
        assert model.config.tie_word_embeddings is tied

    def test_embeddings_that_grew_apart(self, tmp_path: Path) -> None:
        model = w4a16(tiny.llama(tied=True))
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
        save_checkpoint(model, tmp_path / "out")
        assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
        read = LlamaForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.equal(read.lm_head.weight, model.lm_head.weight)

    def test_a_quantized_head_is_a_tensor_of_its_own(self, tmp_path: Path) -> None:
        model = tiny.llama(tied=True)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        scheme = preset_scheme("W8A16", ["Linear", "re:.*lm_head"])
        tiny.quantize_model(model, {"g": scheme}, ignore=())
        save_checkpoint(model, tmp_path / "out")
        assert {"lm_head.weight_packed", "model.embed_tokens.weight"} <= set(
            tensors(tmp_path / "out")
        )
        assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
        read = LlamaForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.equal(read(tiny.tokens()).logits, model(tiny.tokens()).logits)


class TestShards:
    def test_index_covers_all_tensors(self, tmp_path: Path) -> None:
        model = w4a16(tiny.llama())
        save_checkpoint(model, tmp_path / "whole")
        save_checkpoint(model, tmp_path / "parts", SaveOptions(max_shard_size="50KB"))
        files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
        assert len(files) > 3
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / "parts" / file, "pt") as reader:
                assert name in reader.keys()  # noqa: SIM118
        whole = tensors(tmp_path / "whole")
        assert index["weight_map"].keys() == whole.keys()
        total = sum(tensor.numel() * tensor.element_size() for tensor in whole.values())
        assert index["metadata"]["total_size"] == total
        parts = tensors(tmp_path / "parts")
        assert all(torch.equal(whole[name], parts[name]) for name in whole)
        read = LlamaForCausalLM.from_pretrained(tmp_path / "parts")
        assert torch.equal(read(tiny.tokens()).logits, model(tiny.tokens()).logits)


class TestExtraTensors:
    def test_carried_over_unchanged_and_ignored(self, tmp_path: Path, source: Path) -> None:
        model = w4a16(load_model(source))
        save_checkpoint(model, tmp_path / "out")
        before, after = tensors(source), tensors(tmp_path / "out")
        carried = ("mtp.fc.weight", "mtp.layers.0.norm.weight", "model.layers.2.eh_proj.weight")
        for name in carried:
            assert before[name].dtype == after[name].dtype
            assert before[name].view(torch.uint8).equal(after[name].view(torch.uint8))
        assert not any("inv_freq" in name for name in after)
        ignore = config_of(tmp_path / "out")["quantization_config"]["ignore"]
        assert ignore[0] == "lm_head"
        assert len(ignore) == 3

    def test_patterns_reach_the_extras_and_nothing_else(self, tmp_path: Path, source: Path) -> None:
        save_checkpoint(w4a16(load_model(source)), tmp_path / "out")
        quantization = config_of(tmp_path / "out")["quantization_config"]
        patterns = [entry[3:] for entry in quantization["ignore"] if entry.startswith("re:")]

        def ignored(name: str) -> bool:
            return any(re.match(pattern, name) for pattern in patterns)

        assert ignored("mtp.fc")
        assert ignored("mtp.layers.0.self_attn.q_proj")
        assert ignored("model.layers.2.eh_proj")
        assert ignored("model.layers.2.mlp.up_proj")
        assert not any(ignored(f"model.layers.{n}.mlp.up_proj") for n in (0, 1, 20, 12))

    def test_a_source_damaged_since_does_not_cost_the_result(
        self, tmp_path: Path, source: Path
    ) -> None:
        model = w4a16(load_model(source))
        file = source / "model.safetensors"
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content[:-100])
        save_checkpoint(model, tmp_path / "out")
        assert "mtp.fc.weight" not in tensors(tmp_path / "out")
        assert "model.embed_tokens.weight" in tensors(tmp_path / "out")

    def test_a_pattern_that_would_reach_too_far_is_anchored(self) -> None:
        quantized = ["model.layers.0.mlp.up_proj"]
        written = {"model.layers.0.mlp.up_proj.weight_packed"}
        (pattern,) = extra_ignore_patterns(["mlp.fc.weight"], written, quantized)
        assert re.match(pattern[3:], "mlp.fc")
        assert not re.match(pattern[3:], quantized[0])


class TestFailure:
    def test_no_network(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forbidden(*_arguments: Any, **_keywords: Any) -> NoReturn:
            raise AssertionError("a connection was made")

        model = w4a16(load_model(source))
        named = w4a16(tiny.llama())
        named.config.name_or_path = "some-owner/some-model"
        monkeypatch.setattr(socket, "socket", forbidden)
        monkeypatch.setattr(socket, "getaddrinfo", forbidden)
        tokenizer = AutoTokenizer.from_pretrained(source)
        save_checkpoint(model, tmp_path / "a", SaveOptions(processor=tokenizer))
        save_checkpoint(named, tmp_path / "b")


class _Hub:
    """Takes the place of the hub: notes what it is asked, keeps the files of the one commit."""

    def __init__(self) -> None:
        self.called: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}

    def api(self, **given: Any) -> _Hub:
        self.called["HfApi"] = given
        return self

    def create_repo(self, repo_id: str, **given: Any) -> Any:
        self.called["create_repo"] = given
        return SimpleNamespace(repo_id=f"org/{repo_id}")

    def create_commit(self, *, operations: list[Any], **given: Any) -> None:
        self.called["create_commit"] = given
        assert not self.files
        for one in operations:
            with one.as_file() as file:
                self.files[one.path_in_repo] = file.read()


class TestSavePretrained:
    def test_writes_what_save_checkpoint_writes(self, tmp_path: Path, source: Path) -> None:
        model = w4a16(load_model(source))
        modify_save_pretrained(model, SaveOptions(recipe="a: 1"))
        model.save_pretrained(tmp_path / "a", save_compressed=True)
        save_checkpoint(model, tmp_path / "b", SaveOptions(recipe="a: 1"))
        shutil.rmtree(tmp_path / "a" / "additional_chat_templates")
        shutil.rmtree(tmp_path / "b" / "additional_chat_templates")
        assert digests(tmp_path / "a") == digests(tmp_path / "b")

    def test_every_old_argument(self, tmp_path: Path) -> None:
        model = w4a16(tiny.llama())
        modify_save_pretrained(model)
        model.save_pretrained(
            str(tmp_path / "out"),
            save_compressed=True,
            quantization_format=None,
            skip_sparsity_compression_stats=True,
            skip_compression_stats=True,
            variant=None,
            save_peft_format=True,
            save_function=torch.save,
            disable_sparse_compression=False,
            safe_serialization=True,
            max_shard_size="50KB",
        )
        assert (tmp_path / "out" / "model.safetensors.index.json").exists()

    def test_where_one_stands_is_filled_and_not_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        model = w4a16(tiny.llama())
        modify_save_pretrained(model)
        model.save_pretrained(".")
        assert Path("model.safetensors").is_file()

    def test_a_format_that_cannot_hold_the_scheme(self, tmp_path: Path) -> None:
        model = w4a16(tiny.llama())
        modify_save_pretrained(model)
        with pytest.raises(ArgumentError, match="nvfp4-pack-quantized holds no weights in int4"):
            model.save_pretrained(tmp_path / "out", quantization_format="nvfp4-pack-quantized")
        assert not any(tmp_path.iterdir())

    def test_dense(self, tmp_path: Path) -> None:
        model = w4a16(tiny.llama())
        modify_save_pretrained(model)
        model.save_pretrained(tmp_path / "out", save_compressed=False)
        stored = tensors(tmp_path / "out")
        name = "model.layers.0.mlp.up_proj"
        assert torch.equal(stored[f"{name}.weight"], model.get_submodule(name).weight)
        assert f"{name}.weight_scale" in stored

    @pytest.mark.parametrize("form", ["copy", "pickle", "torch"])
    def test_a_copy_saves_itself(self, form: str, tmp_path: Path) -> None:
        model = w4a16(tiny.llama())
        modify_save_pretrained(model, SaveOptions(recipe="a: 1"))
        if form == "torch":
            torch.save(model, tmp_path / "model.pt")
            twin = torch.load(tmp_path / "model.pt", weights_only=False)
        else:
            twin = copy.deepcopy(model) if form == "copy" else pickle.loads(pickle.dumps(model))
        twin.model.norm.weight.data.fill_(7)
        twin.save_pretrained(tmp_path / "twin")
        stored = tensors(tmp_path / "twin")
        assert (stored["model.norm.weight"] == 7).all()
        assert "model.layers.0.mlp.up_proj.weight_packed" in stored
        assert (tmp_path / "twin" / "recipe.yaml").read_text().endswith("\na: 1")

    def test_what_is_pushed_is_what_was_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = _Hub()
        monkeypatch.setattr("llmcompressor.checkpoint.model_config.HfApi", hub.api)
        monkeypatch.setattr(
            "llmcompressor.checkpoint.model_config.create_and_tag_model_card", lambda *_: "card"
        )
        model = w4a16(tiny.llama())
        modify_save_pretrained(model, SaveOptions(recipe="a: 1"))
        folder = tmp_path / "out"
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        model.save_pretrained(
            folder,
            save_compressed=False,
            max_shard_size="50KB",
            push_to_hub=True,
            repo_id="me/small",
            token="secret",
            private=True,
            commit_message="Smaller",
        )
        written = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name != "notes.txt"
        }
        assert len([name for name in written if name.endswith(".safetensors")]) > 1
        assert hub.files == {**written, "README.md": b"card"}
        assert hub.called["HfApi"] == {"token": "secret"}
        assert hub.called["create_repo"]["private"] is True
        assert hub.called["create_commit"]["repo_id"] == "org/me/small"
        assert hub.called["create_commit"]["commit_message"] == "Smaller"

    def test_files_of_others_stay(self, tmp_path: Path) -> None:
        AutoTokenizer.from_pretrained(PICO).save_pretrained(tmp_path / "out")
        model = w4a16(tiny.llama())
        modify_save_pretrained(model)
        model.save_pretrained(tmp_path / "out", max_shard_size="50KB")
        model.save_pretrained(tmp_path / "out")
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert {"tokenizer.json", "model.safetensors", "config.json"} <= names
        assert not any("-of-" in name or "index" in name for name in names)
