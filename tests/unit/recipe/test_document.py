# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import time

import pytest
import yaml

from llmcompressor.errors import RecipeError
from llmcompressor.recipe.document import looks_like_path, parse_text, read_file

DOCUMENT = {"args": {"bits": 4}, "modifiers": {"Thing": {"targets": ["re:.*a/b"], "rate": 1e-05}}}
YAML = yaml.safe_dump(DOCUMENT)
JSON = json.dumps(DOCUMENT, indent=1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("r.yaml", YAML),
        ("r.yml", YAML),
        ("r.json", JSON),
        ("r.md", f"---\n{YAML}---\n\n# Title\n\nmodifiers: none\n"),
        ("r.MD", f"+++\n{YAML}+++\n# Title\n"),
        ("r.txt", YAML),
        ("r.txt", JSON),
        ("recipe", f"---\n{YAML}---\nwords: words: words"),
        ("bom.yaml", "\ufeff" + YAML),
        ("flow.yaml", JSON),
    ],
)
def test_each_form_of_file_reads_alike(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_file(tmp_path / name) == DOCUMENT


@pytest.mark.parametrize(
    "text",
    [
        YAML,
        JSON,
        json.dumps(DOCUMENT),
        f"---\n{YAML}",
        f"\n---\n{YAML}---\nbody: [",
        "\ufeff" + YAML,
        "{args: {bits: 4}, modifiers: {Thing: {targets: ['re:.*a/b'], rate: 1e-5}}}",
    ],
)
def test_each_form_of_text_reads_alike(text):
    assert parse_text(text) == DOCUMENT


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-5", 1e-05),
        ("1.5e-3", 0.0015),
        (".5", 0.5),
        ("1.", 1.0),
        (".inf", float("inf")),
        ("0x10", 16),
        ("1_000", 1000),
        ("2:4", "2:4"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("=", "="),
        ("1e", "1e"),
        ("e5", "e5"),
        ("on", True),
        ("no", False),
        ("~", None),
        ("'1e-5'", "1e-5"),
        ("!!python/tuple [1, 2]", [1, 2]),
    ],
)
def test_scalars_mean_what_people_mean(written, value):
    read = parse_text(f"x: {written}")["x"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text",
    ["a: {x: 1, y: 2, x: 3}", "a:\n  x: 1\n  'x': 2\n", '{"a": {"x": 1, "x": 2}}', "x: 1\nx: 1"],
)
def test_a_key_that_stands_twice_is_an_error(text):
    with pytest.raises(RecipeError, match=r"'x' stands twice in one mapping.*write a list"):
        parse_text(text)


def test_merge_keys_and_anchors_work():
    text = "base: &b {x: 1, y: 2}\nmore: &m {<<: *b, x: 3}\nlast: {<<: *m, y: 4}\nagain: *m"
    assert parse_text(text)["last"] == {"x": 3, "y": 4}
    read = parse_text(text)
    assert read["again"] == read["more"]
    assert read["again"] is not read["more"]


@pytest.mark.parametrize(
    ("mapping", "value"),
    [
        ("{<<: *one, K: 0}", 0),
        ("{K: 0, <<: *one}", 0),
        ("{<<: *over, y: 4}", 2),
        ("{<<: {<<: *over}}", 2),
        ("{<<: [*one, *over]}", 1),
        ("{<<: [*over, *one]}", 2),
        ("{<<: [*one, *over], K: 0}", 0),
    ],
)
def test_a_mapping_overrides_what_it_merges(mapping, value):
    text = f"one: &one {{K: 1, y: 1}}\nover: &over {{<<: *one, K: 2}}\nlast: {mapping}"
    assert parse_text(text)["last"]["K"] == value


def test_enum_members_of_other_tools_read_as_their_values():
    text = "type: !!python/object/apply:compressed_tensors.quantization.quant_args.Kind [\n  int]"
    assert parse_text(text) == {"type": "int"}


@pytest.mark.parametrize(
    "text",
    [
        "x: !!python/object/apply:os.system [id]",
        "x: !!python/name:os.system",
        "x: !other 1",
        "x: [1",
        "x: 1: 2",
        "a: 1\n---\nb: 2\n...\n--- c",
        "{",
        "x: *nowhere",
        "? [a]\n: 1",
        "x: !!int abc",
    ],
)
def test_bad_yaml_is_one_clear_error(text):
    with pytest.raises(RecipeError, match="The recipe is not valid YAML"):
        parse_text(text)


def test_a_bomb_of_aliases_is_refused_at_once():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    started = time.perf_counter()
    with pytest.raises(RecipeError, match="values"):
        parse_text("\n".join(lines))
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "r.yaml", "is empty"),
        (b" \n", "r.json", "is empty"),
        (b"# Title\n---\na: 1\n---\n", "r.md", "no front matter"),
        (b"---\na: 1\n", "r.md", "no front matter"),
        (b"\xff\xfe\x00", "r.yaml", "cannot be read"),
    ],
)
def test_files_without_a_recipe(tmp_path, content, name, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_file(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        ("recipe.yaml", True),
        ("recipes/w4a16", True),
        ("C.JSON", True),
        ("zoo:a/b", True),
        ("hello", False),
        ("", False),
        ("modifiers:", False),
        ("modifiers: {A: {p: a/b.yaml}}", False),
        ('{"modifiers":{"A":{"p":"a/b"}}}', False),
        ("a: 1\nb: x.yaml", False),
    ],
)
def test_what_looks_like_a_path(text, is_path):
    assert looks_like_path(text) is is_path


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("modifiers:\n\tThing: {}", "Indent with spaces"),
        ("modifiers: {Thing: {rate: 1}", "Correct it there"),
        ('{"modifiers": [}', "Correct it there"),
        ("a: &a {b: *a}", "holds itself"),
    ],
)
def test_what_cannot_be_parsed_has_a_remedy(text, remedy):
    with pytest.raises(RecipeError) as caught:
        parse_text(text)
    assert remedy in caught.value.remedy
