# SPDX-License-Identifier: Apache-2.0
"""Llama checkpoints with random weights, and random token ids to calibrate them with.

Everything is derived from a seed, so that every tool measured reads the same bytes: the same
weights, the same token ids, in the same order.  Random weights say nothing about language, but
time and memory do not depend on their values.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICO = ROOT / "src" / "llmcompressor" / "data" / "pico-stdlib"
MODELS = ROOT / "benchmarks" / ".models"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
HEAD_DIM = 64


@dataclass(frozen=True)
class ModelSize:
    """Shape of one benchmark model and of its calibration data.

    Attributes:
        name: What the tables call it.
        hidden: Width of the residual stream.
        intermediate: Width of the MLP.
        layers: Number of decoder layers.
        key_value_heads: Number of key-value heads, of 64 values each.
        vocabulary: Number of tokens; input and output embeddings are tied.
        samples: Calibration sequences.
        length: Tokens per sequence.
        held_out: Sequences to measure the quality on.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    key_value_heads: int
    vocabulary: int
    samples: int
    length: int
    held_out: int = 8

    def linears(self) -> list[tuple[str, int, int]]:
        """The Linears of one layer as (input they share, input width, output width)."""
        key_value = self.key_value_heads * HEAD_DIM
        return [
            ("attention", self.hidden, self.hidden),
            ("attention", self.hidden, key_value),
            ("attention", self.hidden, key_value),
            ("output", self.hidden, self.hidden),
            ("mlp", self.hidden, self.intermediate),
            ("mlp", self.hidden, self.intermediate),
            ("down", self.intermediate, self.hidden),
        ]

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        in_layer = sum(columns * rows for _, columns, rows in self.linears()) + 2 * self.hidden
        return self.layers * in_layer + self.vocabulary * self.hidden + self.hidden


SIZES = {
    size.name: size
    for size in (
        ModelSize("32M", 512, 1408, 8, 4, 16384, samples=32, length=256),
        ModelSize("386M", 1024, 3072, 28, 8, 32768, samples=16, length=512, held_out=2),
    )
}


def model_path(size: ModelSize) -> Path:
    """Folder of the checkpoint, which is built on the first call."""
    path = MODELS / size.name
    stamp = path / "benchmark.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != asdict(size):
        shutil.rmtree(path, ignore_errors=True)
        _build(size, path)
        stamp.write_text(json.dumps(asdict(size)))
    return path


def token_file(size: ModelSize, part: str) -> Path:
    """JSON file with token ids: a list of lists of integers.

    Args:
        size: The model the ids are for.
        part: ``"calibration"`` or ``"held-out"``.
    """
    import torch  # noqa: PLC0415

    samples = size.samples if part == "calibration" else size.held_out
    generator = torch.Generator().manual_seed(1 if part == "calibration" else 2)
    ids = torch.randint(3, size.vocabulary, (samples, size.length), generator=generator)
    path = MODELS / f"{size.name}-{part}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(ids.tolist()))
    return path


def _build(size: ModelSize, path: Path) -> None:
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // HEAD_DIM,
        num_key_value_heads=size.key_value_heads,
        head_dim=HEAD_DIM,
        vocab_size=size.vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(_weight(name, parameter.shape, size.layers, generator))
    model.save_pretrained(path)
    for name in TOKENIZER_FILES:
        shutil.copy(PICO / name, path)


def _weight(name, shape, layers: int, generator):
    """Random weights which keep the activations of every depth near one.

    Norm weights vary by channel, as those of trained models do; otherwise all columns of a
    Linear would matter alike, and an error-correcting method could show nothing.
    """
    import torch  # noqa: PLC0415

    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return torch.exp(0.3 * noise)
    if "embed_tokens" in name:
        return noise * shape[1] ** -0.5
    into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
    return noise * shape[1] ** -0.5 * ((2 * layers) ** -0.5 if into_stream else 1.0)
