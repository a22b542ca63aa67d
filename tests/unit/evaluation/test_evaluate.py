# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmcompressor import evaluate, oneshot
from llmcompressor.errors import ArgumentError, CheckpointError, DatasetError
from llmcompressor.modifiers.quantization import QuantizationModifier

PICO = Path(str(files("llmcompressor") / "data" / "pico-stdlib"))
CHANNELS = {"num_bits": 4, "strategy": "channel"}
TEXTS = ["def add(a, b):\n    return a + b\n" * 20, "import os\nimport sys\n" * 20]


@pytest.fixture(scope="module")
def pico() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)


def test_the_embedded_model_has_the_loss_of_its_page(pico: PreTrainedModel) -> None:
    """2.69 on all windows; on a twentieth of them it is near, and far below chance (7.6)."""
    report = evaluate(pico, num_samples=32, batch_size=16)
    assert report.tokens == 32 * 255
    assert 2.4 < report.loss < 3.0


def test_all_forms_of_one_text_give_one_figure(pico: PreTrainedModel, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = TEXTS[0]
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "words.json").write_text(json.dumps([{"words": text}]))
    ids = AutoTokenizer.from_pretrained(PICO)(text)["input_ids"]
    padded = {"input_ids": [*ids, 0, 0], "attention_mask": [1] * len(ids) + [0, 0]}
    nested = {name: [values] for name, values in padded.items()}
    forms = [
        {"dataset": [text]},
        {"dataset": tmp_path / "text.txt"},
        {"dataset": str(tmp_path / "rows.jsonl")},
        {"dataset": str(tmp_path / "words.json"), "text_column": "words"},
        {"dataset": Dataset.from_list([{"text": text}])},
        {"dataset": Dataset.from_list([padded])},
        {"dataset": [nested]},
    ]
    reports = [evaluate(pico, max_seq_length=64, **form) for form in forms]
    assert len(set(reports)) == 1


def test_a_checkpoint_beside_itself(pico: PreTrainedModel) -> None:
    given: dict[str, Any] = {"dataset": TEXTS[1:], "max_seq_length": 64}
    report = evaluate(str(PICO), reference=PICO, **given)
    assert report.kl_divergence == 0
    assert report.top1_agreement == 1
    assert report.loss == pytest.approx(evaluate(pico, **given).loss, abs=0.02)


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        evaluate(tmp_path, dataset=TEXTS)


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        ([], "empty"),
        ([""], "empty"),
        ([{"input_ids": [5, 2048]}], "token 2048 and the model's vocabulary ends at 2047"),
        ([{"input_ids": [5, -3]}], "token -3 and the model's vocabulary ends at 2047"),
        ([{"words": "x"}], "words"),
        ([{"input_ids": [5, 6], "attention_mask": [1]}], "2 input_ids, but 1 in attention_mask"),
        ([{"input_ids": ["a", "b"]}], "no sequence of whole numbers"),
        ("./nothing.txt", "nothing.txt"),
    ],
)
def test_data_that_cannot_be_used(pico: PreTrainedModel, dataset: object, match: str) -> None:
    with pytest.raises(DatasetError, match=match):
        evaluate(pico, dataset=dataset)


@pytest.mark.parametrize(
    "given",
    [
        {"max_seq_length": 1},
        {"max_seq_length": "64"},
        {"num_samples": 0},
        {"num_samples": 1.5},
        {"batch_size": "8"},
        {"batch_size": None},
    ],
    ids=str,
)
def test_numbers_are_checked_before_a_model_is_loaded(given: dict[str, object]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ArgumentError, match=f"{name}.*{value!r}.*whole number"):
        evaluate("./no-such-model", **given)  # type: ignore[arg-type]


ROWS = [{"text": text} for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.ndjson", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("rows.tsv", "text\n" + "".join(f'"{text}"\n' for text in TEXTS)),
        ("whole.md", "".join(TEXTS)),
        ("whole", "".join(TEXTS)),
    ],
)
def test_a_file_is_read_by_what_it_is(
    name: str, content: str, pico: PreTrainedModel, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    expected = ["".join(TEXTS)] if name.startswith("whole") else TEXTS
    found = evaluate(pico, dataset=tmp_path / name, max_seq_length=64)
    assert found == evaluate(pico, dataset=expected, max_seq_length=64)


def test_conversations_are_rendered(pico: PreTrainedModel, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PICO)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for one in messages %}{{ one['content'] }}{% endfor %}"
    )
    turns = [{"role": "user", "content": text} for text in TEXTS]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    found = evaluate(pico, dataset=tmp_path / "chats.jsonl", tokenizer=tokenizer)
    assert found == evaluate(pico, dataset=["".join(TEXTS)])


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"scheme": "NVFP4A16", "targets": "Linear"}, "computes in float32"),
        (
            {"config_groups": {"rows": {"targets": ["Embedding"], "weights": CHANNELS}}},
            "model.embed_tokens: transformers fails to load it.*format: int-quantized",
        ),
    ],
    ids=["float32 NVFP4", "packed embedding"],
)
def test_what_transformers_cannot_run_is_said_by_its_rule(
    recipe: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Others serve it, so that it is written; here it cannot be measured."""
    modifier = QuantizationModifier(**recipe, ignore=["lm_head"])
    oneshot(
        model=PICO,
        recipe=modifier,
        precision="float32",
        tie_word_embeddings=False,
        output_dir=tmp_path / "out",
    )
    with pytest.raises(CheckpointError, match=f"transformers cannot run .*Error: .*{said}"):
        evaluate(tmp_path / "out", dataset=TEXTS)
    if recipe.get("scheme"):  # it loads: what is wrong with the call is not put down to the rule
        with pytest.raises(ArgumentError, match="'batch_size' cannot be 0"):
            evaluate(tmp_path / "out", dataset=TEXTS, batch_size=0)
