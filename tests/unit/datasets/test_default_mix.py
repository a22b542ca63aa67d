# SPDX-License-Identifier: Apache-2.0
"""The mix that ``dataset="default"`` names: its shares, its order, and what it is without a hub."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import datasets
import pytest

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import default_mix, open_source, stdlib_text
from llmcompressor.datasets.default_mix import ORDER, PARTS, DefaultMix
from llmcompressor.datasets.rows import Stream
from llmcompressor.errors import ArgumentError, DatasetError
from llmcompressor.evaluation.sources import tokenized_documents

ROWS = 300


def row_of(part: str, config: str | None, number: int) -> dict:
    """A row in the columns that the data set on the hub has."""
    said = f"{part} {config} {number}"
    if part == "chat":
        turns = [{"role": "user", "content": said}, {"role": "assistant", "content": "yes"}]
        return {"prompt": said, "prompt_id": "p", "messages": turns}
    if part == "code":
        return {"instruction": said, "output": "print()"}
    return {"text": said, "id": str(number), "language": "xx"}


@pytest.fixture
def hub(monkeypatch):
    """A hub with the data sets of the mix; ``asked`` holds what was opened, ``read`` the rows."""

    class Hub:
        def __init__(self):
            self.asked, self.read, self.error = [], Counter(), None

    hub, names = Hub(), {part.hub_id: name for name, part in PARTS.items()}

    def load_dataset(path, name=None, *, split=None, streaming=False):
        hub.asked.append((path, name, split))
        assert streaming
        if hub.error:
            raise hub.error

        def rows():
            for number in range(ROWS):
                hub.read[path] += 1
                yield row_of(names[path], name, number)

        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(default_mix, "is_offline", lambda: False)
    return hub


def mixed(count: int, **arguments) -> list:
    rows = open_source(DatasetArguments(dataset="default", **arguments)).rows
    assert isinstance(rows, Stream)
    return list(islice(rows, count))


def kind_of(row) -> str:
    said = row["text"] if "text" in row else row["messages"][0]["content"]
    return said.split()[0]


def test_shares_are_kept_in_every_ten_rows(hub):
    rows = mixed(40)
    assert [kind_of(row) for row in rows] == list(ORDER) * 4
    assert all(row.keys() in ({"text"}, {"messages"}) for row in rows)
    languages = [row["text"].split()[1] for row in rows if kind_of(row) == "languages"]
    assert languages == list(PARTS["languages"].configs)  # 8 rows of 8 languages


def test_the_seed_draws_the_rows(hub):
    first = mixed(30, seed=1)
    assert mixed(30, seed=1) == first
    assert mixed(30, seed=2) != first
    in_order = mixed(20, shuffle_calibration_samples=False)
    numbers = [int(row["text"].split()[2]) for row in in_order if kind_of(row) == "text"]
    assert numbers == [0, 1, 2, 3, 4, 5]


def test_only_what_is_used_is_opened_and_read(hub):
    source = open_source(DatasetArguments(dataset="default"))
    assert not hub.asked
    list(islice(source.rows, 10))
    text, chat, code, languages = PARTS.values()
    expected = [(part.hub_id, part.configs[0], part.split) for part in (text, chat, code)]
    expected += [(languages.hub_id, config, "train") for config in languages.configs[:2]]
    assert sorted(hub.asked, key=str) == sorted(expected, key=str)
    assert max(hub.read.values()) < ROWS  # streamed


def test_the_mix_ends_where_its_shares_cannot_be_kept(hub):
    rows = mixed(10**6)
    counts = Counter(map(kind_of, rows))
    assert counts["text"] == ROWS
    assert len(rows) <= ROWS / 0.3 + 1


def test_the_library_itself_streams_such_folders(monkeypatch, tmp_path):
    """With the cards and the files that the data sets have there, and the library's own reader."""
    local = {}
    for name, part in PARTS.items():
        card = ["---", "configs:"]
        for config in part.configs:
            folder = tmp_path / name / str(config)
            folder.mkdir(parents=True)
            rows = [row_of(name, config, number) for number in range(9)]
            datasets.Dataset.from_list(rows).to_parquet(folder / "train-0.parquet")
            card += [f"- config_name: {config or 'default'}", "  data_files:"]
            card += [f"  - split: {part.split}", f"    path: {config}/*.parquet"]
        (tmp_path / name / "README.md").write_text("\n".join([*card, "---", ""]))
        local[name] = replace(part, hub_id=str(tmp_path / name))
    monkeypatch.setattr(default_mix, "PARTS", local)
    monkeypatch.setattr(default_mix, "is_offline", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = mixed(20, seed=5)
    assert [kind_of(row) for row in rows] == list(ORDER) * 2
    assert mixed(20, seed=5) == rows


class TestText:
    def test_turns_go_through_the_chat_template(self, hub, batches, tokenizer):
        template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        tokenizer.chat_template = template
        try:
            (ids,) = (batch["input_ids"][0] for batch in batches("default")[1:2])
        finally:
            tokenizer.chat_template = None
        assert tokenizer.decode(ids).removeprefix(tokenizer.bos_token or "").startswith("[user]")

    def test_without_a_template_they_are_plain_text(self, hub, texts, logged):
        found = texts("default", num_calibration_samples=10)
        assert found[1].startswith("chat None")
        assert found[1].endswith("\n\nyes")
        assert found[2].endswith("\n\nprint()")
        assert not [line for line in logged if "template" in line or "ChatML" in line]


def test_a_hub_out_of_reach_is_an_error_and_no_other_data(hub, texts):
    hub.error = ConnectionError("no route")
    with pytest.raises(DatasetError, match=r"'default'.*fineweb-edu.*no route.*HF_HUB_OFFLINE=1"):
        texts("default")


def test_arguments_of_a_single_data_set_are_refused(hub, texts):
    for name, value in (
        ("splits", "train"),
        ("dataset_config_name", "en"),
        ("dataset_path", "."),
        ("raw_kwargs", {"revision": "r"}),
        ("num_calibration_samples", None),
    ):
        with pytest.raises(DatasetError, match=f"'default'.*{name}"):
            texts("default", **{name: value})
    assert not hub.asked


def test_evaluation_refuses_it(hub, tokenizer):
    with pytest.raises(ArgumentError, match=r"no end\. Leave dataset out .*or name a text"):
        list(tokenized_documents("default", tokenizer))
    assert not hub.asked


class TestOffline:
    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch):
        monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")

    def test_the_switch_is_that_of_the_hub(self, monkeypatch):
        assert default_mix.is_offline()
        monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        assert not default_mix.is_offline()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert default_mix.is_offline()

    def test_it_is_the_standard_library_and_says_so(self, logged, batches):
        arguments = {"max_seq_length": 64, "num_calibration_samples": 6}
        first = batches("default", **arguments)
        assert len(first) == 6
        (line,) = logged
        assert "HF_HUB_OFFLINE" in line
        assert "standard library" in line
        again = batches("default", **arguments)
        for one, other in zip(first, again, strict=True):
            assert one["input_ids"].tolist() == other["input_ids"].tolist()

    def test_it_has_no_end_and_nothing_held_out(self, monkeypatch):
        monkeypatch.setattr(default_mix, "_CHARACTERS", 100)
        texts = [row["text"] for row in mixed(5, num_calibration_samples=2)]
        assert len(set(texts)) == 5
        held_out = "\0".join(stdlib_text.held_out_texts())
        assert not [text for text in texts if text in held_out]


def test_every_part_says_its_license():
    assert all(part.license for part in PARTS.values())
    assert set(ORDER) == set(PARTS)
    assert DefaultMix.is_mix


def test_the_standard_library_needs_no_network(hub):
    args = DatasetArguments(dataset="python_stdlib", num_calibration_samples=3)
    source = open_source(args)
    rows = list(islice(iter(source.rows), 3))
    assert hub.asked == []
    expected = stdlib_text.calibration_passages(3, seed=args.seed, characters=8192)
    assert [row["text"] for row in rows] == list(expected)
    with pytest.raises(DatasetError, match="'python_stdlib' has more rows"):
        open_source(replace(args, num_calibration_samples=None))
