# SPDX-License-Identifier: Apache-2.0
"""Local files and folders, and their splits."""

from __future__ import annotations

import copy
import csv
import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets.files import read_files
from llmcompressor.datasets.rows import rows_of
from llmcompressor.datasets.source import open_source
from llmcompressor.errors import DatasetError

ROWS = [{"text": "a = 1"}, {"text": "b = 'ü, \"x\"'\nc"}, {"text": "d = 3"}]
WORDS = [row["text"] for row in ROWS]
FIRST = {"shuffle_calibration_samples": False}


def read_file(path, kind, options):
    return rows_of(read_files([path], kind, options))


def write(path, kind):
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_a_file_gives_its_rows(texts, tmp_path, kind):
    path = write(tmp_path / f"data.{kind}", kind)
    assert texts(None, dataset_path=path, **FIRST) == WORDS
    assert texts(path, **FIRST) == WORDS
    assert texts(str(path), **FIRST) == WORDS
    assert texts("custom", dataset_path=path, **FIRST) == WORDS


def test_a_path_may_begin_at_home(texts, tmp_path, monkeypatch):
    write(tmp_path / "data.jsonl", "jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts("~/data.jsonl", **FIRST) == WORDS
    assert texts(None, dataset_path="~/data.jsonl", **FIRST) == WORDS


def test_the_kind_can_be_named(texts, tmp_path):
    path = write(tmp_path / "data.dump", "jsonl")
    assert texts("json", dataset_path=path, **FIRST) == WORDS
    with pytest.raises(DatasetError, match="Name its kind"):
        texts(None, dataset_path=path)


def test_text_by_line_paragraph_or_document(tmp_path):
    for options, expected in [
        ({}, ["a", "b", "c"]),
        ({"sample_by": "paragraph"}, ["a\nb", "c"]),
        ({"sample_by": "document"}, ["a\nb\n\nc\n"]),
    ]:
        path = tmp_path / "data.txt"
        path.write_text("a\nb\n\nc\n")
        rows = read_file(path, "text", options)
        got = [row["text"] for row in rows.fetch(range(len(rows)))]
        assert [text.strip() for text in got] == [text.strip() for text in expected]


def test_json_in_its_several_forms(tmp_path):
    for content, options, expected in [
        ('{"data": [{"text": "a"}, {"text": "b"}]}', {}, [{"text": "a"}, {"text": "b"}]),
        ('{"v": 1, "rows": [{"text": "a"}]}', {"field": "rows"}, [{"text": "a"}]),
        ('{"text": "a"}', {}, [{"text": "a"}]),
        ('{\n"text": "a"\n}', {}, [{"text": "a"}]),
        ('["a", "b"]', {}, [{"text": "a"}, {"text": "b"}]),
        ("[[1, 2], [3]]", {}, [{"input_ids": [1, 2]}, {"input_ids": [3]}]),
        ("[1, 2]\n[3]\n", {}, [{"input_ids": [1, 2]}, {"input_ids": [3]}]),
        ('"a"\n"b"\n', {}, [{"text": "a"}, {"text": "b"}]),
        (
            '{"messages": [{"role": "user", "content": "a"}]}\n',
            {},
            [{"messages": [{"role": "user", "content": "a"}]}],
        ),
        ('{"text": ["a", "b"]}', {}, [{"text": "a"}, {"text": "b"}]),
        ('{\n"q": ["a", "b"],\n"n": [1, 2]}', {}, [{"q": "a", "n": 1}, {"q": "b", "n": 2}]),
        ('{"rows": {"text": ["a"]}, "v": 1}', {"field": "rows"}, [{"text": "a"}]),
        ('{"input_ids": [[1, 2], [3]]}', {}, [{"input_ids": [1, 2]}, {"input_ids": [3]}]),
        ('{"input_ids": [1, 2]}', {}, [{"input_ids": [1, 2]}]),
        (
            '{"messages": [[{"role": "user", "content": "a"}], [{"role": "user"}]]}',
            {},
            [{"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user"}]}],
        ),
        ('{"text": []}', {}, []),
        ("", {}, []),
    ]:
        path = tmp_path / "data.json"
        path.write_text(content)
        rows = read_file(path, "json", options)
        assert rows.fetch(range(len(rows))) == expected


TURNS = [{"turns": [{"q": "a", "a": "b"}]}, {"turns": [{"q": "c", "a": "d"}]}]


def test_lines_with_a_list_of_objects_are_rows(texts, tmp_path):
    for name, rows in [
        ("d.jsonl", TURNS),
        ("d.ndjson", TURNS[:1]),
        ("d.jsonl", TURNS[:1]),
        ("d.json", TURNS),
    ]:
        path = tmp_path / name
        path.write_text("\n" + "\n\n".join(json.dumps(row) for row in rows))
        got = read_file(path, "json", {})
        assert got.fetch(range(len(got))) == rows

        def text(row):
            return {"text": " ".join(turn["q"] + turn["a"] for turn in row["turns"])}

        assert texts(path, preprocessing_func=text, **FIRST) == ["ab", "cd"][: len(rows)]


def test_a_file_that_cannot_be_read(texts, tmp_path):
    for name, content, message in [
        ("data.json", b'[{"text": ', "cannot be read as json"),
        ("data.json", b"3 4", "neither a list|is not JSON|cannot be read"),
        ("data.jsonl", b'{"text": "a"}\n{"text": \n', "Line 2 of .*data.jsonl is not JSON"),
        ("data.jsonl", b'{"text": "\xff\xfe"}\n', "cannot be read|is not JSON"),
        ("data.txt", b"\xff\xfe\x00", "cannot be read as text"),
        ("data.parquet", b"PAR1 not really", "cannot be read as parquet"),
        ("data.json", b"", "is empty"),
        ("data.csv", b"text\n", "is empty"),
        ("data.jsonl.gz", b"\x1f\x8b", "is packed.*Unpack it"),
        ("data.csv", b"text\n\xff\n", "not UTF-8.*Save it as UTF-8"),
        ("data.csv", b"text;n\na, b;1\nc;2\n", r"seems to have ';'.*raw_kwargs=.'delimiter': ';'"),
        ("data.csv", b"n|text\n1|a\n", r"seems to have '\|'.*raw_kwargs"),
        ("data.csv", b"text,n\na;b,1,2\n", r"data.csv cannot be read as csv.*Length of header"),
        ("data.csv", b"text,text\na,b\n", "names the column 'text' more than once"),
        ("data.json", b"3", "neither a list"),
        ("data.csv", b"text,n\na,1\nb,1,2\n", "Expected 2 fields in line 3, saw 3"),
        ("data.json", b'{"text": ["a", "b"], "n": [1]}', "text has 2, n has 1"),
        ("data.json", b'{"a": [{"text": "b"}], "c": [{"text": "d"}]}', "under several keys.*field"),
        ("data.jsonl", b"null\n", "neither a list"),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DatasetError, match=message):
            texts(None, dataset_path=path)


def test_the_delimiter_is_the_one_that_is_given(tmp_path):
    for content, options, expected in [
        ("text;n\na, b;1\n", {"delimiter": ";"}, [{"text": "a, b", "n": "1"}]),
        ("text,n\n007,\n,NA\n", {}, [{"text": "007", "n": ""}, {"text": "", "n": "NA"}]),
        ("text,n\na\n", {}, [{"text": "a", "n": ""}]),
        ("text;n\na;1\n", {"delimiter": ","}, [{"text;n": "a;1"}]),
    ]:
        path = tmp_path / "data.csv"
        path.write_text(content)
        rows = read_file(path, "csv", options)
        assert rows.fetch(range(len(rows))) == expected


@pytest.mark.parametrize("blank", ["", "\n"])  # the library keeps objects only without blank lines
def test_rows_of_a_file_are_those_of_a_list(texts, tokenizer, tmp_path, blank):
    """Whatever keys a table adds, for those that other rows and turns have."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
    }
    other = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "g", "arguments": {"b": 2}}],
    }
    rows = [{"messages": [{"role": "user", "content": "hi"}, turn]} for turn in (call, other)]
    rows += [{"text": "a = 1"}, {"messages": rows[0]["messages"], "id": "x"}]
    path = tmp_path / "my [1] data.jsonl"
    path.write_text(blank.join(json.dumps(row) + "\n" for row in rows))
    assert sorted(texts(path, processor=own)) == sorted(texts(rows, processor=own))


def test_data_that_is_not_there(texts, monkeypatch, tmp_path):
    for arguments, message in [
        ({"dataset_path": "nowhere.json"}, "There is no file or folder nowhere.json"),
        ({"data": "json"}, "which.*dataset_path"),
        ({"data": "jsn", "dataset_path": "x.json"}, "names no kind.*Did you mean json"),
        ({"dataset_path": "x" * 5000}, "There is no file or folder x+…"),
        ({"data": "x" * 5000}, "There is no data set, file or folder 'x+…'"),
        ({"data": "a\0b"}, "There is no data set, file or folder 'a"),
        ({"data": "nowhere.json"}, "There is no data set, file or folder 'nowhere.json'"),
        ({"data": "ultrachat200k"}, "Did you mean ultrachat_200k"),
    ]:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(DatasetError, match=message):
            texts(arguments.pop("data", None), **arguments)


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path):
        for name, text in {
            "my_train_2": "b",
            "my_train_1": "a",
            "Validation": "v",
            "testing": "t",
        }.items():
            (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
        (tmp_path / "README.md").write_text("no data")
        return tmp_path

    def test_files_are_splits_by_name(self, texts, folder):
        for splits, expected in [
            (None, ["a", "b"]),
            ("train", ["a", "b"]),
            ("validation", ["v"]),
            ("test", ["t"]),
            ("train[1:]", ["b"]),
            ("train[:50%]", ["a"]),
            ("test+train", ["t", "a", "b"]),
            (["validation", "train"], ["v"]),
            (["train", "calibration+test"], None),
            ({"calibration": "test"}, ["t"]),
            ({"calibration": "test", "train": "train"}, ["t"]),
        ]:
            if expected is None:
                with pytest.raises(DatasetError, match="no split 'calibration'"):
                    texts(None, dataset_path=folder, splits=splits)
            else:
                assert texts(None, dataset_path=folder, splits=splits, **FIRST) == expected

    def test_splits_that_are_not_there(self, texts, folder):
        for splits, message in [
            ("trian", "no split 'trian'; its splits are test, train, validation.*mean train"),
            ({"train": "train"}, "no key 'calibration'"),
            ("train[a:b]", "cannot be read"),
            ("train[:5", "cannot be read"),
            ("train[:200%]", "goes to 200% of its rows"),
        ]:
            with pytest.raises(DatasetError, match=message):
                texts(None, dataset_path=folder, splits=splits)

    def test_several_splits_without_train_ask_for_a_choice(self, texts, tmp_path):
        for name in ("one", "two"):
            (tmp_path / f"{name}.txt").write_text(name)
        with pytest.raises(DatasetError, match=r"several splits: one, two.*splits='one'"):
            texts(None, dataset_path=tmp_path)

    def test_several_kinds_ask_for_a_choice(self, texts, folder):
        (folder / "train.txt").write_text("x")
        with pytest.raises(DatasetError, match=r"several kinds: json, text.*dataset='json'"):
            texts(None, dataset_path=folder)
        assert texts("text", dataset_path=folder) == ["x"]

    def test_nothing_to_read(self, texts, tmp_path):
        with pytest.raises(DatasetError, match=r"no file that can be read.*\.jsonl"):
            texts(None, dataset_path=tmp_path)

    def test_files_below_are_found(self, texts, tmp_path):
        (tmp_path / "data").mkdir()
        write(tmp_path / "data" / "train-00000-of-00001.parquet", "parquet")
        assert texts(None, dataset_path=tmp_path, **FIRST) == WORDS

    def test_folders_of_splits(self, texts, tmp_path):
        for where in ("train/de", "train/en", "test/de"):
            (tmp_path / where).parent.mkdir(exist_ok=True)
            (tmp_path / f"{where}.txt").write_text(where)
        assert texts(None, dataset_path=tmp_path, **FIRST) == ["train/de", "train/en"]
        assert texts(None, dataset_path=tmp_path, splits="test") == ["test/de"]

    def test_only_the_files_of_the_split_are_read(self, texts, folder):
        (folder / "testing.jsonl").write_bytes(b"\xff")
        (folder / "Validation.jsonl").unlink()
        assert texts(None, dataset_path=folder, **FIRST) == ["a", "b"]

    def test_what_save_to_disk_wrote(self, texts, tmp_path):
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path)
        assert texts(None, dataset_path=tmp_path, **FIRST) == WORDS


NAMES = ("train_sft", "test_sft", "train_gen", "test_gen")


def configured(**configs):
    """A card's front matter: each configuration's files by split."""
    listed = [
        {
            "config_name": name,
            "data_files": [{"split": split, "path": path} for split, path in files.items()],
        }
        for name, files in configs.items()
    ]
    return "---\nlicense: mit\n" + yaml.safe_dump({"configs": listed}) + "---\n# A data set\n"


class TestCopyOfTheHub:
    @pytest.fixture
    def copy(self, tmp_path):
        (tmp_path / "data").mkdir()
        for name in NAMES:
            rows = [{"messages": [{"role": "user", "content": f"{name} {i}"}]} for i in (0, 1)]
            file = tmp_path / "data" / f"{name}-00000-of-00001-0ab.parquet"
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
        return tmp_path

    @staticmethod
    def write_card(folder, suffix="parquet"):
        default = {name: f"data/{name}-*.{suffix}" for name in NAMES}
        generated = {"train": f"data/train_gen-*.{suffix}"}
        (folder / "README.md").write_text(configured(default=default, gen=generated))

    @staticmethod
    def rows(dataset, splits, **more):
        source = open_source(DatasetArguments(dataset=dataset, splits=splits, **more))
        return [row["messages"][0]["content"] for row in source.rows.fetch(range(len(source.rows)))]

    @pytest.mark.parametrize("card", [True, False])
    def test_its_splits_stay_apart(self, copy, card):
        if card:
            self.write_card(copy)
        for name in NAMES:
            assert self.rows(str(copy), name) == [f"{name} 0", f"{name} 1"]
        assert self.rows(str(copy), {"calibration": "train_sft[:1]"}) == ["train_sft 0"]
        with pytest.raises(DatasetError, match="test_gen, test_sft, train_gen, train_sft"):
            self.rows(str(copy), None)

    @pytest.mark.parametrize("card", [True, False])
    def test_the_short_names_of_a_known_data_set(self, copy, card):
        if card:
            self.write_card(copy)
        for splits, name in {
            None: "train_sft",
            "test": "test_sft",
            "train_gen": "train_gen",
        }.items():
            got = self.rows("ultrachat_200k", splits, dataset_path=str(copy))
            assert got == [f"{name} 0", f"{name} 1"]

    def test_a_configuration_can_be_named(self, copy):
        self.write_card(copy)
        got = self.rows(str(copy), None, dataset_config_name="gen")
        assert got == ["train_gen 0", "train_gen 1"]
        with pytest.raises(DatasetError, match="nope"):
            self.rows(str(copy), "train", dataset_config_name="nope")

    def test_what_is_found_is_what_the_library_finds(self, copy, monkeypatch):
        self.write_card(copy)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", copy / "cache")
        theirs = datasets.load_dataset(str(copy), cache_dir=str(copy / "own"))
        for name, rows in theirs.items():
            assert self.rows(str(copy), name) == [row["messages"][0]["content"] for row in rows]
        assert not (copy / "cache").exists()  # nothing is cached by us

    def test_packed_files_are_read_by_the_library(self, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        folder = tmp_path / "copy"
        (folder / "data").mkdir(parents=True)
        for name in NAMES:
            row = {"messages": [{"role": "user", "content": name}]}
            with gzip.open(folder / "data" / f"{name}-0.json.gz", "wt") as file:
                file.write(json.dumps(row) + "\n")
        self.write_card(folder, "json.gz")
        assert self.rows(str(folder), "train_gen") == ["train_gen"]


def test_a_list_is_cut_by_a_slice(texts):
    for split in ["train[1:]", "validation[-2:]", "train[34%:]"]:
        assert texts(WORDS, splits=split, **FIRST) == WORDS[1:]


def test_images_in_parquet_are_decoded(tmp_path, tokenizer):
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2))
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    data = datasets.Dataset.from_list([{"image": image, "caption": "c"}], features=features)
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(data.with_format("arrow")[:], path)
    (row,) = read_file(path, "parquet", {}).fetch([0])
    assert row["image"].size == (2, 2)
