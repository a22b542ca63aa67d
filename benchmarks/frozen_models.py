# SPDX-License-Identifier: Apache-2.0
"""Small models, a tokenizer and data for ``freeze.py``, the same on every machine.

Weights are drawn by numpy, each from its name: neither torch's generators nor the order in which
transformers initializes decide them.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from frozen_cases import MODELS, RECIPES, SIZES, VOCABULARY, yaml

LENGTH = 24
SAMPLES = 12
MODELS_FOLDER = Path("models")
TEXTS = Path("texts.jsonl")


def build(name: str) -> None:
    """Write a model and its tokenizer to ``models/NAME``, in several files."""
    import torch  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    kind, changes = MODELS[name]
    given = dict(changes) if "text_config" in changes else {**SIZES, **changes}
    config = AutoConfig.for_model(kind, **given)
    maker = AutoModelForImageTextToText if "text_config" in changes else AutoModelForCausalLM
    model = maker.from_config(config).to(torch.bfloat16)
    for key, parameter in model.named_parameters():
        parameter.data.copy_(torch.from_numpy(_weight(key, tuple(parameter.shape))))
    folder = MODELS_FOLDER / name
    model.save_pretrained(folder, max_shard_size="400KB")
    _tokenizer().save_pretrained(folder)


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms about one, and a few channels of the embeddings far larger than the others."""
    noise = _generator(name).standard_normal(shape).astype(np.float32)
    if "norm" in name or ".ln_" in name:
        return np.exp(0.3 * noise) if name.endswith("weight") else 0.02 * noise
    if name.endswith("bias"):
        return 0.02 * noise
    if "embed" in name or ".wte" in name:
        noise[..., ::31] *= 6
    return 0.1 * noise


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def _tokenizer() -> Any:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{one}" for one in range(4, VOCABULARY))]
    inner = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=64,
    )
    made.chat_template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    return made


def token_lists(kind: str = "tokens") -> list[list[int]]:
    """Random token ids: ``tokens`` of one length, ``ragged`` of many."""
    random = _generator(kind)
    lengths = [LENGTH - (at if kind == "ragged" else 0) for at in range(SAMPLES)]
    return [random.integers(4, VOCABULARY - 1, length).tolist() for length in lengths]


def texts() -> list[str]:
    """The same as words."""
    return [" ".join(f"w{one}" for one in row) for row in token_lists("texts")]


def rows(kind: str = "tokens") -> Any:
    """Data that is tokenized already."""
    from datasets import Dataset  # noqa: PLC0415

    return Dataset.from_dict({"input_ids": token_lists(kind)})


def write_side_files() -> None:
    """What the commands are given, in the present folder."""
    lines = [json.dumps({"text": text}) for text in texts()]
    TEXTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    Path("gptq.yaml").write_text(yaml(RECIPES["gptq"]), encoding="utf-8")
