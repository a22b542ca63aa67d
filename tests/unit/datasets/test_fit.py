# SPDX-License-Identifier: Apache-2.0
"""Calibration data that obviously does not fit is warned of, and other data is not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import fit, load_calibration
from llmcompressor.datasets.fit import template_tokens, vocabulary_scripts
from llmcompressor.datasets.rows import Rows
from llmcompressor.datasets.source import Source

TEMPLATE = "{% for m in messages %}<|turn|>{{ m['role'] }} {{ m['content'] }}<|end|>{% endfor %}"
ENGLISH = " ".join(
    ["the of and to in is it you that he was for on are with his they at be this"] * 4
)
RUSSIAN = "мы быть этот который на я он что по это она к но весь год один такой тот свой же для вы"
OTHERS = "אבגד αβγδ שלום λόγος 한국 中文 かな ไทย नमस्ते"


@pytest.fixture
def chat_tokenizer():
    """A tokenizer of words of seven scripts, with a chat template that has special tokens."""
    words = dict.fromkeys(
        [*ENGLISH.split(), *RUSSIAN.split(), *OTHERS.split(), "user", "assistant", "Hello"]
    )
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}))
    backend.model.unk_token = "<unk>"
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<|turn|>"), AddedToken("<|end|>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", chat_template=TEMPLATE
    )


@pytest.fixture
def warned(logged):
    """warned(data, tokenizer, argument=value, ...) → the warnings of its preparation."""

    def load(data, processor, **arguments):
        logged.clear()
        args = DatasetArguments(dataset=data, num_calibration_samples=None, **arguments)
        assert list(load_calibration(args, processor=processor))
        return "".join(logged)

    return load


def chats(text: str, count: int = 8) -> list:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    return [{"messages": turns}] * count


class TestLength:
    @pytest.mark.parametrize(("short", "is_told"), [(0, False), (1, False), (2, True), (10, True)])
    def test_a_fifth_is_too_many(self, warned, tokenizer, short, is_told):
        found = warned(["x = 1"] * short + ["x = 1\n" * 40] * (10 - short), tokenizer)
        assert (f"{short} of 10 samples have fewer than 32 tokens" in found) is is_told

    def test_tokens_are_counted_without_padding(self, warned):
        row = {"input_ids": [5] * 64, "attention_mask": [0] * 40 + [1] * 24}
        assert "5 of 5 samples" in warned([row] * 5, None)
        assert not warned([row | {"attention_mask": [1] * 64}] * 5, None)

    @pytest.mark.parametrize(
        "arguments", [{"max_seq_length": 16}, {"concatenate_data": True, "max_seq_length": 40}]
    )
    def test_what_was_asked_for_is_not_told(self, warned, tokenizer, arguments):
        assert not warned(["x = 1\ny = 2"] * 64, tokenizer, **arguments)

    def test_a_handful_of_samples_is_not_told(self, warned, tokenizer):
        assert not warned(["x = 1"] * 4, tokenizer)


class TestTemplate:
    def test_raw_text_for_a_chat_model_is_told(self, warned, chat_tokenizer):
        found = warned([f"{ENGLISH} {RUSSIAN} {OTHERS}"] * 8, chat_tokenizer)
        assert "none of 8 samples has its tokens" in found
        assert "give rows with 'messages'" in found

    def test_conversations_and_rendered_text_are_not(self, warned, chat_tokenizer):
        text = f"{ENGLISH} {RUSSIAN}"
        assert not warned(chats(text), chat_tokenizer)
        rendered = f"<|turn|> user {text} <|end|>"
        assert not warned([rendered, *[text] * 7], chat_tokenizer)
        ids = chat_tokenizer(rendered)["input_ids"]
        assert not warned([{"input_ids": ids}] * 8, chat_tokenizer)

    def test_models_without_a_template_are_not(self, warned, chat_tokenizer, tokenizer):
        chat_tokenizer.chat_template = None
        assert not warned([f"{ENGLISH} {RUSSIAN}"] * 8, chat_tokenizer)
        assert not warned([ENGLISH] * 8, tokenizer)

    def test_a_template_of_plain_words_tells_nothing(self, warned, chat_tokenizer):
        chat_tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        assert template_tokens(chat_tokenizer) == frozenset()
        assert not warned([f"{ENGLISH} {RUSSIAN}"] * 8, chat_tokenizer)

    def test_a_template_that_refuses_tells_nothing(self, chat_tokenizer):
        chat_tokenizer.chat_template = "{{ raise_exception('no') }}"
        assert template_tokens(chat_tokenizer) == frozenset()

    def test_padding_is_no_template(self, warned, chat_tokenizer):
        chat_tokenizer.pad_token = "<|end|>"
        text = f"{ENGLISH} {RUSSIAN}"
        found = warned([text] * 8, chat_tokenizer, pad_to_max_length=True, max_seq_length=128)
        assert "none of 8 samples" in found

    def test_tokens_of_every_text_do_not_count(self, chat_tokenizer, monkeypatch):
        turn, end = chat_tokenizer.convert_tokens_to_ids(["<|turn|>", "<|end|>"])
        assert template_tokens(chat_tokenizer) == {turn, end}
        plain = type(chat_tokenizer).__call__

        def with_end(self, text, *, add_special_tokens=True, **options):
            ids = plain(self, text, **options)["input_ids"]
            return {"input_ids": [*ids, end] if add_special_tokens else ids}

        monkeypatch.setattr(type(chat_tokenizer), "__call__", with_end)
        assert template_tokens(chat_tokenizer) == {turn}


class TestScripts:
    def test_one_of_many_is_told(self, warned, chat_tokenizer):
        found = warned(chats(ENGLISH), chat_tokenizer)
        assert "all text is in one script, Latin, and the tokenizer knows 8" in found
        assert "Chinese and Japanese, Cyrillic, Devanagari, Greek" in found
        chat_tokenizer.chat_template = None
        assert "one script, Cyrillic" in warned([f"{RUSSIAN} {RUSSIAN}"] * 8, chat_tokenizer)

    def test_several_are_not(self, warned, chat_tokenizer):
        assert not warned([*chats(ENGLISH, 6), *chats(RUSSIAN, 2)], chat_tokenizer)

    def test_a_foreign_word_is_no_second_language(self, warned, chat_tokenizer):
        some = [*chats(ENGLISH, 19), *chats(f"{ENGLISH} λόγος", 1)]
        assert "one script, Latin" in warned(some, chat_tokenizer)

    def test_a_vocabulary_of_few_scripts_is_not(self, warned, chat_tokenizer, monkeypatch):
        monkeypatch.setattr(fit, "_MANY", 9)
        assert not warned(chats(ENGLISH), chat_tokenizer)

    def test_the_embedded_models_vocabulary_knows_one(self, tokenizer):
        assert vocabulary_scripts(tokenizer) == {"Latin"}

    def test_few_letters_tell_nothing(self, warned, chat_tokenizer):
        assert not warned(chats("1 2 3 " * 30), chat_tokenizer)


def test_of_a_mix_only_the_length_is_told(chat_tokenizer, logged):
    class Mix(SimpleNamespace):
        is_mix = True
        dataset_template = staticmethod(dict)

    args = DatasetArguments(dataset="mix", num_calibration_samples=8)
    for text, count in ((ENGLISH, 0), ("the", 1)):
        logged.clear()
        rows = Rows(8, lambda some, text=text: [{"text": text}] * len(some))
        load_calibration(args, processor=chat_tokenizer, source=Source("The mix", rows, Mix))
        assert len(logged) == count


def test_fewer_samples_than_asked_for_are_told(batches, tokenizer, logged):
    batches(["x = 1\n" * 40] * 3, num_calibration_samples=4)
    assert "4 samples were asked for, there are only 3. Give more" in logged[0]
