# SPDX-License-Identifier: Apache-2.0
"""Two more trained models, of other architectures: what is found on one may be its own.

    benchmarks/second.py [--steps 600] [--models second mixture]

Each has three layers, trained from random blocks on the text and with the tokens, embeddings
included, of the embedded model.  Written to ``benchmarks/.models``; a seed makes them the same
again on the same machine.

- ``second``: a Qwen3 (norms on queries and keys, heads wider than the hidden size divided by
  their number).
- ``mixture``: a Qwen3-MoE of eight experts in each layer, two for a token.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from pathlib import Path

from models import MODELS, PICO, TOKENIZER_FILES
from text import WINDOW, windows

STEPS, BATCH, RATE, WARMUP = 600, 8, 3e-3, 50
NAMES = ("second", "mixture")
EXPERTS = {
    "moe_intermediate_size": 320,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": True,
}


def untrained(name: str):
    """The model before its training, in float32."""
    import torch  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    embedded = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    own = embedded.config
    kind, config_kind, fields = (
        (Qwen3ForCausalLM, Qwen3Config, {})
        if name == "second"
        else (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS)
    )
    config = config_kind(
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=own.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        dtype=torch.bfloat16,
        **fields,
    )
    torch.manual_seed(0)
    model = kind(config).float()
    embeddings = embedded.get_input_embeddings().weight.data
    model.get_input_embeddings().weight.data.copy_(embeddings)
    return model


def trained(name: str, steps: int):
    """The model after so many steps of ``BATCH`` windows each; warm-up, then a cosine."""
    import torch  # noqa: PLC0415

    from llmcompressor.datasets.stdlib_text import calibration_texts  # noqa: PLC0415

    model = untrained(name).train()
    tokens = torch.tensor(windows(calibration_texts()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(step / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    began = time.perf_counter()
    for step in range(steps):
        rows = order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
        loss = model(tokens[rows], labels=tokens[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            seconds = time.perf_counter() - began
            print(f"{step + 1} of {steps}: {loss.item():.3f}, {seconds:.0f} s", flush=True)
    return model


def second(name: str = "second", steps: int = STEPS) -> Path:
    """A trained model's folder, made if it is not there."""
    import torch  # noqa: PLC0415

    folder = MODELS / name
    if not folder.exists():
        model = trained(name, steps).to(torch.bfloat16)
        # What only its training asked for.
        if hasattr(model.config, "output_router_logits"):
            model.config.output_router_logits = False
        made = folder.with_name(f"{name}.partial")
        model.save_pretrained(made)
        for file in TOKENIZER_FILES:
            shutil.copy(PICO / file, made)
        made.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    given = parser.parse_args()
    MODELS.mkdir(exist_ok=True)
    tokens = given.steps * BATCH * WINDOW
    for name in given.models:
        print(f"{second(name, given.steps)}: trained on {tokens} tokens")


if __name__ == "__main__":
    main()
