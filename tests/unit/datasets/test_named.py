# SPDX-License-Identifier: Apache-2.0
"""Data sets known by name: what is asked of the hub, and what is made of their real columns."""

from __future__ import annotations

import datasets
import pytest

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import TextGenerationDataset, load_calibration, rows
from llmcompressor.errors import ArgumentError, DatasetError

ALPACA = "Below is an instruction that describes a task"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SYSTEM = "<|im_start|>system\n<|im_end|>\n"
TURNS = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"

# name → (hub id, configuration, split), a row in the columns of the real data, the text of it
KNOWN = {
    "open_platypus": (
        ("garage-bAInd/Open-Platypus", None, "train"),
        {"input": "", "output": "O", "instruction": "I", "data_source": "d"},
        f"{ALPACA}. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nI\n\n### Response:\nO",
    ),
    "evolcodealpaca": (
        ("theblackcat102/evol-codealpaca-v1", None, "train"),
        {"output": "O", "instruction": "I"},
        "Below is an instruction that describes a programming task. Write a program that "
        "appropriately completes the request.\n\n### Instruction:\nI\n\n### Response:\nO",
    ),
    "gsm8k": (
        ("openai/gsm8k", "main", "train"),
        {"question": "Q", "answer": "A"},
        "Question: Q\nAnswer: A",
    ),
    "cnn_dailymail": (
        ("abisee/cnn_dailymail", "3.0.0", "train"),
        {"article": "A", "highlights": "H", "id": "1"},
        "Article:\nA\n\n### Summarization:\nH",
    ),
    "wikitext": (
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
        {"text": " = Title = \n"},
        " = Title = \n",
    ),
    "c4": (
        ("allenai/c4", None, "train"),
        {"text": "page", "timestamp": "t", "url": "u"},
        "page",
    ),
    "ultrachat_200k": (
        ("HuggingFaceH4/ultrachat_200k", None, "train_sft"),
        {"prompt": "hi", "prompt_id": "p", "messages": CHAT},
        SYSTEM + TURNS,
    ),
    "perfectblend": (
        ("mlabonne/open-perfectblend", None, "train"),
        {
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
            "source": "s",
        },
        TURNS,
    ),
}


@pytest.fixture
def hub(monkeypatch):
    """A hub that answers with given rows and remembers what it was asked."""

    class Answers:
        def __init__(self):
            self.rows, self.asked, self.error = [], [], None

    hub = Answers()

    def load_dataset(path, name=None, *, split=None, streaming=False, **kwargs):
        assert datasets.are_progress_bars_disabled()
        hub.asked.append((path, name, split, streaming, kwargs))
        if hub.error:
            raise hub.error
        data = datasets.Dataset.from_list(hub.rows)
        if streaming:
            data = data.to_iterable_dataset()
        return data if split else datasets.DatasetDict({"train": data})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return hub


OF_NO_HUB = {"default", "python_stdlib"}


def test_every_name_has_a_test_and_a_class():
    assert {*KNOWN, *OF_NO_HUB, "flickr30k", "peoples_speech"} == set(rows.DATASETS)
    for name in rows.DATASETS:
        assert issubclass(rows.find(name), TextGenerationDataset)


@pytest.mark.parametrize("name", KNOWN)
def test_rows_become_text(hub, texts, name):
    (hub_id, config, split), row, text = KNOWN[name]
    hub.rows = [row]
    assert texts(name) == [text]
    assert hub.asked[0][:3] == (hub_id, config, split)


def test_an_instruction_with_input(hub, texts):
    hub.rows = [{"input": "X", "output": "O", "instruction": "I"}]
    (text,) = texts("open-platypus")
    assert text.endswith("### Instruction:\nI\n\n### Input:\nX\n\n### Response:\nO")


def test_names_are_found_in_any_spelling():
    for name in ["Open-Platypus", "garage-bAInd/Open-Platypus", "open platypus", "OPEN_PLATYPUS"]:
        assert rows.find(name).__name__ == "OpenPlatypus"


def test_every_other_name_leads_to_a_class():
    for name in rows._ALSO:
        assert rows.find(name) is not None, name
    for name in set(rows.DATASETS) - OF_NO_HUB:
        assert rows.find(rows.find(name).hub_id) is rows.find(name)


@pytest.mark.parametrize(
    ("splits", "asked"),
    [
        ("train[:5%]", "train_sft[:5%]"),
        ("train_sft[:10]", "train_sft[:10]"),
        ("train_gen", "train_gen"),
        ("test", "test_sft"),
        ("train[:5]+test", "train_sft[:5]+test_sft"),
        ({"calibration": "train[:7]"}, "train_sft[:7]"),
        (["test"], "test_sft"),
    ],
)
def test_the_splits_of_ultrachat(hub, texts, splits, asked):
    hub.rows = [{"messages": CHAT}]
    texts("ultrachat_200k", splits=splits)
    assert hub.asked[0][2] == asked


def test_rows_without_the_columns_of_a_known_set_are_named(hub, texts):
    for name, row, message in [
        ("ultrachat", {"messages": [{"content": "a"}]}, "turn 0 has no 'role'"),
        ("ultrachat", {"messages": "a"}, "it is a str"),
        ("ultrachat", {"messages": None}, "it is a NoneType"),
        ("ultrachat", {"messages": []}, "no turn has any content"),
        ("perfectblend", {"conversations": [{"value": "a"}]}, "turn 0 has no 'role'"),
    ]:
        hub.rows = [row]
        with pytest.raises(DatasetError, match=f"sample 0: .*{message}"):
            texts(name)


def test_the_users_configuration_and_options_are_passed_on(hub, texts):
    hub.rows = [{"text": "a"}]
    texts("c4", dataset_config_name="de", raw_kwargs={"revision": "r"})
    assert hub.asked[0][1] == "de"
    assert hub.asked[0][4] == {"revision": "r"}
    texts("c4")
    assert hub.asked[1][4]["data_files"]["train"].startswith("en/")


def test_streams_are_cut_after_loading(hub, texts):
    hub.rows = [{"text": f"x = {i}"} for i in range(9)]
    options = {"streaming": True, "shuffle_calibration_samples": False}
    assert texts("wikitext", splits="train[2:5]", **options) == ["x = 2", "x = 3", "x = 4"]
    assert texts("own/er", splits="train[7:]", **options) == ["x = 7", "x = 8"]
    assert [asked[2:4] for asked in hub.asked] == [("train", True)] * 2
    for splits in ("train[:5%]", "train[-5:]", "train+test"):
        with pytest.raises(DatasetError, match=r"stream|Streams"):
            texts("wikitext", splits=splits, **options)


def test_a_registered_template_reads_a_local_copy(texts, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "Q", "answer": "A"}')
    assert texts("gsm8k", dataset_path=tmp_path) == ["Question: Q\nAnswer: A"]


def test_a_hub_out_of_reach_is_one_clear_error(hub, texts):
    hub.error = ConnectionError("no route\nmuch more")
    with pytest.raises(DatasetError, match=r"some/data cannot be loaded: no route\. Check") as e:
        texts("some/data")
    assert "much more" not in str(e.value)
    assert isinstance(e.value.__cause__, ConnectionError)


def test_a_data_set_in_dvc(hub, texts):
    hub.rows = [{"text": "a"}]
    texts(None, dataset_path="dvc://x.csv", dvc_data_repository="git@host")
    assert hub.asked[0][0] == "csv"
    assert hub.asked[0][4] == {"data_files": "dvc://x.csv", "storage_options": {"url": "git@host"}}


def test_a_third_party_registers_its_own(texts, monkeypatch, hub):
    monkeypatch.setattr(rows, "_registered", {})

    @TextGenerationDataset.register("shouting", alias="loud")
    class Shouting(TextGenerationDataset):
        hub_id = "some/one"

        def dataset_template(self, row):
            return {"text": row["text"].upper()}

    hub.rows = [{"text": "abc"}]
    assert texts("shouting") == texts("loud") == ["ABC"]
    assert "shouting" in TextGenerationDataset.registered_names()
    loaded = TextGenerationDataset.load_from_registry("loud", dataset_args=DatasetArguments())
    assert isinstance(loaded, Shouting)
    given = DatasetArguments()
    loaded = TextGenerationDataset.load_from_registry("loud", data_args=given, split="test")
    assert (loaded.dataset_args, loaded.split) == (given, "test")
    for both in ({}, {"dataset_args": given, "data_args": given}):
        with pytest.raises(ArgumentError, match=r"'loud'.*dataset_args"):
            TextGenerationDataset.load_from_registry("loud", **both)
    with pytest.raises(DatasetError, match="Did you mean shouting"):
        TextGenerationDataset.load_from_registry("shoutin", dataset_args=DatasetArguments())


def test_a_third_party_sets_arguments_of_its_own(texts, monkeypatch, hub):
    monkeypatch.setattr(rows, "_registered", {})
    seen = []

    @TextGenerationDataset.register("elsewhere")
    class Elsewhere(TextGenerationDataset):
        def __init__(self, dataset_args, split=None, processor=None):
            seen.append(dataset_args.dataset)
            dataset_args.dataset, dataset_args.text_column = "some/one", "none"
            super().__init__(dataset_args, split, processor)

    hub.rows = [{"text": "abc"}]
    assert texts("elsewhere") == ["abc"]
    assert hub.asked[0][0] == "some/one"
    assert set(seen) == {"elsewhere"}


class TestMedia:
    def test_images_get_a_question_and_their_captions(self, hub):
        class Processor:
            chat_template = "own"

            def apply_chat_template(self, messages, **kwargs):
                assert kwargs["tokenize"] is False
                return repr([turn["content"] for turn in messages])

            def __call__(self, images=None, text=None):
                assert images is not None
                assert "What does this image show?" in text
                assert "a dog the dog" in text
                return {"input_ids": [[1, 2]], "pixel_values": [[[1.0]]]}

        hub.rows = [{"image": "pretend", "caption": ["a dog", "the dog"], "filename": "f"}]
        args = DatasetArguments(dataset="flickr30k")
        (batch,) = load_calibration(args, processor=Processor())
        assert hub.asked[0][:3] == ("lmms-lab/flickr30k", None, "test")
        assert batch["input_ids"].tolist() == [[1, 2]]
        assert batch["pixel_values"].shape == (1, 1, 1)

    def test_speech_and_its_transcript(self, hub):
        def processor(audio=None, sampling_rate=None, text=None):
            assert (sampling_rate, text) == (16000, " Hello there")
            return {"input_features": [[audio]], "labels": [[4, 5]]}

        hub.rows = [
            {
                "id": "1",
                "audio": {"array": [0.5, 0.25], "sampling_rate": 16000},
                "duration_ms": 3,
                "text": "hello there",
            }
        ]
        args = DatasetArguments(dataset="peoples_speech")
        names = ["input_features", "decoder_input_ids"]
        (batch,) = load_calibration(args, processor=processor, model_input_names=names)
        assert hub.asked[0][:3] == ("MLCommons/peoples_speech", "test", "test")
        assert batch["decoder_input_ids"].tolist() == [[4, 5]]
        assert batch["input_features"].shape == (1, 1, 2)
