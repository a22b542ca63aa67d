# SPDX-License-Identifier: Apache-2.0
"""From rows to tokens: templates, functions, lengths, joining, labels, processors."""

from __future__ import annotations

import copy
from datetime import datetime

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import TextGenerationDataset, load_training
from llmcompressor.datasets.text import moment, rendered_at
from llmcompressor.errors import DatasetError

FIRST = {"shuffle_calibration_samples": False}
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
CHATML = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
SOLVED = [{"text": "Question: 1+1\nAnswer: 2", "prompt": "Question: 1+1\nAnswer:"}]
PICTURES = [{"images": i, "text": f"picture {i}", "license": "free"} for i in range(2)]
TEXTS = ["import os", "def f(x): return x", "class A: pass  # a class of its own"]


def test_tokens_are_those_of_the_tokenizer(batches, tokenizer):
    got = [batch["input_ids"][0].tolist() for batch in batches(TEXTS, **FIRST)]
    assert got == [tokenizer(text)["input_ids"] for text in TEXTS]


def test_text_is_cut_to_what_user_model_and_tokenizer_allow(batches, tokenizer, logged):
    text = " ".join(["x = 1"] * 1000)
    length = {
        case: batches([text], **options)[0]["input_ids"].shape[1]
        for case, options in {
            "tokenizer": {},
            "model": {"model_max_length": 100},
            "user": {"max_seq_length": 50, "model_max_length": 100},
            "too long": {"max_seq_length": 500, "model_max_length": 100},
        }.items()
    }
    assert length == {"tokenizer": 512, "model": 100, "user": 50, "too long": 100}
    assert sum("max_seq_length is 500" in line for line in logged) == 1


def test_padding_to_the_maximum_is_masked(batches, tokenizer):
    (batch,) = batches(["import os"], max_seq_length=32, pad_to_max_length=True)
    real = len(tokenizer("import os")["input_ids"])
    assert batch["input_ids"].shape == (1, 32)
    assert batch["attention_mask"][0].tolist() == [1] * real + [0] * (32 - real)
    assert set(batch["input_ids"][0, real:].tolist()) == {tokenizer.pad_token_id}


def test_concatenation_joins_the_tokens_and_drops_the_rest(batches, tokenizer):
    texts = [f"value_{i} = {i}" for i in range(40)]
    stream = [token for text in texts for token in tokenizer(text)["input_ids"]]
    got = batches(texts, concatenate_data=True, max_seq_length=16, **FIRST)
    assert [t for batch in got for t in batch["input_ids"][0].tolist()] == stream[: 16 * len(got)]
    assert len(got) == len(stream) // 16


def test_tokenized_data_is_concatenated_too(batches):
    got = batches(
        [[1, 2, 3], [4, 5]], processor=None, concatenate_data=True, max_seq_length=2, **FIRST
    )
    assert [batch["input_ids"].tolist() for batch in got] == [[[1, 2]], [[3, 4]]]


def test_concatenation_needs_a_length_and_enough_tokens(batches):
    with pytest.raises(DatasetError, match="max_seq_length"):
        batches([[1, 2]], processor=None, concatenate_data=True)
    with pytest.raises(DatasetError, match="fewer than 100 tokens"):
        batches(TEXTS, concatenate_data=True, max_seq_length=100)


def test_the_text_column_is_named(texts):
    assert texts([{"body": "a = 1", "title": "t"}], text_column="body") == ["a = 1"]


def test_a_column_that_is_not_there_is_an_error(texts):
    for row in [{"text": "a", "body": "b"}, {"messages": MESSAGES, "body": "b"}]:
        with pytest.raises(DatasetError, match=r"no column 'bodi'; it has body.*Did you mean body"):
            texts([row], text_column="bodi")


def test_a_function_makes_the_text(texts, tmp_path):
    rows = [{"q": "a", "a": "b"}]
    assert texts(rows, preprocessing_func=lambda row: {"text": row["q"] + row["a"]}) == ["ab"]
    file = tmp_path / "mine.py"
    file.write_text("def join(row):\n    return {'text': row['a'] + row['q']}\n")
    assert texts(rows, preprocessing_func=f"{file}:join") == ["ba"]
    with pytest.raises(DatasetError, match="Did you mean join"):
        texts(rows, preprocessing_func=f"{file}:jion")
    with pytest.raises(DatasetError, match="There is no file"):
        texts(rows, preprocessing_func="nowhere.py:f")


def test_a_function_may_tokenize_itself(batches):
    (batch,) = batches(
        ["abc"], preprocessing_func=lambda row: {"input_ids": [[7, 8]]}, processor=None
    )
    assert batch["input_ids"].tolist() == [[7, 8]]


def test_a_function_that_fails_names_the_sample(batches):
    for function, message in [
        (lambda row: 3, "must return a dict"),
        (lambda row: row["absent"], "no column 'absent'; it has text"),
        (lambda row: 1 / 0, "cannot be preprocessed: ZeroDivisionError"),
    ]:
        with pytest.raises(DatasetError, match=message) as caught:
            batches(["abc"], preprocessing_func=function)
        assert "sample 0" in str(caught.value)


class TestChat:
    @pytest.mark.parametrize(
        "row",
        [
            {"messages": MESSAGES},
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        ],
    )
    def test_without_a_template_it_is_chatml(self, texts, logged, row):
        assert texts([row, row]) == [CHATML] * 2
        assert sum("no chat template" in line for line in logged) == 1

    def test_a_chat_in_the_named_column(self, texts):
        assert texts([{"turns": MESSAGES}], text_column="turns") == [CHATML]

    def test_the_own_template_is_used_with_one_start_token(self, batches, tokenizer):
        own = copy.deepcopy(tokenizer)
        own.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }};{% endfor %}"
        (batch,) = batches([{"messages": MESSAGES}], processor=own)
        ids = batch["input_ids"][0].tolist()
        assert own.decode(ids, skip_special_tokens=True) == "hi;yo;"
        assert ids.count(own.bos_token_id) == 1

    @pytest.mark.parametrize("named", [False, True])
    def test_a_template_that_names_the_date_takes_the_given_moment(self, texts, tokenizer, named):
        when, own = datetime(2024, 2, 9, 8, 7, 6), copy.deepcopy(tokenizer)
        form = "%A %-d %B %Y, %I:%M:%S %p, %j %y %% %%d 'x' %H"
        ask = f"{{{{ strftime_now({form!r}) if strftime_now is defined }}}}"
        template = f"  {{% macro day() %}}{ask}{{% endmacro %}}\n {{{{ day() }}}}|{ask}\n"
        own.chat_template = {"default": template} if named else template
        with rendered_at(when):
            dated = texts([{"messages": MESSAGES}], processor=own)
        plain = template.replace(ask, when.strftime(form).replace("%", "&percnt;"))
        own.chat_template = plain
        undated = texts([{"messages": MESSAGES}], processor=own)
        assert dated == [text.replace("&percnt;", "%") for text in undated]

    def test_a_template_that_refuses_is_an_error(self, batches, tokenizer):
        own = copy.deepcopy(tokenizer)
        own.chat_template = "{{ raise_exception('no') }}"
        with pytest.raises(DatasetError, match="chat template refuses"):
            batches([{"messages": MESSAGES}], processor=own)

    def test_a_template_without_end_is_an_error(self, batches, tokenizer, monkeypatch):
        monkeypatch.setattr("llmcompressor.datasets.text._TEMPLATE_SECONDS", 0.1)
        own = copy.deepcopy(tokenizer)
        loop = "{%% for %s in range(99999) %%}"
        own.chat_template = loop % "i" + loop % "j" + loop % "k" + "{% endfor %}" * 3
        with pytest.raises(DatasetError, match=r"computes for more than 0\.1 seconds"):
            batches([{"messages": MESSAGES}], processor=own)

    def test_a_turn_that_calls_tools_needs_no_content(self, texts):
        call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
        calling = {"role": "assistant", "tool_calls": call}
        rows = [
            {"id": 1, "messages": [MESSAGES[0], turn, {"role": "tool", "content": "4"}]}
            for turn in (calling, {**calling, "content": None})
        ]
        first, second = texts(rows, **FIRST)
        assert first == second
        assert "assistant" in first

    def test_what_is_no_conversation_is_named(self, batches):
        for column, turns, message in [
            ("messages", [{"content": "hi"}], "turn 0 has no 'role', only content"),
            ("messages", [MESSAGES[0], {"role": "user"}], "turn 1 has no 'content', only role"),
            ("messages", [{"role": "user", "text": "hi"}], "turn 0 has no 'content'"),
            ("messages", [{"role": None, "content": "hi"}], "turn 0 has a NoneType for its role"),
            ("messages", ["hi"], "turn 0 is a str, and not a dict"),
            ("messages", MESSAGES[0], "it is a dict, and not a list of turns"),
            ("messages", "hi", r"it is a str.*text_column='messages'"),
            ("conversations", [{"from": "human"}], "turn 0 has no 'value'"),
        ]:
            rows = [{"messages": MESSAGES}, {column: turns}]
            with pytest.raises(DatasetError, match=rf"sample 1 .*column '{column}': {message}"):
                batches(rows, **FIRST)

    def test_one_conversation_is_one_row(self, texts):
        assert texts({"messages": MESSAGES}) == [CHATML]

    @pytest.mark.parametrize(
        "template", [None, "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"]
    )
    @pytest.mark.parametrize(
        "parts", [[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["a", "b"]]
    )
    def test_parts_of_text_are_joined_for_templates_of_text(
        self, texts, tokenizer, template, parts
    ):
        own = copy.deepcopy(tokenizer)
        own.chat_template = template
        one, other = (
            texts([{"messages": [{"role": "user", "content": content}]}], processor=own)
            for content in (parts, "a\nb")
        )
        assert one == other

    def test_a_template_that_knows_parts_gets_them(self, texts, tokenizer):
        own = copy.deepcopy(tokenizer)
        own.chat_template = (
            "{% for m in messages %}{% for p in m['content'] %}"
            "{{ p['text'] if p['type'] == 'text' else '[image]' }};{% endfor %}{% endfor %}"
        )
        parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        rows = [{"messages": [{"role": "user", "content": some}]} for some in (parts, parts[1:])]
        assert texts(rows, processor=own, **FIRST) == ["[image];a;b;", "a;b;"]

    def test_chatml_knows_text_only(self, batches):
        for content, message in [
            ([{"type": "image", "url": "x"}], "a part of type 'image'"),
            (5, "a int"),
            ([5], "a int"),
        ]:
            rows = [{"messages": [{"role": "user", "content": content}]}]
            with pytest.raises(DatasetError, match=f"sample 0: Column 'messages'.*{message}"):
                batches(rows)


HI, YO = MESSAGES[:1], MESSAGES[1:]
NO = [{"role": "assistant", "content": "no"}]
FORMS = {
    "completion": {"prompt": HI, "completion": YO},
    "chosen": {"prompt": HI, "chosen": YO, "rejected": NO},
    "shared": {"chosen": MESSAGES, "rejected": [*HI, *NO]},
    "text and turns": {"prompt": "hi", "chosen": MESSAGES, "rejected": [*HI, *NO]},
    "messages": {"messages": MESSAGES, "prompt": HI},
}


class TestAnswers:
    """The forms of rows that TRL has, with what it learns of them."""

    @pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
    def test_a_conversation_goes_on_after_its_prompt(self, texts, row):
        assert texts([row]) == texts(row) == [CHATML]

    @pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
    def test_only_the_answer_of_a_conversation_is_learned(self, row, tokenizer):
        (sample,) = load_training(DatasetArguments(dataset=[row]), processor=tokenizer)
        learned = [token for token in sample["labels"] if token != -100]
        opened = CHATML.removesuffix("yo<|im_end|>\n")
        prompt = len(tokenizer(opened)["input_ids"])
        assert 0 < len(learned) <= len(sample["input_ids"]) - prompt + 1
        assert sample["input_ids"][-len(learned) :] == learned
        assert "yo" in tokenizer.decode(learned)
        assert "hi" not in tokenizer.decode(learned)

    @pytest.mark.parametrize(
        "row",
        [
            {"prompt": "a = ", "completion": "1"},
            {"prompt": "a = ", "chosen": "1", "rejected": "x"},
            {"chosen": "a = 1", "rejected": "a = x"},
            {"prompt": "a = ", "completion": "1", "label": True},
        ],
    )
    def test_texts_are_joined_and_end(self, batches, tokenizer, row):
        (batch,) = batches([row])
        ids = batch["input_ids"][0].tolist()
        assert ids == tokenizer("a = 1" + tokenizer.eos_token)["input_ids"]
        (sample,) = load_training(DatasetArguments(dataset=[row]), processor=tokenizer)
        prompt = tokenizer("a =" if "prompt" not in row else "a = ")["input_ids"]
        same = 0
        while same < len(prompt) and prompt[same] == ids[same]:
            same += 1
        assert sample["labels"] == [-100] * same + ids[same:]

    def test_columns_and_single_rows_of_them_are_no_splits(self, texts):
        columns = {"prompt": ["a = ", "b = "], "completion": ["1", "2"]}
        rows = [{"prompt": "a = ", "completion": "1"}, {"prompt": "b = ", "completion": "2"}]
        assert texts(columns, **FIRST) == texts(rows, **FIRST)
        assert texts(rows[0]) == texts(rows[:1])

    def test_the_template_gets_the_rows_own_variables(self, texts, tokenizer):
        own = copy.deepcopy(tokenizer)
        own.chat_template = "{{ mood }}{% for m in messages %};{{ m['content'] }}{% endfor %}"
        row = {"prompt": HI, "completion": YO, "chat_template_kwargs": {"mood": "glad"}}
        assert texts([row], processor=own) == ["glad;hi;yo"]

    def test_a_text_and_turns_do_not_mix(self, batches):
        with pytest.raises(DatasetError, match=r"a list and a str for its prompt.*two texts"):
            batches([{"prompt": HI, "completion": "yo"}])

    def test_several_texts_are_to_be_joined(self, batches):
        with pytest.raises(DatasetError, match="Join them to one text in a preprocessing_func"):
            batches([{"instruction": "Add.", "output": "2"}])

    def test_bad_answers_are_told(self, batches, logged):
        batches([{"prompt": "a", "completion": "b", "label": False}] * 2)
        assert sum("whose label is False" in line for line in logged) == 1


class Again(torch.utils.data.IterableDataset):
    """A stream that begins anew each time that it is read."""

    def __iter__(self):
        return iter([[5, 6], [7, 8]])


class TestTraining:
    def test_labels_leave_out_prompt_and_padding(self, tokenizer):
        args = DatasetArguments(dataset=SOLVED, max_seq_length=40, pad_to_max_length=True)
        (sample,) = load_training(args, processor=tokenizer)
        ids, labels = sample["input_ids"], sample["labels"]
        prompt = len(tokenizer(SOLVED[0]["prompt"])["input_ids"])
        real = len(tokenizer(SOLVED[0]["text"])["input_ids"])
        assert labels[:prompt] == [-100] * prompt
        assert labels[prompt:real] == ids[prompt:real]
        assert labels[real:] == [-100] * (40 - real)
        assert "prompt" not in sample

    def test_padding_that_the_data_brings_has_no_labels(self):
        row = {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1]}
        (sample,) = load_training(DatasetArguments(dataset=[row]))
        assert sample["labels"] == [-100, 5, 6]

    def test_labels_that_the_data_brings_are_kept(self):
        row = {"input_ids": [5, 6], "labels": [-100, 7]}
        (sample,) = load_training(DatasetArguments(dataset=[row]))
        assert sample["labels"] == [-100, 7]

    def test_tokens_that_the_loss_mask_leaves_out_have_no_labels(self):
        for labels in [{}, {"labels": [5, 6, -100, 9]}]:
            row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0], **labels}
            (every,) = load_training(DatasetArguments(dataset=[row]))
            assert every["labels"] == labels.get("labels", row["input_ids"])
            (masked,) = load_training(DatasetArguments(dataset=[row], use_loss_mask=True))
            assert masked["labels"] == [-100, *every["labels"][1:3], -100]
            assert masked.keys() == every.keys() == {"input_ids", "attention_mask", "labels"}

    @pytest.mark.parametrize("collator", ["padding", "truncation", list])
    @pytest.mark.parametrize("streamed", [False, True])
    def test_tokenized_rows_are_cut_whatever_the_collator(self, collator, streamed):
        rows = [
            {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8], "attention_mask": [1] * 4},
            {"input_ids": [0, 0, 9, 4], "attention_mask": [0, 0, 1, 1]},
            {"input_ids": [3]},
        ]
        data = iter(rows) if streamed else rows
        args = DatasetArguments(dataset=data, max_seq_length=2, data_collator=collator)
        samples = list(load_training(args))
        assert [one["input_ids"] for one in samples] == [[5, 6], [9, 4], [3]]
        assert [one["labels"] for one in samples] == [[-100, 6], [9, 4], [3]]
        assert [one["attention_mask"] for one in samples] == [[1, 1], [1, 1], [1]]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_workers_share_the_rows_of_a_stream(self, workers):
        """The datasets library splits its streams among workers too, by their shards."""
        rows = Dataset.from_dict({"input_ids": [[5 + i, 6] for i in range(12)]})
        stream = rows.to_iterable_dataset(num_shards=3).skip(1).take(10)
        samples = load_training(DatasetArguments(dataset=stream))
        loader = DataLoader(samples, batch_size=None, num_workers=workers)
        assert sorted(one["input_ids"][0] for one in loader) == list(range(6, 16))

    def test_a_collator_gets_tokenized_rows_without_a_batch_axis(self):
        """What is no sequence of tokens has no axis of its own for the sample."""
        row = {"input_ids": [5, 6], "pixel_values": [[0.5, 1.0, 1.5]]}
        args = DatasetArguments(dataset=[row], data_collator=list)
        (sample,) = load_training(args, model_input_names=("input_ids", "pixel_values"))
        assert sample["pixel_values"].tolist() == row["pixel_values"]

    def test_all_rows_in_order_or_the_first(self, tokenizer):
        rows = [[i, i] for i in range(600)]
        every = load_training(DatasetArguments(dataset=rows))
        assert [sample["labels"][0] for sample in every] == list(range(600))
        assert len(load_training(DatasetArguments(dataset=rows, max_train_samples=5))) == 5


class FakeProcessor:
    """A processor of images and text that hands out batches of one, as transformers' do."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, images=None, text=None, return_tensors=None, **kwargs):
        out = self.tokenizer([text], return_tensors=return_tensors)
        out["token_type_ids"] = torch.zeros(1, out["input_ids"].shape[1])
        out["pixel_values"] = torch.full((1, 3, 2, 2), float(images))
        out["image_grid_thw"] = torch.tensor([[1, 2, 2]])
        out["patches"] = torch.full((4, 5), float(images))
        return out


class Decoder:
    """A sound as the datasets library hands it out: what it holds is decoded on demand."""

    def get_all_samples(self):
        raise NotImplementedError

    def __getitem__(self, name):
        return {"array": [0.0, 0.1], "sampling_rate": 16000}[name]


class TestProcessors:
    def test_pixels_are_passed_through_and_joined(self, batches, tokenizer):
        (batch,) = batches(PICTURES, processor=FakeProcessor(tokenizer), batch_size=2, **FIRST)
        assert batch["pixel_values"].shape == (2, 3, 2, 2)
        assert batch["image_grid_thw"].tolist() == [[1, 2, 2]] * 2
        assert batch["patches"][:, 0].tolist() == [0.0] * 4 + [1.0] * 4
        assert batch["attention_mask"].shape == batch["input_ids"].shape
        assert "token_type_ids" not in batch

    def test_a_collator_gets_processed_rows_without_a_batch_axis(self, batches, tokenizer):
        seen = []
        batches(
            PICTURES,
            processor=FakeProcessor(tokenizer),
            data_collator=lambda samples: seen.extend(samples) or {"rows": samples},
        )
        assert seen[0]["pixel_values"].shape == (3, 2, 2)
        assert isinstance(seen[0]["input_ids"], list)

    def test_sound_becomes_features_and_the_decoders_input(self, batches, tokenizer):
        for row in [
            {"audio": [0.0, 0.1], "sampling_rate": 16000},
            {"audio": {"path": None, "array": [0.0, 0.1], "sampling_rate": 16000}},
            {"audio": Decoder()},
        ]:

            class Speech:
                """Like Whisper's: no parameter has a name."""

                def __init__(self):
                    self.tokenizer = tokenizer

                def __call__(self, *args, **kwargs):
                    assert kwargs.keys() == {"audio", "sampling_rate", "text", "return_tensors"}
                    assert (kwargs["audio"], kwargs["sampling_rate"]) == ([0.0, 0.1], 16000)
                    ids = tokenizer(kwargs["text"], return_tensors="pt")["input_ids"]
                    return {"input_features": torch.ones(1, 4, 6), "labels": ids}

            row |= {"text": " Hello", "id": "x"}
            names = ["input_features", "decoder_input_ids", "labels"]
            (batch,) = batches([row], processor=Speech(), model_input_names=names)
            assert batch["input_features"].shape == (1, 4, 6)
            assert batch["decoder_input_ids"].tolist() == [tokenizer(" Hello")["input_ids"]]
            assert "labels" not in batch

    def test_a_plain_function_will_do(self, batches):
        def letters(text):
            return {"input_ids": [ord(letter) for letter in text]}

        (batch,) = batches(["ab"], processor=letters)
        assert batch["input_ids"].tolist() == [[97, 98]]

    def test_what_the_processor_refuses_names_the_sample(self, batches):
        def broken(text):
            raise RuntimeError("no")

        with pytest.raises(DatasetError, match=r"sample 0 .*refused.*RuntimeError\('no'\)"):
            batches(["ab"], processor=broken)


def test_a_registered_class_tokenizes_when_called(tokenizer):
    args = DatasetArguments(dataset=[{"text": "import os"}])
    made = TextGenerationDataset.load_from_registry(
        "custom", dataset_args=args, processor=tokenizer
    )
    samples = made()
    assert isinstance(samples, Dataset)  # trainers take nothing else
    assert samples["input_ids"][:] == [tokenizer("import os")["input_ids"]]
    assert samples.column_names == ["input_ids", "attention_mask"]
    assert made(add_labels=True)[0]["labels"]


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "completions": ["b", "c"]}, {"prompt": "a", "completion": None}]
)
def test_a_prompt_without_its_answer_is_no_text(batches, row):
    with pytest.raises(DatasetError, match="one text of prompt and answers") as caught:
        batches([row], **FIRST)
    assert "text_column" not in str(caught.value)


@pytest.mark.parametrize("given", ["today", "1e9", "9" * 30])
def test_a_moment_that_is_no_time_is_refused(monkeypatch, given):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", given)
    with pytest.raises(DatasetError, match="SOURCE_DATE_EPOCH is"):
        moment()
