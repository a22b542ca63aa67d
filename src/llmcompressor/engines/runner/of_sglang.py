# SPDX-License-Identifier: Apache-2.0
"""SGLang as the engine: the likeliest tokens of each prompt, through its own interface.

It keeps the model in processes of its own, so that single modules are not called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_TOP = 32


def prepare(job: Mapping[str, Any]) -> dict[str, str]:
    """Import the engine; its version and that of torch."""
    import sglang  # noqa: PLC0415  # the import is a stage of its own

    return {"sglang": sglang.__version__, "torch": torch.__version__}


def load(job: Mapping[str, Any]) -> Any:
    """The model, with all that SGLang decides by itself left to it."""
    import sglang  # noqa: PLC0415  # as above

    return sglang.Engine(
        model_path=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        random_seed=0,
    )


def run(model: Any, job: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Log-probabilities of the likeliest tokens; those of others are minus infinity."""
    found: dict[str, Tensor] = {}
    for number, ids in enumerate(job["prompts"]):
        told = model.generate(
            input_ids=ids,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=_TOP,
        )
        rows = [row for row in told["meta_info"]["input_top_logprobs"] if row]
        if len(rows) != len(ids) - 1:
            raise RuntimeError(
                f"SGLang gave log-probabilities of {len(rows)} tokens for a prompt of {len(ids)}"
            )
        wide = torch.full((len(rows), job["vocabulary"]), -torch.inf)
        for place, row in enumerate(rows):
            for value, token, *_ in row:
                wide[place, token] = value
        found[f"logits/{number}"] = wide
    model.shutdown()
    return found, {"amplitudes": {}}
