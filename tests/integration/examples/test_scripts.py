# SPDX-License-Identifier: Apache-2.0
"""Every script of ``examples/`` runs as it stands, but for the names of model and data.

What it writes verifies, and transformers computes with it.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tests.support import mixtures, tiny_models
from tests.support.short_pico import write_short_pico
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPImageProcessor,
    LlavaProcessor,
)

from llmcompressor import verify
from llmcompressor.evaluation.stdlib_text import calibration_passages

EXAMPLES = Path(__file__).parents[3] / "examples"
DOCS = EXAMPLES.parent / "docs"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
CHAT = (
    "{% for turn in messages %}<s>{{ turn['role'] }}\n{% if turn['content'] is string %}"
    "{{ turn['content'] }}{% else %}{% for part in turn['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SAID = ["For whom", "Needs", "Serve with", "Comes out"]
FORMATS = {
    "awq": "pack-quantized",
    "fp8": "float-quantized",
    "kv_cache": "float-quantized",
    "mixed_precision": "mixed-precision",
    "model_free": "float-quantized",
    "moe": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "qat_distillation": "pack-quantized",
    "rotations": "pack-quantized",
    "sparse_finetuning": None,
    "vision_language": "pack-quantized",
    "w4a16_gptq": "pack-quantized",
    "w8a8_smoothquant": "int-quantized",
}
"""Script → the format of what it writes."""
LEFT_OUT = r"(language_model\.)?lm_head|.*(gate|vision_tower|multi_modal_projector)\b.*"


def source_of(name: str, **constants: Path) -> str:
    """A script with other values of its constants."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    for constant, value in constants.items():
        text = re.sub(rf'^{constant} = "[^"]*"', f'{constant} = "{value}"', text, flags=re.M)
    return text


@pytest.fixture(scope="module")
def text_model(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first block of the embedded model, with a chat template."""
    folder = write_short_pico(pico, tmp_path_factory.mktemp("text") / "pico", dtype=torch.bfloat16)
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def mixture(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with the same tokenizer."""
    folder = tmp_path_factory.mktemp("mixture") / "moe"
    mixtures.build("qwen3_moe", vocab_size=2048).bfloat16().save_pretrained(folder)
    for file in [*text_model.glob("*token*"), *text_model.glob("*.jinja")]:
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def seeing(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaVA with its processor."""
    folder = tmp_path_factory.mktemp("seeing") / "llava"
    tokenizer = AutoTokenizer.from_pretrained(text_model)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    images = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    ).save_pretrained(folder)
    token = tokenizer.convert_tokens_to_ids("<image>")
    model = tiny_models.llava(vocabulary=len(tokenizer), image_token=token)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight short conversations about source text."""
    folder = tmp_path_factory.mktemp("chats")
    rows = [
        [
            {"role": "user", "content": "Go on.\n" + text[:100]},
            {"role": "assistant", "content": text[100:]},
        ]
        for text in calibration_passages(8, characters=400)
    ]
    lines = [json.dumps({"messages": turns}) for turns in rows]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight noisy pictures with what they are said to show."""
    folder, lines = tmp_path_factory.mktemp("pictures"), []
    for index in range(8):
        drawn = numpy.random.default_rng(index).integers(0, 255, (9, 8, 3), dtype=numpy.uint8)
        shown = folder / f"{index}.png"
        Image.fromarray(drawn).save(shown)
        asked = [{"type": "image", "image": str(shown)}, {"type": "text", "text": "What is it?"}]
        turns = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [{"type": "text", "text": f"Noise {index}."}]},
        ]
        lines.append(json.dumps({"messages": turns}))
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "train.jsonl"


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script in an empty folder; gives its names."""
    models = {"moe": "mixture", "vision_language": "seeing"}
    data = {"vision_language": "pictures"}

    def execute(name: str, **constants: Path) -> dict[str, Any]:
        model = request.getfixturevalue(models.get(name, "text_model"))
        rows = request.getfixturevalue(data.get(name, "chats"))
        names: dict[str, Any] = {"__name__": "__main__"}
        monkeypatch.chdir(tmp_path)
        source = source_of(name, MODEL=model, DATASET=rows, **constants)
        exec(compile(source, f"{name}.py", "exec", dont_inherit=True), names)
        return names

    return execute


# TRL asks for pinned memory, of which torch warns where no device is.
@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name in FORMATS])
def test_what_a_script_writes_is_good(
    name: str, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run(name)["OUTPUT"]
    assert capsys.readouterr().out.endswith(f"Next: vllm serve {output}\n")
    found = verify(output, serve="vllm")
    assert found.ok, str(found)
    kind = AutoModelForImageTextToText if name == "vision_language" else AutoModelForCausalLM
    model = kind.from_pretrained(output, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(3, 19)[None]).logits).all()
    written = json.loads(Path(output, "config.json").read_text()).get("quantization_config", {})
    assert written.get("format") == FORMATS[name]
    assert [one for one in written.get("ignore", []) if not re.fullmatch(LEFT_OUT, one)] == []
    assert bool(written.get("kv_cache_scheme")) is (name == "kv_cache")
    if name == "sparse_finetuning":
        zeros = [one == 0 for one in weights_of_blocks(model)]
        assert all((one.unflatten(1, (-1, 4)).sum(-1) >= 2).all() for one in zeros)


@pytest.mark.slow  # lm-eval looks through all of its tasks, each time
@pytest.mark.filterwarnings("ignore")  # of its dependencies
def test_scores_are_told_before_and_after(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a task of local files."""
    pytest.importorskip("lm_eval", reason="lm-eval is an optional companion")
    rows = [
        {"context": "import", "choices": ["os", "q"]},
        {"context": "x =", "choices": ["1", "def"]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = {
        "task": "next_word",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
    }
    (tmp_path / "task.yaml").write_text(json.dumps(task), encoding="utf-8")
    run("fp8")
    names = run("evaluate_lm_eval", TASK=tmp_path / "task.yaml")
    told = capsys.readouterr().out
    assert re.search(r"^next_word acc: \d\.\d+, original \d\.\d+$", told, re.MULTILINE)
    assert told.endswith(f"Next: vllm serve {names['OUTPUT']}\n")
    assert {one.samples for one in names["scores"]} == {len(rows)}


def weights_of_blocks(model: Any) -> list[torch.Tensor]:
    return [one for name, one in model.named_parameters() if name.endswith("_proj.weight")]


# --------------------------------------------------------------------- as they are read


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_whom_it_serves(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    told = ast.get_docstring(tree) or ""
    assert re.findall(r"^([A-Z][\w ]+): ", told.partition("\n\n")[2], re.MULTILINE) == SAID
    assert len(re.findall(r'^MODEL = "[\w-]+/[\w.-]+"$', text, re.MULTILINE)) == 1
    code = text.splitlines()[tree.body[0].end_lineno :]
    assert sum(map(bool, code)) <= 40
    assert ("DATASET" in text) is bool(re.search(r'^DATASET = "[\w/-]+"', text, re.MULTILINE))


def test_every_script_is_in_the_table_and_in_the_guide() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\|[^|]*\| \[`(\w+)\.py`\]\(\1\.py\) \|", table, re.M)) == SCRIPTS
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    assert sorted(set(re.findall(r"examples/(\w+)\.py\)", pages))) == SCRIPTS
