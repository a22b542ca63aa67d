# SPDX-License-Identifier: Apache-2.0
"""Text generation by checkpoints that are loaded with transformers alone.

Run as a file in a process of its own, ``python -I reader.py``, so that nothing of this package
is imported: what it prints is what any user of transformers gets.

Standard input: ``{"prompt": text, "tokens": number, "checkpoints": {name: folder}}`` as JSON.
Standard output: ``{name: text}`` as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def generate_text(folder: str, prompt: str, tokens: int) -> str:
    """The greedy continuation of ``prompt`` by the model in ``folder``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    inputs: Any = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def main() -> None:
    """Answer the request on standard input, and check that this package was not imported."""
    request = json.load(sys.stdin)
    answer = {
        name: generate_text(folder, request["prompt"], request["tokens"])
        for name, folder in request["checkpoints"].items()
    }
    if "llmcompressor" in sys.modules:
        raise RuntimeError("The checkpoints were not read by transformers alone.")
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
