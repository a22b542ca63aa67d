# SPDX-License-Identifier: Apache-2.0
"""transformers as the engine: what ``from_pretrained`` gives a user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import amplitude, chosen_ids, signs


def prepare(job: Mapping[str, Any]) -> dict[str, str]:
    """Import the engine; its version and those of what it computes with."""
    import transformers  # noqa: PLC0415  # the import is a stage of its own

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    try:
        import compressed_tensors  # noqa: PLC0415  # a dense model needs none

        versions["compressed-tensors"] = compressed_tensors.__version__
    except ImportError:
        pass
    return versions


def load(job: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The model, by the class that its configuration names, and what it has no values for."""
    import transformers  # noqa: PLC0415  # as above

    config = transformers.AutoConfig.from_pretrained(job["model"])
    named: Any = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    kind = transformers.AutoModelForCausalLM if named is None else named
    dtype = getattr(torch, job["dtype"])
    loaded: Any = kind.from_pretrained(job["model"], dtype=dtype, output_loading_info=True)
    model, told = loaded
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), sorted(told["missing_keys"])


@torch.no_grad()
def run(
    loaded: tuple[Any, list[str]], job: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Logits of the prompts, then outputs of modules: the first forward unpacks what is packed."""
    model, drawn = loaded
    device = next(model.parameters()).device
    found: dict[str, Tensor] = {}
    for number, ids in enumerate(job["prompts"]):
        given = torch.tensor([ids], device=device)
        found[f"logits/{number}"] = model(input_ids=given, use_cache=False).logits[0]
    used: dict[str, float] = {}
    silent: dict[str, str] = {}
    for name, module in model.named_modules() if job["rows"] else ():
        weight = getattr(module, "weight", None)
        try:
            if isinstance(module, torch.nn.Embedding) and weight is not None:
                ids = chosen_ids(name, job["rows"], module.num_embeddings).to(device)
                found[f"module/{name}"] = module(ids)
            elif isinstance(module, torch.nn.Linear) and weight is not None:
                used[name] = amplitude(name, module, job, [name])
                inputs = signs(name, job["rows"], module.in_features) * used[name]
                output = module(inputs.to(device, weight.dtype))
                if not isinstance(output, Tensor):  # a router that gives its choice too
                    raise TypeError(f"it gives a {type(output).__name__}")
                bias = module.bias
                found[f"module/{name}"] = output if bias is None else output.float() - bias.float()
        except Exception as error:  # positions of OPT are no ids: its class takes other arguments
            silent[name] = f"{type(error).__name__}: {error}"[:300]
    return found, {"amplitudes": used, "silent": silent, "drawn": drawn}
