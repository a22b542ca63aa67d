# SPDX-License-Identifier: Apache-2.0
"""Every input that cannot be used: one error that says what to do, and nothing else happens."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tests.support import small_models as small
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import llmcompressor
from llmcompressor import (
    active_session,
    create_session,
    evaluate,
    model_free_ptq,
    oneshot,
    plan,
    reset_session,
    train,
)
from llmcompressor.errors import (
    ArgumentError,
    CheckpointError,
    DatasetError,
    InputError,
    NonFiniteError,
    OutputError,
    RecipeError,
    TargetError,
)
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.planning.result import Rates
from llmcompressor.recipe import Recipe

PICO = str(Path(llmcompressor.__file__).parent / "data" / "pico-stdlib")
RTN = "modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head]}}"
STATIC = "modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8, ignore: [lm_head]}}"
GPTQ = "modifiers: {GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}}"
CACHE = (
    "modifiers: {QuantizationModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head], "
    "kv_cache_scheme: {num_bits: 8, type: float, strategy: tensor}}}"
)


@dataclass(frozen=True)
class Place:
    """Where a case finds its input: a folder of its own with a copy of the model."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def weights(self) -> Path:
        return self.model / "model.safetensors"

    @property
    def output(self) -> Path:
        return self.root / "output"

    def correct(self) -> dict[str, Any]:
        """Arguments with nothing wrong in them."""
        return {
            "model": str(self.model),
            "recipe": GPTQ,
            "dataset": small.token_rows(),
            "output_dir": str(self.output),
        }

    def change_weight(self, name: str, value: float, *, whole: bool = False) -> None:
        """Put ``value`` into one place of a weight, or everywhere."""
        tensors = load_file(self.weights)
        if whole:
            tensors[name].fill_(value)
        else:
            tensors[name].view(-1)[7] = value
        save_file(tensors, self.weights, metadata={"format": "pt"})

    def change_config(self, **values: Any) -> None:
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps({**config, **values}))


@dataclass(frozen=True)
class Case:
    """What is wrong, which error says so, and words of its message: thing, reason and remedy."""

    name: str
    change: Callable[[Place], dict[str, Any]]
    error: type[Exception]
    words: tuple[str, ...]
    reaches_model: bool = False
    """Whether the model is looked at: then the case is also run with a loaded model."""
    calibrates: bool = False
    """Whether it can be seen only while batches run."""


def quantize(fields: str, modifier: str = "QuantizationModifier") -> dict[str, Any]:
    return {"recipe": f"modifiers: {{{modifier}: {{{fields}}}}}"}


def foreign_config(place: Place) -> dict[str, Any]:
    place.change_config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    return {}


def own_output(place: Place) -> dict[str, Any]:
    first = str(place.root / "first")
    oneshot(model=str(place.model), recipe=RTN, output_dir=first, verify=False)
    reset_session()
    return {"model": str(place.root / "first")}


def truncated(keep: float) -> Callable[[Place], dict[str, Any]]:
    def cut(place: Place) -> dict[str, Any]:
        data = place.weights.read_bytes()
        place.weights.write_bytes(data[: int(len(data) * keep)])
        return {}

    return cut


def weight(name: str, value: float, *, whole: bool = False, **arguments: Any) -> Any:
    def change(place: Place) -> dict[str, Any]:
        place.change_weight(name, value, whole=whole)
        return arguments

    return change


def piped(name: str) -> Callable[[Place], dict[str, Any]]:
    def change(place: Place) -> dict[str, Any]:
        (place.model / name).unlink(missing_ok=True)
        os.mkfifo(place.model / name)
        return {}

    return change


def config(**values: Any) -> Callable[[Place], dict[str, Any]]:
    def change(place: Place) -> dict[str, Any]:
        place.change_config(**values)
        return {}

    return change


def used_output(place: Place) -> dict[str, Any]:
    place.output.mkdir()
    (place.output / "notes.txt").write_text("mine")
    return {}


def output_file(place: Place) -> dict[str, Any]:
    place.output.write_text("mine")
    return {}


def emptied_model(place: Place) -> dict[str, Any]:
    shutil.rmtree(place.model)
    place.model.mkdir()
    (place.model / "README.md").write_text("no model")
    return {}


def no_weights(place: Place) -> dict[str, Any]:
    place.weights.unlink()
    return {}


def file_of(name: str, text: str) -> Callable[[Place], dict[str, Any]]:
    def write(place: Place) -> dict[str, Any]:
        (place.root / name).write_text(text)
        return {"dataset": str(place.root / name)}

    return write


def rows(**columns: Any) -> Callable[[Place], dict[str, Any]]:
    return lambda _: {"dataset": Dataset.from_dict(columns)}


def loader(ids: list[list[int]]) -> DataLoader[Any]:
    return DataLoader([{"input_ids": torch.tensor(row)} for row in ids], batch_size=1)


Q1 = "model.layers.1.self_attn.q_proj"
NORM1 = "model.layers.1.input_layernorm.weight"
HUGE = {"name": NORM1, "value": 3e38, "whole": True}
"""Finite, but what it is multiplied with is not: seen by whoever reads the second block."""

CASES = [
    Case(
        "unknown preset",
        lambda _: quantize("targets: Linear, scheme: W4A61"),
        InputError,
        ("W4A61", "W4A16", "FP8_DYNAMIC", "NVFP4", "UNQUANTIZED"),
    ),
    Case(
        "misspelt observer",
        lambda _: quantize("scheme: W4A16, weight_observer: msee", "GPTQModifier"),
        InputError,
        ("msee", "mse"),
        reaches_model=True,
    ),
    Case(
        "4-bit floats that no format stores",
        lambda _: quantize(
            "config_groups: {g: {targets: [Linear], "
            "weights: {num_bits: 4, type: float, strategy: channel}}}"
        ),
        RecipeError,
        ("4-bit floats", "group_size 32", "group_size 16"),
    ),
    Case(
        "a global scale of weights that no format stores",
        lambda _: quantize(
            "config_groups: {g: {targets: [Linear], "
            "weights: {num_bits: 4, strategy: tensor_group, group_size: 16}}}"
        ),
        RecipeError,
        ("config_groups.g.weights", "tensor_group", "strategy: group"),
    ),
    Case(
        "static scales of groups of features",
        lambda _: quantize(
            "config_groups: {g: {targets: [Linear], weights: {num_bits: 8}, "
            "input_activations: {num_bits: 8, strategy: group, group_size: 32}}}"
        ),
        RecipeError,
        ("config_groups.g.input_activations", "group", "dynamic: true", "strategy: tensor"),
    ),
    Case(
        "a cache with a strategy for weights",
        lambda _: quantize("kv_cache_scheme: {num_bits: 8, type: float, group_size: 32}"),
        RecipeError,
        ("kv_cache_scheme", "group", "attn_head"),
    ),
    Case(
        "a recipe without a modifier",
        lambda _: {"recipe": "quantization:\n  scheme: W4A16\n  targets: Linear\n"},
        RecipeError,
        ("recipe", "quantization", "modifiers"),
    ),
    Case(
        "unknown modifier",
        lambda _: quantize("targets: Linear, scheme: W4A16", "GTPQModifier"),
        RecipeError,
        ("GTPQModifier", "GPTQModifier"),
    ),
    Case(
        "misspelt field",
        lambda _: quantize("targets: Linear, scheme: W4A16, dampning_frac: 0.1", "GPTQModifier"),
        RecipeError,
        ("dampning_frac", "dampening_frac", "GPTQModifier"),
    ),
    Case(
        "scheme and config_groups",
        lambda _: quantize(
            "scheme: W4A16, config_groups: {g: {targets: [Linear], weights: {num_bits: 8}}}"
        ),
        RecipeError,
        ("scheme", "config_groups"),
    ),
    Case("no such stage", lambda _: {"stage": "prune"}, RecipeError, ("prune", "default")),
    Case(
        "misspelt argument",
        lambda _: {"num_calibraton_samples": 4},
        ArgumentError,
        ("num_calibraton_samples", "num_calibration_samples"),
    ),
    Case("unknown argument", lambda _: {"frobnicate": 1}, ArgumentError, ("frobnicate", "Remove")),
    Case("an empty output_dir", lambda _: {"output_dir": ""}, OutputError, ("output_dir", "empty")),
    Case(
        "an output_dir that is too long",
        lambda place: {"output_dir": str(place.root / ("x" * 300))},
        OutputError,
        ("xxx", "300 bytes", "shorter name"),
    ),
    Case("the root as output_dir", lambda _: {"output_dir": "/"}, OutputError, ("/", "input")),
    Case(
        "a log_dir that is a file",
        lambda place: {"log_dir": str(place.model / "config.json")},
        OutputError,
        ("log_dir", "config.json", "Choose"),
    ),
    Case(
        "an output_dir that is the current directory",
        lambda _: {"output_dir": "."},
        OutputError,
        (str(Path.cwd()), "current directory", "inside it"),
    ),
    Case(
        "a pipeline that reads no data",
        lambda _: {"pipeline": "datafree"},
        ArgumentError,
        ("datafree", "GPTQModifier", "pipeline", "QuantizationModifier needs none"),
    ),
    Case(
        "no model folder",
        lambda place: {"model": str(place.root / "modle")},
        CheckpointError,
        ("modle",),
    ),
    Case("a folder without a model", emptied_model, CheckpointError, ("model", "config.json")),
    Case("a folder without weights", no_weights, CheckpointError, ("model", "safetensors")),
    Case("truncated weights", truncated(0.5), CheckpointError, ("model.safetensors", "truncated")),
    *(
        Case(f"a pipe {name}", piped(name), CheckpointError, (name, "is a pipe, not a file"))
        for name in ("config.json", "model.safetensors", "more.safetensors", "tokenizer.json")
    ),
    *(
        Case(f"{key} {size}", config(**{key: size}), CheckpointError, (f"{key} {size}", "Correct"))
        for key, size in (("num_hidden_layers", 10**6), ("vocab_size", 10**13))
    ),
    Case(
        "a pattern without end",
        lambda _: quantize("scheme: FP8_DYNAMIC, targets: ['re:([a-z0-9_.]+)+!']"),
        TargetError,
        ("re:([a-z0-9_.]+)+!", "takes too long", "without a repetition"),
    ),
    Case(
        "quantized by another tool", foreign_config, CheckpointError, ("gptq", "already quantized")
    ),
    Case(
        "quantized by this one",
        own_output,
        TargetError,
        ("q_proj", "quantized already", "ignore list", "original model"),
    ),
    Case(
        "a target that matches nothing",
        lambda _: quantize("targets: ['re:.*q_porj'], scheme: W4A16", "GPTQModifier"),
        TargetError,
        ("re:.*q_porj", "q_proj", "allow_unmatched"),
        reaches_model=True,
    ),
    Case(
        "one of two targets matches nothing",
        lambda _: quantize("targets: [Linear, Liner], scheme: W4A16", "GPTQModifier"),
        TargetError,
        ("Liner", "Linear"),
        reaches_model=True,
    ),
    Case(
        "a group size that does not divide",
        lambda _: quantize(
            "config_groups: {g: {targets: [Linear], weights: {num_bits: 4, group_size: 48}}}"
        ),
        TargetError,
        ("layers.1.self_attn.q_proj", "128", "48", "group size"),
        reaches_model=True,
    ),
    Case(
        "GPTQ without a dataset",
        lambda _: {"dataset": None},
        DatasetError,
        ("GPTQModifier", "dataset="),
    ),
    Case(
        "static activations without a dataset",
        lambda _: {"dataset": None, "recipe": STATIC},
        DatasetError,
        ("QuantizationModifier", "dataset="),
    ),
    Case("an empty file", file_of("data.jsonl", ""), DatasetError, ("data.jsonl", "empty")),
    Case(
        "an empty DataLoader",
        lambda _: {"dataset": loader([])},
        DatasetError,
        ("no batch", "sample"),
        reaches_model=True,
    ),
    Case(
        "no usable columns",
        lambda _: {
            "dataset": Dataset.from_dict({"label": [0, 1], "score": [0.5, 0.25]}),
            "tokenizer": PICO,
        },
        DatasetError,
        ("label", "score", "text", "preprocessing_func"),
        reaches_model=True,
    ),
    Case(
        "a misspelt text_column",
        lambda _: {
            "dataset": [{"text": "a", "body": "b"}],
            "text_column": "bodi",
            "tokenizer": PICO,
        },
        DatasetError,
        ("bodi", "body", "text", "Did you mean"),
        reaches_model=True,
    ),
    Case(
        "text without a tokenizer",
        lambda _: {"dataset": ["some text", "some more"]},
        DatasetError,
        ("tokenizer",),
        reaches_model=True,
    ),
    Case(
        "a token id above the vocabulary",
        rows(input_ids=[[5, 6, 7], [5, 128, 7]]),
        DatasetError,
        ("128", "127", "tokenizer"),
        reaches_model=True,
    ),
    Case(
        "a token id above the vocabulary in a DataLoader",
        lambda _: {"dataset": loader([[5, 6], [7, 500]])},
        DatasetError,
        ("500", "127", "Batch 1"),
        reaches_model=True,
    ),
    *(
        Case(
            f"{value} in a weight, {name}",
            weight(f"{Q1}.weight", float(value), recipe=recipe),
            NonFiniteError,
            (f"{Q1}.weight", "NaN or infinity", "checkpoint"),
            reaches_model=True,
        )
        for name, recipe in {"RTN": RTN, "GPTQ": GPTQ}.items()
        for value in ("nan", "inf")
    ),
    Case(
        "NaN in a weight that is no target",
        weight(NORM1, float("nan"), recipe=RTN),
        NonFiniteError,
        (NORM1, "NaN or infinity", "checkpoint"),
        reaches_model=True,
    ),
    *(
        Case(
            f"activations that are not finite, {name}",
            weight(**HUGE, recipe=recipe, **arguments),
            NonFiniteError,
            # statistics name the Linear; where all of a block runs first, it is the block
            ("model.layers.1" if "pipeline" in arguments else Q1, "NaN or infinity"),
            reaches_model=True,
            calibrates=True,
        )
        for name, recipe, arguments in (
            ("GPTQ", GPTQ, {}),
            ("GPTQ in one stream", GPTQ.replace("W4A16", "W4A16, asymmetric: false"), {}),
            ("GPTQ by layers", GPTQ, {"pipeline": "layer_sequential"}),
            ("GPTQ, basic", GPTQ, {"pipeline": "basic"}),
            ("static activations", STATIC, {}),
            ("NVFP4", STATIC.replace("FP8", "NVFP4"), {}),
            ("imatrix", RTN.replace("Linear", "Linear, weight_observer: imatrix_mse"), {}),
        )
    ),
    Case(
        "activations that are not finite, cache",
        weight(**HUGE, recipe=CACHE),
        NonFiniteError,
        ("model.layers.1.self_attn", "NaN or infinity"),
        reaches_model=True,
        calibrates=True,
    ),
    Case(
        "activations that are not finite behind what is calibrated",
        weight(**HUGE, recipe=STATIC.replace("Linear", "'re:.*0.*proj'"), pipeline="basic"),
        NonFiniteError,
        ("What model.layers.1 returns", "NaN or infinity"),
        reaches_model=True,
        calibrates=True,
    ),
    Case(
        "activations that are not finite before what is calibrated",
        weight(
            "model.layers.0.input_layernorm.weight",
            3e38,
            whole=True,
            recipe=STATIC.replace("Linear", "'re:.*1.*proj'"),
        ),
        NonFiniteError,
        ("What model.layers.0 returns", "NaN or infinity"),
        reaches_model=True,
        calibrates=True,
    ),
    Case(
        "an output directory in use", used_output, OutputError, ("output", "already", "overwrite")
    ),
    Case("an output that is a file", output_file, OutputError, ("output", "file", "Choose")),
    Case(
        "the input as output",
        lambda place: {"output_dir": str(place.model)},
        OutputError,
        ("input model itself", "Choose"),
    ),
    Case(
        "an output inside the input",
        lambda place: {"output_dir": str(place.model / "small")},
        OutputError,
        ("inside the input", "Choose"),
    ),
]


@pytest.fixture
def place(tmp_path: Path, llama_folder: Path) -> Place:
    shutil.copytree(llama_folder, tmp_path / "model")
    return Place(tmp_path)


def check_message(error: BaseException, words: tuple[str, ...]) -> None:
    message = str(error)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    if isinstance(error, InputError):
        assert error.problem
        assert error.remedy, f"no remedy in: {message}"


def check_works(place: Place, model: Path | Any, name: str) -> None:
    """A correct call right after: complete, and written under its name."""
    oneshot(model=model, recipe=RTN, output_dir=str(place.root / name), verify=False)
    assert (place.root / name / "model.safetensors").is_file()
    assert not list(place.root.glob("*.partial-*"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case, place: Place, one_block: Path) -> None:
    arguments = {**place.correct(), **case.change(place)}
    before = small.tree(place.root)
    with small.counted_forwards() as calls, pytest.raises(case.error) as caught:
        oneshot(**arguments)
    check_message(caught.value, case.words)
    assert bool(calls) == case.calibrates
    after = small.tree(place.root)
    if case.calibrates:  # what was finished by then is kept, beside the output
        after = {name: at for name, at in after.items() if not name.startswith("output.partial")}
    assert after == before
    assert not active_session().lifecycle.initialized_
    check_works(place, str(one_block), "correct")


ENTRYPOINTS: dict[str, Callable[[Place], Any]] = {
    "oneshot": lambda place: oneshot(**place.correct()),
    "plan": lambda place: plan(**place.correct(), measure=False),
    "train": lambda place: train(**place.correct() | {"recipe": RTN}, max_steps=1),
    "evaluate": lambda place: evaluate(str(place.model), dataset=small.token_rows(), num_samples=1),
    "model_free": lambda place: model_free_ptq(place.model, place.output, "FP8_DYNAMIC"),
}
DEEP = '{"a":' + "[" * 10**5 + "]" * 10**5 + "}"


@pytest.mark.parametrize(
    ("fields", "words", "apart"),
    [
        ({"architectures": "LlamaForCausalLM"}, "no list of classes", ["evaluate"]),
        ({"architectures": [3]}, "no list of classes|must be string", []),
        ({"model_type": "qwen2"}, "not one of the model type qwen2", ["plan", "evaluate"]),
        ({"hidden_act": "siluu"}, "cannot build.*siluu", []),
        ({"num_attention_heads": 0}, "cannot build.*zero", []),
        ({"pad_token_id": 99999}, "cannot build.*num_embeddings", []),
        ({"num_hidden_layers": 10**12}, "no model is so large", []),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1: no model is so small", []),
        ({"num_hidden_layers": "4"}, "cannot build.*num_hidden_layers", []),
        ({"hidden_size": None}, "cannot build.*hidden_size", []),
    ],
    ids=str,
)
def test_a_wrong_config_is_one_clear_error_before_the_work(
    fields: dict[str, Any], words: str, apart: list[str], place: Place
) -> None:
    place.change_config(**fields)
    for name, run in ENTRYPOINTS.items():
        if name not in apart:
            with pytest.raises(CheckpointError, match=words):
                run(place)
            assert not list(place.root.glob("output*")), name


def test_a_plan_tells_that_readers_find_another_class(place: Place) -> None:
    place.change_config(model_type="qwen2")
    found = ENTRYPOINTS["plan"](place)
    assert not found.ok
    assert "C5" in {one.rule for one in found.serving if one.severity == "error"}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_files_that_are_nested_without_end_are_one_clear_error(name: str, place: Place) -> None:
    (place.model / name).write_text(DEEP)
    texts = [{"text": "a text of some words"}]
    for run in (
        lambda: oneshot(**place.correct() | {"dataset": texts}),
        lambda: train(**place.correct() | {"recipe": RTN, "dataset": texts}, max_steps=1),
    ):
        with pytest.raises(InputError, match=r"nested too deeply|recursion|its tokenizer"):
            run()
        assert not list(place.root.glob("output*"))
    (place.root / "rows.jsonl").write_text(DEEP)
    with pytest.raises(InputError):
        oneshot(**place.correct() | {"dataset": str(place.root / "rows.jsonl")})


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.reaches_model], ids=lambda case: case.name
)
def test_bad_input_leaves_a_loaded_model_as_it_was(case: Case, place: Place) -> None:
    arguments = {**place.correct(), **case.change(place)}
    model = AutoModelForCausalLM.from_pretrained(place.model).train()
    arguments["model"] = model
    outside = small.fingerprint(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with small.counted_forwards() as calls, pytest.raises(case.error) as caught:
        oneshot(**arguments)
    check_message(caught.value, case.words)
    assert bool(calls) == case.calibrates
    assert small.fingerprint(model) == outside
    assert not place.output.exists()
    if not case.calibrates:  # GPTQ had solved the first block by then
        after = model.state_dict()
        assert all(_same(after[name], tensor) for name, tensor in weights.items())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; NaN equals itself."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights cannot be written to their end."""

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)


@pytest.mark.parametrize("call", [oneshot, plan, model_free_ptq])
def test_an_adapter_beside_the_model_is_not_left_out(
    call: Callable[..., Any], llama_folder: Path, tmp_path: Path
) -> None:
    """transformers would load both."""
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    more: dict[str, Any] = {"recipe": QuantizationModifier(targets="Linear", scheme="W8A16")}
    if call is oneshot:
        more["output_dir"] = tmp_path / "out"
    if call is model_free_ptq:
        more = {"save_directory": tmp_path / "out", "scheme": "W8A16"}
    with pytest.raises(CheckpointError, match=r"beside the model.*merge_and_unload"):
        call(folder, **more)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("existing", ["absent", "overwritten"])
def test_a_full_disk_leaves_the_target_as_it_was(
    existing: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = place.correct()
    if existing == "overwritten":
        oneshot(**{**arguments, "recipe": RTN})
        arguments["overwrite"] = True
    before = small.tree(place.root)
    with monkeypatch.context() as patched:
        fill_disk(patched)
        with pytest.raises(OutputError) as caught:
            oneshot(**arguments)
    check_message(caught.value, ("full", "output", "Free some space"))
    assert small.tree(place.root) == before
    oneshot(**arguments)
    assert (place.output / "model.safetensors").is_file()


def test_a_loaded_model_that_is_quantized_is_refused(place: Place) -> None:
    model = AutoModelForCausalLM.from_pretrained(own_output(place)["model"])
    with pytest.raises(TargetError) as caught:
        oneshot(**{**place.correct(), "model": model})
    check_message(caught.value, ("q_proj", "quantized already", "ignore list"))
    another = AutoModelForCausalLM.from_pretrained(model.config.name_or_path)
    assert torch.equal(small.logits(model), small.logits(another))
    assert not place.output.exists()


@pytest.mark.parametrize("model", [torch.nn.Linear(4, 4), print], ids=["module", "function"])
def test_what_is_no_transformers_model_is_refused(model: Any, place: Place) -> None:
    with pytest.raises(ArgumentError) as caught:
        oneshot(**{**place.correct(), "model": model})
    check_message(caught.value, (type(model).__name__, "transformers model"))
    assert not place.output.exists()


def _of_other_modules(home: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        kind = type("Codes", (torch.nn.Module,), {"__module__": home})
        model.model.layers[0].mlp.up_proj = kind()

    return change


def _of_other_tensors(home: str, *, plain: bool = False) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        kind: Any = type("Codes", (torch.Tensor,), {"__module__": home})
        up, dtype = model.model.layers[0].mlp.up_proj, torch.float32 if plain else torch.int8
        codes = up.weight.data.to(dtype).as_subclass(kind)
        up.weight = torch.nn.Parameter(codes, requires_grad=False)

    return change


@pytest.mark.parametrize(
    ("change", "method"),
    [
        (_of_other_tensors("torchao.quantization.quantize_.workflows"), "torchao"),
        (_of_other_tensors("torchao.dtypes.affine"), "torchao"),
        (_of_other_tensors("optimum.quanto.tensor.weights.qbytes"), "quanto"),
        (_of_other_tensors("bitsandbytes.nn.modules"), "bitsandbytes"),
        (_of_other_modules("optimum.quanto.nn.qlinear"), "quanto"),
        (_of_other_modules("hqq.core.quantize"), "HQQ"),
        (_of_other_modules("gptqmodel.nn_modules.qlinear.torch"), "GPTQ"),
        (_of_other_modules("awq.modules.linear.gemm"), "AWQ"),
        (_of_other_modules("torch.ao.nn.quantized.dynamic.modules.linear"), "PyTorch"),
    ],
)
def test_a_model_that_was_quantized_by_hand_is_refused(
    change: Callable[[Any], None], method: str, tmp_path: Path
) -> None:
    model = small.one_block()
    change(model)
    told = rf"{method}.*model\.layers\.0\.mlp\.up_proj.*Load the model anew"
    for run in (
        lambda: oneshot(model, RTN, output_dir=str(tmp_path / "out")),
        lambda: plan(model, RTN, measure=False),
        lambda: train(model, RTN, small.token_rows(), str(tmp_path / "out"), max_steps=1),
        lambda: session_of(model),
    ):
        with pytest.raises(InputError, match=told):
            run()
    assert not list(tmp_path.iterdir())


def session_of(model: Any) -> None:
    with create_session() as session:
        session.initialize(model=model, recipe=RTN)


def test_weights_that_are_multiplied_in_float8_are_plain() -> None:
    model = small.one_block()
    home = "torchao.float8.float8_linear"
    kind = type("Float8Linear", (torch.nn.Linear,), {"__module__": home})
    model.model.layers[0].mlp.up_proj.__class__ = kind
    session_of(model)


def test_a_modifier_serves_again_after_a_failure(place: Place) -> None:
    """The same object: who mends the data does not have to build the recipe anew."""
    modifier = GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    good = place.correct()
    place.change_weight(NORM1, 3e38, whole=True)
    with pytest.raises(NonFiniteError):
        oneshot(**{**good, "recipe": modifier})
    place.change_weight(NORM1, 1.0, whole=True)
    oneshot(**{**good, "recipe": modifier})
    assert (place.output / "model.safetensors").is_file()
    assert active_session().lifecycle.recipe == Recipe.from_modifiers(modifier)


@pytest.fixture
def _quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the machine is, which takes a second to measure, is no matter here."""
    rates = Rates("cpu", 1e9, 1e9, 1e9, 1e9, 1.0)
    monkeypatch.setattr("llmcompressor.planning.make.measure_rates", lambda *_: rates)


@pytest.mark.usefixtures("_quick_rates")
@pytest.mark.parametrize(
    "wrong",
    [{"dataset": None}, {"dataset": None, "recipe": STATIC}, {"output_dir": 5}, {"stage": "prune"}],
    ids=str,
)
def test_a_dry_run_lists_what_a_run_refuses(wrong: dict[str, Any], place: Place) -> None:
    arguments = {**place.correct(), **wrong}
    with pytest.raises(InputError) as caught:
        oneshot(**arguments)
    found = oneshot(**arguments, dry_run=True)
    assert not found.ok
    assert [(one.message, one.remedy) for one in found.problems] == [
        (caught.value.problem, caught.value.remedy)
    ]
    assert found.problems == plan(**arguments, measure=False).problems
