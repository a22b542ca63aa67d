# SPDX-License-Identifier: Apache-2.0
"""The mixin before TRL's trainer for supervised fine-tuning: texts, its collator, its loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tests.support import tiny_training as tiny
from tests.unit.training.test_events import expected
from torch.nn import Linear
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DefaultDataCollator,
    Trainer,
    TrainingArguments,
)

from llmcompressor.args import DatasetArguments
from llmcompressor.args.parsing import current_name
from llmcompressor.datasets import TextGenerationDataset, load_training
from llmcompressor.errors import InputError
from llmcompressor.modeling.weights import untie_embeddings
from llmcompressor.training import SessionManagerMixIn

trl = pytest.importorskip("trl", reason="trl is an optional companion")

# PEFT and TRL ask transformers by older names.
pytestmark = [
    pytest.mark.usefixtures("session", "nothing_seen"),
    pytest.mark.filterwarnings(
        r"ignore:`(is_gradient_checkpointing|gradient_checkpointing_\w+)` is:FutureWarning"
    ),
]

TEXTS = [
    f"def f{index}(x):\n    return x + {index}\n" + "# more\n" * (index % 3) for index in range(8)
]
RECORDED = "modifiers: {tests.support.tiny_training.Recorder: {}}"
RECIPE = """
modifiers:
  tests.support.tiny_training.Recorder: {}
  MagnitudePruningModifier:
    targets: [Linear]
    ignore: [lm_head]
    init_sparsity: 0.2
    final_sparsity: 0.5
    start: 0
    end: 0.5
"""


class SparseSFTTrainer(SessionManagerMixIn, trl.SFTTrainer):
    """What the documentation shows."""


SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "seed": 7,
    # TRL's own default, which it gives by the older name.
    current_name(TrainingArguments.__dataclass_fields__, "activation_checkpointing"): True,
}


def trainer(cls: type, model: Path, folder: Path, given: dict[str, Any], **changed: Any) -> Any:
    """One of texts; ``given`` goes to the trainer, ``changed`` into its arguments."""
    config = trl.SFTConfig(
        output_dir=str(folder),
        max_length=32,
        model_init_kwargs={"dtype": torch.float32},
        **{**SETTINGS, **changed},
    )
    data = Dataset.from_dict({"text": TEXTS})
    return cls(model=str(model), args=config, train_dataset=data, **given)


def losses(made) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def plain(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's own trainer, which has trained."""
    made = trainer(trl.SFTTrainer, pico, tmp_path_factory.mktemp("plain"), {})
    made.train()
    return made


def test_it_drives_the_session_and_masks_hold(pico: Path, tmp_path: Path) -> None:
    made = trainer(SparseSFTTrainer, pico, tmp_path, {"recipe": RECIPE})
    made.train()
    assert tiny.Recorder.seen == expected([2, 2])
    linears = [
        module
        for name, module in made.model.named_modules()
        if isinstance(module, Linear) and name != "lm_head"
    ]
    for module in linears:
        assert (module.weight == 0).float().mean() == pytest.approx(0.5, abs=1e-3)


def test_a_collator_of_one_s_own_gets_what_the_model_takes(pico: Path, tmp_path: Path) -> None:
    """Prepared samples of equal length, collated by transformers: their masks are not dropped."""
    args = DatasetArguments(
        dataset=[{"text": text} for text in TEXTS], max_seq_length=32, pad_to_max_length=True
    )
    tokenizer = AutoTokenizer.from_pretrained(pico)
    samples = TextGenerationDataset.load_from_registry(
        "custom", dataset_args=args, processor=tokenizer
    )(add_labels=True)

    class Prepared(SparseSFTTrainer):
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    given = {"recipe": RECIPE, "data_collator": DefaultDataCollator(), "train_dataset": samples}
    config = trl.SFTConfig(output_dir=str(tmp_path), max_length=32, **SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(pico, dtype=torch.float32)
    made = Prepared(model=model, args=config, processing_class=tokenizer, **given)
    made.train()
    assert tiny.Recorder.seen == expected([2, 2])


CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
ASKED, ANSWERED = ([{"role": role, "content": "x = 1"}] for role in ("user", "assistant"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x = ", "completion": "1"},
        {"prompt": ASKED, "completion": ANSWERED},
        {"prompt": ASKED + ANSWERED + ASKED, "completion": ANSWERED},
        {"messages": ASKED + ANSWERED},
    ],
    ids=["texts", "turns", "more turns", "messages"],
)
def test_rows_are_understood_as_trl_does(row: dict[str, Any], pico: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pico)
    tokenizer.chat_template = CHAT
    made = trl.SFTTrainer(
        model=teacher_of(pico),
        args=trl.SFTConfig(output_dir=str(tmp_path), max_length=64, **SETTINGS),
        train_dataset=Dataset.from_list([row]),
        processing_class=tokenizer,
    )
    theirs = made.train_dataset[0]
    (ours,) = load_training(DatasetArguments(dataset=[row]), processor=tokenizer)
    assert ours["input_ids"] == theirs["input_ids"]
    assert ours["labels"] == theirs["labels"]


TAUGHT = "  OutputDistillationModifier: {targets: ['re:.*layers.1$']}\n"
WHOLE = RECIPE + "  QuantizationModifier: {targets: [Linear], ignore: [lm_head], scheme: W8A8}\n"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a compressed checkpoint; half of each matrix's codes are zero."""
    tensors = load_file(folder / "model.safetensors")
    codes = [each for each in tensors.values() if each.dtype is torch.int8]
    assert len(codes) == 28
    assert all((each == 0).float().mean() >= 0.5 for each in codes)
    config = AutoConfig.from_pretrained(folder)
    assert config.quantization_config["quant_method"] == "compressed-tensors"
    return tensors


def test_it_goes_on_and_ends_compressed(pico: Path, tmp_path: Path) -> None:
    """Pruned, quantized and taught; resumed it ends in the same bytes."""
    given = {"recipe": WHOLE + TAUGHT, "teacher": teacher_of(pico)}
    saving = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    whole = trainer(SparseSFTTrainerOfLogits, pico, tmp_path / "run", given, **saving)
    whole.train()
    tiny.Recorder.seen.clear()
    again = trainer(SparseSFTTrainerOfLogits, pico, tmp_path / "run", given, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert tiny.Recorder.seen == expected([2] * 4)[-8:]
    for made, name in ((whole, "whole"), (again, "again")):
        made.save_model(str(tmp_path / name))
    one, other = (stored(tmp_path / name) for name in ("whole", "again"))
    assert all(torch.equal(other[name], each) for name, each in one.items())


def test_preferences_are_learned_with_a_recipe(pico: Path, tmp_path: Path) -> None:
    """TRL's trainer for them runs the model, and one that it compares with, on pairs of texts."""

    class SparseDPOTrainer(SessionManagerMixIn, trl.DPOTrainer):
        pass

    tokenizer = AutoTokenizer.from_pretrained(pico)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    columns = {
        "prompt": [f"def f{index}(x):\n" for index in range(8)],
        "chosen": [f"    return x + {index}\n" for index in range(8)],
        "rejected": ["    pass\n"] * 8,
    }
    made = SparseDPOTrainer(
        model=teacher_of(pico),
        args=trl.DPOConfig(output_dir=str(tmp_path / "run"), max_length=32, **SETTINGS),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        recipe=WHOLE,
    )
    made.train()
    assert tiny.Recorder.seen == expected([2, 2])
    made.save_model(str(tmp_path / "saved"))
    stored(tmp_path / "saved")


def test_without_a_recipe_it_trains_as_trl_does(pico: Path, tmp_path: Path, plain: Any) -> None:
    made = trainer(SparseSFTTrainer, pico, tmp_path / "ours", {"recipe": RECORDED})
    made.train()
    assert losses(made) == losses(plain)
    for ours, theirs in zip(made.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


DISTILL = "modifiers: {OutputDistillationModifier: {orig_scale: 0.5}}"
LAYERS = r"modifiers: {OutputDistillationModifier: {targets: ['re:.*layers\.\d+$']}}"
QUANTIZE = """
modifiers:
  QuantizationModifier:
    targets: [TARGETS]
    config_groups: {g: {targets: [TARGETS], weights: {num_bits: 4, type: int, strategy: channel}}}
"""


class SFTTrainerOfLogits(trl.SFTTrainer):
    """The remedy that the messages and the documentation tell."""

    compute_loss = Trainer.compute_loss


class SparseSFTTrainerOfLogits(SessionManagerMixIn, SFTTrainerOfLogits):
    pass


@pytest.fixture
def untied(pico: Path, tmp_path: Path) -> Path:
    """With a head of its own, that can be quantized."""
    model = AutoModelForCausalLM.from_pretrained(pico, dtype=torch.float32)
    untie_embeddings(model)
    model.save_pretrained(tmp_path / "untied")
    AutoTokenizer.from_pretrained(pico).save_pretrained(tmp_path / "untied")
    return tmp_path / "untied"


def teacher_of(pico: Path):
    return AutoModelForCausalLM.from_pretrained(pico, dtype=torch.float32)


def test_a_head_that_is_not_called_is_told_with_a_remedy(pico: Path, tmp_path: Path) -> None:
    """TRL computes the loss from the weight of the head."""
    given = {"recipe": DISTILL, "teacher": teacher_of(pico)}
    made = trainer(SparseSFTTrainer, pico, tmp_path, given)
    with pytest.raises(InputError, match=r"lm_head .*SFTTrainer.*Trainer\.compute_loss"):
        made.train()


@pytest.mark.parametrize("recipe", [DISTILL, LAYERS], ids=["logits", "layers"])
def test_a_teacher_teaches_the_adapters_that_trl_adds(
    pico: Path, tmp_path: Path, recipe: str
) -> None:
    peft = pytest.importorskip("peft", reason="peft is an optional companion")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    given = {"recipe": recipe, "teacher": teacher_of(pico), "peft_config": adapters}
    made = trainer(SparseSFTTrainerOfLogits, pico, tmp_path, given)
    made.train()
    assert all("distill_loss" in one for one in made.state.log_history if "loss" in one)
    after = {name: each.detach() for name, each in made.model.named_parameters()}
    base = dict(made.model.unload().named_parameters())
    assert all(bool(each.any()) for name, each in after.items() if "lora_B" in name)
    for name, each in teacher_of(pico).named_parameters():
        assert torch.equal(base[name], each), name
