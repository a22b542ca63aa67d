# SPDX-License-Identifier: Apache-2.0
"""``oneshot``: its arguments, what it returns, what it writes, and what it leaves alone."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tests.support import small_models as small
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmcompressor import Oneshot, create_session, oneshot, plan, verify
from llmcompressor.errors import DatasetError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.recipe import Recipe

DYNAMIC = (
    "modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head]}}"
)
STATIC = DYNAMIC.replace("FP8_DYNAMIC", "FP8")
GPTQ = "modifiers: {GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}}"
# One Linear, the last: it sees what the data has done to all before it.
ONE_LINEAR = "modifiers: {GPTQModifier: {targets: ['re:.*0.mlp.down_proj'], scheme: W4A16}}"
TEXTS = [f"class Number{n}:\n    value = {n}\n\n    def twice(self):\n" * 3 for n in range(12)]


def quantization_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    found: dict[str, Any] = config["quantization_config"]
    return found


def read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def tiny(**arguments: Any) -> Any:
    """``oneshot`` on a random model with eight rows of tokens, unless told otherwise."""
    defaults = {"recipe": GPTQ, "dataset": small.token_rows(), "num_calibration_samples": 8}
    if "model" not in arguments:
        defaults["model"] = small.one_block()
    return oneshot(**{**defaults, **arguments})


def said_of(**arguments: Any) -> list[str]:
    """What the log says of a call's arguments, before any work."""
    heard: list[str] = []
    sink = logger.add(lambda text: heard.append(str(text)), level="INFO", format="{message}")
    try:
        Oneshot(model=small.one_block(), **arguments)
    finally:
        logger.remove(sink)
    return heard


@pytest.mark.parametrize(
    ("recipe", "given", "lines"), [(DYNAMIC, True, 1), (DYNAMIC, False, 0), (GPTQ, True, 0)]
)
def test_data_that_nothing_needs_is_said(recipe: str, given: bool, lines: int) -> None:
    said = said_of(recipe=recipe, dataset=small.token_rows() if given else None)
    assert len([line for line in said if "dataset is not read" in line]) == lines


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": "nope.jsonl"}, "no data set, file or folder 'nope.jsonl'"),
        ({"dataset": "gsm9k"}, "Did you mean gsm8k"),
        ({"dataset": "json"}, "says what kind of files to read"),
        ({"dataset_path": "nope"}, "no file or folder nope"),
    ],
)
def test_data_that_nothing_needs_has_to_be_there(given: dict[str, str], message: str) -> None:
    """A recipe may be another than was meant, as FP8_DYNAMIC for FP8."""
    with pytest.raises(DatasetError, match=message):
        Oneshot(model=small.one_block(), recipe=DYNAMIC, **given)


def test_a_folder_and_its_model_object_give_the_same_files(
    llama_folder: Path, tmp_path: Path
) -> None:
    tiny(model=str(llama_folder), output_dir=tmp_path / "folder")
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    tiny(model=model, output_dir=str(tmp_path / "object"))
    assert small.tree(tmp_path / "folder") == small.tree(tmp_path / "object")


def test_the_returned_model_generates(short_pico: Path) -> None:
    model = oneshot(
        model=short_pico, recipe=GPTQ, dataset=TEXTS, num_calibration_samples=4, max_seq_length=32
    )
    tokenizer = AutoTokenizer.from_pretrained(short_pico)
    prompt = tokenizer("def main(", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert written.shape[1] == prompt["input_ids"].shape[1] + 5


@pytest.mark.parametrize("recipe", [DYNAMIC, STATIC, GPTQ])
def test_save_pretrained_writes_compressed_afterwards(recipe: str, tmp_path: Path) -> None:
    model = tiny(recipe=recipe)
    logits = small.logits(model)
    model.save_pretrained(tmp_path / "saved")
    assert quantization_of(tmp_path / "saved")["quantization_status"] == "compressed"
    assert torch.equal(small.logits(read(tmp_path / "saved")), logits)
    assert torch.equal(small.logits(model), logits), "saving changed the model in memory"
    saved = Recipe.create_instance(tmp_path / "saved" / "recipe.yaml")
    assert saved == Recipe.create_instance(recipe)


def test_a_part_of_a_compressed_model_is_not_written_dense(
    warned: list[str], tmp_path: Path
) -> None:
    model = tiny(recipe=DYNAMIC)
    warned.clear()
    model.save_pretrained(tmp_path / "whole")
    assert not warned
    copy.deepcopy(model).model.save_pretrained(tmp_path / "part")
    (line,) = warned
    assert line.startswith("model is a part of a compressed model: by itself it is written with")
    assert "quantization_config" not in json.loads((tmp_path / "part" / "config.json").read_text())


@pytest.mark.parametrize("streamed", [False, True])
def test_the_returned_model_can_be_pickled(streamed: bool, one_block: Path, tmp_path: Path) -> None:
    given = {"model": str(one_block), "output_dir": tmp_path / "out"} if streamed else {}
    model = tiny(recipe=DYNAMIC, **given)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(small.logits(twin), small.logits(model))
    model.save_pretrained(tmp_path / "saved")
    twin.save_pretrained(tmp_path / "again")
    assert small.tree(tmp_path / "saved") == small.tree(tmp_path / "again")
    assert quantization_of(tmp_path / "again")["format"] == "float-quantized"


def test_save_pretrained_brings_the_tokenizer_of_the_source(
    short_pico: Path, tmp_path: Path
) -> None:
    oneshot(model=short_pico, recipe=DYNAMIC).save_pretrained(tmp_path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (short_pico / name).read_bytes()


def test_save_compressed_false_writes_dense_weights(tmp_path: Path) -> None:
    model = tiny(save_compressed=False, output_dir=tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert torch.equal(small.logits(read(tmp_path / "out")), small.logits(model))
    report = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    findings = report["verification"]["findings"]
    (error,) = [one for one in findings if one["severity"] == "error"]
    assert error["message"].startswith("It is not compressed: 7 modules")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("auto", torch.bfloat16), ("float32", torch.float32), (torch.float16, torch.float16)],
)
def test_precision_is_that_of_the_loaded_weights(
    precision: Any, dtype: torch.dtype, one_block: Path
) -> None:
    model = oneshot(model=one_block, recipe=DYNAMIC, precision=precision)
    assert model.dtype == dtype


def test_untied_embeddings_let_the_head_be_quantized(short_pico: Path, tmp_path: Path) -> None:
    recipe = GPTQ.replace("Linear", "[Linear, lm_head]").replace(", ignore: [lm_head]", "")
    given = {"dataset": TEXTS, "num_calibration_samples": 4, "max_seq_length": 32}
    with pytest.raises(TargetError, match=r"lm_head.*tie_word_embeddings=False"):
        oneshot(model=short_pico, recipe=recipe, tie_word_embeddings=True, **given)
    model = oneshot(model=short_pico, recipe=recipe, output_dir=tmp_path / "out", **given)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {"lm_head.weight_packed", "model.embed_tokens.weight"} <= set(tensors)
    original = load_file(short_pico / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors["model.embed_tokens.weight"], original)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    assert torch.equal(small.logits(read(tmp_path / "out")), small.logits(model))


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("ignore", ["[lm_head]", "[]"])
def test_a_quantized_embedding_is_untied(
    ignore: str, loaded: bool, short_pico: Path, tmp_path: Path, warned: list[str]
) -> None:
    recipe = DYNAMIC.replace("Linear", "[Linear, Embedding]").replace("[lm_head]", ignore)
    recipe = recipe.replace("FP8_DYNAMIC", "W8A16")
    given = AutoModelForCausalLM.from_pretrained(short_pico, dtype="auto") if loaded else short_pico
    oneshot(model=given, recipe=recipe, output_dir=tmp_path / "out")
    assert not [line for line in warned if "tie_word_embeddings" in line or "S60" in line]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight_packed" in tensors
    own = "lm_head.weight" if ignore == "[lm_head]" else "lm_head.weight_packed"
    assert own in tensors
    if own == "lm_head.weight":
        original = load_file(short_pico / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(tensors[own], original)
    errors = [one for one in verify(tmp_path / "out").findings if one.severity == "error"]
    assert errors == []


@pytest.mark.parametrize("ignore", ["[lm_head]", "[]"])
def test_tied_embeddings_stay_tied(ignore: str, short_pico: Path, tmp_path: Path) -> None:
    """Also where a class among the targets reaches the head."""
    recipe = DYNAMIC.replace("[lm_head]", ignore)
    oneshot(model=short_pico, recipe=recipe, output_dir=tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_what_the_model_class_does_not_own_is_carried_over(one_block: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(one_block, source)
    tensors = load_file(source / "model.safetensors")
    extra = {
        "mtp.layers.0.proj.weight": torch.randn(8, 8).to(torch.bfloat16),
        "mtp.norm.weight": torch.ones(8),
    }
    save_file({**tensors, **extra}, source / "model.safetensors", metadata={"format": "pt"})
    (source / "modeling_mine.py").write_text("# code that comes with the model\n")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    before = small.tree(source)
    tiny(model=source, output_dir=tmp_path / "out")
    assert small.tree(source) == before, "the source was written to"
    written: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(file)
    assert all(torch.equal(written[name], tensor) for name, tensor in extra.items())
    assert any("mtp" in entry for entry in quantization_of(tmp_path / "out")["ignore"])
    for name in ("modeling_mine.py", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


STAGES = """
args: {bits: 4, size: 64}
first_stage:
  quantization_modifiers:
    QuantizationModifier:
      config_groups:
        group_0:
          targets: ["re:.*self_attn.*"]
          weights: {num_bits: eval(bits), group_size: "eval(size / 2)"}
second_stage:
  quantization_modifiers:
    QuantizationModifier: {scheme: FP8_DYNAMIC, targets: ["re:.*mlp.*"]}
"""


@pytest.mark.parametrize("stage", ["first", "second_stage"])
def test_a_stage_is_run_alone_and_written_under_its_name(stage: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(STAGES)
    tiny(recipe=tmp_path / "recipe.yaml", stage=stage, output_dir=tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [stage]
    groups = quantization_of(tmp_path / "out" / stage)["config_groups"]
    kinds = [group["weights"]["type"] for group in groups.values()]
    assert kinds == ["int" if stage == "first" else "float"]


@pytest.mark.parametrize("arguments", [{"bits": 8}, ["bits=8"], "bits=8"])
def test_recipe_args_override_those_of_the_file(arguments: Any, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(STAGES)
    tiny(recipe=str(path), recipe_args=arguments, stage="first", output_dir=tmp_path / "out")
    groups = quantization_of(tmp_path / "out" / "first")["config_groups"]
    weights = next(iter(groups.values()))["weights"]
    assert (weights["num_bits"], weights["group_size"]) == (8, 32)


RECIPES: dict[str, Any] = {
    "text": GPTQ,
    "modifier": GPTQModifier(scheme="W8A8", ignore=["lm_head"], asymmetric=False, block_size=64),
    "two of one class": [
        QuantizationModifier(targets=["re:.*self_attn.*"], scheme="W4A16"),
        QuantizationModifier(targets=["re:.*mlp.*"], scheme="FP8"),
    ],
    "config_groups": QuantizationModifier(
        config_groups={
            "W8A8": ["re:.*self_attn.*"],
            "mine": {
                "targets": ["re:.*mlp.*"],
                "weights": {"num_bits": 4, "group_size": 32, "symmetric": False},
            },
        },
        kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"},
    ),
    "stages": STAGES,
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_saved_recipe_is_equal(name: str, tmp_path: Path) -> None:
    given = Recipe.create_instance(RECIPES[name])
    tiny(recipe=RECIPES[name], output_dir=tmp_path / "out")
    assert Recipe.create_instance(tmp_path / "out" / "recipe.yaml") == given


def test_one_modifier_serves_for_several_models() -> None:
    modifier = GPTQModifier(scheme="W4A16", ignore=["lm_head"])
    first, second = (small.logits(tiny(recipe=modifier)) for _ in range(2))
    assert torch.equal(first, second)


def token_lists() -> list[list[int]]:
    rows: list[list[int]] = small.token_rows()["input_ids"]
    return [list(row) for row in rows]


def test_every_form_of_the_same_data_gives_the_same_model(tmp_path: Path) -> None:
    rows = [{"input_ids": row} for row in token_lists()]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    batches = DataLoader([{"input_ids": torch.tensor(row["input_ids"])} for row in rows])
    forms: list[Any] = [Dataset.from_list(rows), rows, str(tmp_path / "rows.jsonl"), batches]
    results = [
        small.logits(tiny(dataset=form, shuffle_calibration_samples=False)) for form in forms
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_texts_are_tokenized_by_the_model_s_own_tokenizer(short_pico: Path) -> None:
    given = {"num_calibration_samples": 4, "max_seq_length": 24}
    tokenizer = AutoTokenizer.from_pretrained(short_pico)
    rows = [{"input_ids": tokenizer(text)["input_ids"][:24]} for text in TEXTS]
    results = []
    for dataset, arguments in (
        (TEXTS, {}),
        (Dataset.from_dict({"story": TEXTS}), {"text_column": "story"}),
        (TEXTS, {"tokenizer": tokenizer}),
        (TEXTS, {"processor": str(short_pico)}),
        (rows, {}),
    ):
        model = oneshot(model=short_pico, recipe=ONE_LINEAR, dataset=dataset, **given, **arguments)
        results.append(small.logits(model))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_data_that_the_recipe_does_not_need_is_not_read(tmp_path: Path) -> None:
    with small.counted_forwards() as calls:
        tiny(recipe=DYNAMIC)
    assert calls == []


@pytest.mark.parametrize("recipe", [STATIC, GPTQ])
@pytest.mark.parametrize("pipeline", ["basic", "sequential", "layer_sequential", None])
def test_every_pipeline_compresses(recipe: str, pipeline: str | None, tmp_path: Path) -> None:
    given = {"model": small.llama(), "recipe": recipe, "pipeline": pipeline}
    model = tiny(**given, output_dir=tmp_path / "out")
    assert len(quantization_of(tmp_path / "out")["config_groups"]) == 1
    assert torch.equal(small.logits(read(tmp_path / "out")), small.logits(model))


def test_the_log_goes_to_a_file_for_the_time_of_the_run(tmp_path: Path) -> None:
    tiny(log_dir=tmp_path / "logs")
    (file,) = (tmp_path / "logs").iterdir()
    assert file.name.startswith("oneshot_")
    assert file.suffix == ".log"
    text = file.read_text()
    assert "GPTQModifier" in text
    tiny()
    assert file.read_text() == text


@pytest.mark.parametrize("clear", [False, True])
def test_the_session_stays_unless_it_is_to_be_cleared(clear: bool) -> None:
    with create_session() as session:
        tiny(clear_sparse_session=clear)
        assert session.lifecycle.initialized_ is not clear
        assert bool(session.lifecycle.recipe.modifiers) is not clear


def test_nothing_global_is_changed() -> None:
    torch.manual_seed(11)
    random.seed(11)

    def state() -> tuple[Any, ...]:
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            dict(os.environ),
            Path.cwd(),
        )

    model = small.llama()
    before = state()
    tiny(model=model)
    assert state() == before
    assert not model.training
    assert model.config.use_cache


def test_the_class_does_what_the_function_does(tmp_path: Path) -> None:
    arguments = {"dataset": small.token_rows(), "num_calibration_samples": 8, "recipe": GPTQ}
    run = Oneshot(model=small.llama(), output_dir=tmp_path / "class", **arguments)
    assert run.recipe == Recipe.create_instance(GPTQ)
    assert not (tmp_path / "class").exists(), "nothing happens before it is called"
    assert run.model is None
    made = run()
    assert made is run.model
    oneshot(model=small.llama(), output_dir=tmp_path / "function", **arguments)
    assert small.tree(tmp_path / "class") == small.tree(tmp_path / "function")


def test_a_processor_of_a_subclass_prepares_the_data(short_pico: Path) -> None:
    class Watched:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer, self.seen = tokenizer, list[str]()

        def __call__(self, text: str, **options: Any) -> Any:
            self.seen.append(text)
            return self.tokenizer(text, **options)

    class Own(Oneshot):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.processor = Watched(self.processor)

    run = Own(model=short_pico, recipe=ONE_LINEAR, dataset=TEXTS, max_seq_length=8)
    run()
    assert sorted(run.processor.seen) == sorted(TEXTS)


def test_overwrite_replaces_a_checkpoint(tmp_path: Path) -> None:
    tiny(recipe=DYNAMIC, output_dir=tmp_path / "out")
    (tmp_path / "out" / "left.txt").write_text("from before")
    tiny(output_dir=tmp_path / "out", overwrite=True)
    assert quantization_of(tmp_path / "out")["format"] == "pack-quantized"
    assert not (tmp_path / "out" / "left.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_runs_on_one_model_with_targets_of_their_own(tmp_path: Path) -> None:
    model = tiny(recipe=QuantizationModifier(targets=["re:.*self_attn.*"], scheme="FP8_DYNAMIC"))
    tiny(
        model=model,
        recipe=GPTQModifier(targets=["re:.*mlp.*"], scheme="W4A16"),
        output_dir=tmp_path / "out",
    )
    assert quantization_of(tmp_path / "out")["format"] == "mixed-precision"
    assert torch.equal(small.logits(read(tmp_path / "out")), small.logits(model))
    with pytest.raises(TargetError, match="quantized already"):
        tiny(model=model)


@pytest.mark.parametrize("recipe", [GPTQ, STATIC])
def test_in_inference_mode_a_folder_is_compressed_as_without(recipe: str, tmp_path: Path) -> None:
    small.one_block().save_pretrained(tmp_path / "model")
    arguments = {"model": str(tmp_path / "model"), "recipe": recipe}
    tiny(output_dir=tmp_path / "plain", **arguments)
    with torch.inference_mode():
        tiny(output_dir=tmp_path / "inside", **arguments)
    plain, inside = (
        load_file(tmp_path / name / "model.safetensors") for name in ("plain", "inside")
    )
    assert plain.keys() == inside.keys()
    assert all(torch.equal(plain[name], inside[name]) for name in plain)


@pytest.mark.usefixtures("_products_as_before")
def test_nothing_is_solved_with_coarse_products() -> None:
    seen: list[str] = []

    class Looking(QuantizationModifier):
        def on_finalize(self, state: Any, **kwargs: Any) -> bool:
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return super().on_finalize(state, **kwargs)

    torch.set_float32_matmul_precision("high")
    oneshot(model=small.one_block(), recipe=Looking(targets="Linear", scheme="W8A16"))
    assert torch.get_float32_matmul_precision() == "high"
    assert seen == ["ieee"]


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("before", "loaded"),
    [
        ("AWQModifier: {duo_scaling: false}", False),
        pytest.param("SmoothQuantModifier: {}", True, marks=pytest.mark.slow),
        ("", True),
        pytest.param("SpinQuantModifier: {rotations: [R1, R2]}", False, marks=pytest.mark.slow),
    ],
)
def test_another_default_dtype_changes_nothing(
    before: str, loaded: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Neither what is found on random values nor the dtype that anything is kept in."""
    folder = tmp_path / "model"
    small.one_block().bfloat16().save_pretrained(folder)
    static = "QuantizationModifier: {targets: Linear, scheme: FP8, input_observer: histogram}"
    recipe = f"modifiers: [{f'{{{before}}}, ' if before else ''}{{{static}}}]"

    def run(name: str) -> Any:
        model = read(folder) if loaded else str(folder)
        plan(model, recipe, small.token_rows(), measure=False)
        return tiny(model=model, recipe=recipe, output_dir=tmp_path / name)

    run("plain")
    request.getfixturevalue("bfloat16_by_default")
    model = run("inside")
    assert torch.get_default_dtype() is torch.bfloat16
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    plain, inside = (tmp_path / name / "model.safetensors" for name in ("plain", "inside"))
    assert plain.read_bytes() == inside.read_bytes()


class TestRecipeOfTheSource:
    """``recipe.yaml`` tells all that was done: that of the model read comes first."""

    PRUNED = "modifiers: {WandaPruningModifier: {sparsity: 0.5}}"

    def pruned(self, tmp_path: Path) -> Path:
        tiny(recipe=self.PRUNED, output_dir=tmp_path / "pruned")
        return tmp_path / "pruned"

    @pytest.mark.parametrize("loaded", [False, True])
    def test_its_stages_are_kept(self, loaded: bool, tmp_path: Path) -> None:
        source = self.pruned(tmp_path)
        model = oneshot(
            model=read(source) if loaded else source, recipe=DYNAMIC, output_dir=tmp_path / "out"
        )
        model.save_pretrained(tmp_path / "saved")
        for folder in (tmp_path / "out", tmp_path / "saved"):
            stages = Recipe.create_instance(folder / "recipe.yaml").stages
            assert [(one.name, type(one.modifiers[0]).__name__) for one in stages] == [
                ("default", "WandaPruningModifier"),
                ("default_1", "QuantizationModifier"),
            ]
        assert verify(tmp_path / "out", source, tp=1).ok

    @pytest.mark.parametrize(
        "broken",
        [
            "modifiers: {NobodyKnowsThis: {}}",
            "a: [",
            "modifiers: {antigravity.PruningModifier: {}}",
        ],
    )
    def test_a_broken_one_is_left_out_and_told_of_once(
        self, broken: str, tmp_path: Path, warned: list[str]
    ) -> None:
        source = self.pruned(tmp_path)
        (source / "recipe.yaml").write_text(broken)
        oneshot(model=source, recipe=DYNAMIC, output_dir=tmp_path / "out")
        found = Recipe.create_instance(tmp_path / "out" / "recipe.yaml")
        assert [type(one) for one in found.modifiers] == [QuantizationModifier]
        assert sum("applied before" in text for text in warned) == 1
        assert "antigravity" not in sys.modules
