# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import time

import pytest
import yaml

from llmcompressor.errors import RecipeError
from llmcompressor.recipe.document import RecipeLoader, looks_like_path, parse_text, read_file

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
        ("1E5", 1e5),
        ("-2e+3", -2000.0),
        ("1.5e-3", 0.0015),
        (".5", 0.5),
        ("1.", 1.0),
        (".inf", float("inf")),
        ("128", 128),
        ("-1", -1),
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


@pytest.mark.parametrize("key", ["x", "group_size"])
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
def test_a_mapping_overrides_what_it_merges_and_the_first_of_these_the_others(mapping, value, key):
    text = f"one: &one {{K: 1, y: 1}}\nover: &over {{<<: *one, K: 2}}\nlast: {mapping}"
    assert parse_text(text.replace("K", key))["last"][key] == value


def test_merged_keys_stand_before_the_mapping_s_own():
    text = "one: &one {a: 1, b: 1}\ntwo: &two {b: 2, c: 2}\nlast: {c: 3, d: 3, <<: [*one, *two]}"
    assert list(parse_text(text)["last"].items()) == [("b", 1), ("c", 3), ("a", 1), ("d", 3)]


@pytest.mark.parametrize("merged", ["3", "[1, 2]", "[*one, 3]", "[[*one]]"])
def test_only_mappings_can_be_merged(merged):
    with pytest.raises(RecipeError, match=r"expected a mapping.*for merging \(line 2, column 12\)"):
        parse_text(f"one: &one {{x: 1}}\nlast: {{<<: {merged}}}")


def test_a_mapping_that_merges_itself_gains_nothing():
    assert parse_text("a: &a {x: 1, <<: *a}") == {"a": {"x": 1}}


def test_a_bomb_of_merges_is_read_at_once():
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
    started = time.perf_counter()
    assert parse_text("\n".join(lines))["a11"] == {"x": 1, "y": 2}
    assert time.perf_counter() - started < 5


def test_the_enum_members_that_other_tools_save_read_as_their_values():
    text = "type: !!python/object/apply:compressed_tensors.quantization.quant_args.Kind [\n  int]"
    assert parse_text(text) == {"type": "int"}


@pytest.mark.parametrize(
    "text",
    [
        "x: !!python/object/apply:os.system [id]",
        "x: !!python/object/apply:compressed_tensors.quantization.x [a, b]",
        "x: !!python/object/apply:compressed_tensors.quantization.x {args: [a]}",
        "x: !!python/name:os.system",
        "x: !!python/object:os.X {}",
        "x: !other 1",
        "x: [1",
        "x: 1: 2",
        "a: 1\n---\nb: 2\n...\n--- c",
        "x: \x07",
        "{",
        "x: *nowhere",
        "? [a]\n: 1",
        "x: !!int abc",
    ],
)
def test_bad_yaml_is_one_clear_error(text):
    with pytest.raises(RecipeError, match="The recipe is not valid YAML"):
        parse_text(text)


@pytest.mark.parametrize("text", ["&a [*a]", "&a {x: *a}", "[" * 20_000, '{"a":' * 20_000])
def test_endless_nesting_is_an_error(text):
    with pytest.raises(RecipeError, match=r"nested|not valid"):
        parse_text(text)


def test_a_bomb_of_aliases_is_refused_at_once():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    started = time.perf_counter()
    with pytest.raises(RecipeError, match="values"):
        parse_text("\n".join(lines))
    assert time.perf_counter() - started < 5


def test_json_errors_say_where(tmp_path):
    (tmp_path / "r.json").write_text('{"a": 1,\n "b": }')
    with pytest.raises(RecipeError, match=r"r\.json is not valid JSON: .*line 2"):
        read_file(tmp_path / "r.json")


def test_a_missing_file_names_those_nearby(tmp_path):
    (tmp_path / "w4a16.yaml").touch()
    (tmp_path / "other.yaml").touch()
    with pytest.raises(RecipeError, match=r"no such file: .*w4a61\.yaml\. In .* is: w4a16\.yaml"):
        read_file(tmp_path / "w4a61.yaml")
    with pytest.raises(RecipeError, match="no folder"):
        read_file(tmp_path / "nowhere" / "r.yaml")
    with pytest.raises(RecipeError, match=r"is a folder.*other\.yaml, w4a16\.yaml"):
        read_file(tmp_path)


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


def test_of_two_documents_none_is_lost():
    with pytest.raises(RecipeError, match="two documents, and only the first would count"):
        parse_text("---\nmodifiers: {A: {}}\n---\nmodifiers: {B: {}}\n")
    front = "---\nmodifiers: {A: {}}\n---\nWhat the modifiers: of this recipe do.\n"
    assert parse_text(front) == {"modifiers": {"A": {}}}
    for prose in ("A model card.\nmodifiers: see above\n", "stage: first one\n"):
        assert parse_text(f"---\na: 1\n---\n{prose}") == {"a": 1}


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


def test_the_loader_is_a_safe_one():
    assert issubclass(RecipeLoader, yaml.SafeLoader)
    assert yaml.safe_load("x: 12:30") == {"x": 750}  # PyYAML's own loader is as it was


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


def test_what_is_no_text_has_a_remedy(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match=r"no text in UTF-8.*Save it as UTF-8"):
        read_file(tmp_path / "r.yaml")
