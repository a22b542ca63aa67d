# SPDX-License-Identifier: Apache-2.0
"""vLLM as the engine, within this process.

Modules are those that vLLM has joined, renamed and loaded itself; they are called by the method
that its forward calls. The logits are taken where vLLM computes them: to ask it for the
log-probabilities of a whole vocabulary takes minutes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import amplitude, chosen_ids, signs

_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_SHARE = 0.9
"""Share of the device's free memory that vLLM may take."""

_ROUNDING = ("use_w4a8", "_zentorch_da8w4")
"""Attributes of modules of 4-bit integers whose kernel on a CPU rounds inputs to 8 bits."""


def prepare(job: Mapping[str, Any]) -> dict[str, str]:
    """Import the engine; its version and those of what it computes with."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import vllm  # noqa: PLC0415  # it reads the environment when it is imported

    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    if job.get("stand_ins"):
        from .stand_ins import install  # noqa: PLC0415  # it changes vLLM

        install()
    return versions


def load(job: Mapping[str, Any]) -> Any:
    """The model, with all that vLLM decides by itself left to it."""
    from vllm import LLM  # noqa: PLC0415  # as above

    further: dict[str, Any] = {}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        further["gpu_memory_utilization"] = _SHARE * free / total
    return LLM(
        model=job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=max(map(len, job["prompts"])) + 8,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        seed=0,
        **further,
    )


def run(model: Any, job: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Logits of the prompts, then outputs of the modules."""
    found = _logits(model, job["prompts"])
    if not job["rows"]:
        return found, {"amplitudes": {}}
    outputs, facts = model.apply_model(lambda one: _modules(one, job))[0]
    return found | outputs, facts


def _logits(model: Any, prompts: list[list[int]]) -> dict[str, Tensor]:
    """The logits of each prompt but of its last token, as ``compute_logits`` gives them."""
    from vllm import SamplingParams  # noqa: PLC0415  # as above

    seen: list[Tensor] = []

    def watch(inner: Any) -> None:
        compute = inner.compute_logits

        def watched(*given: Any, **named: Any) -> Any:
            logits = compute(*given, **named)
            if isinstance(logits, Tensor):
                seen.append(logits.detach().float().cpu().clone())
            return logits

        inner.compute_logits = watched

    model.apply_model(watch)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    found: dict[str, Tensor] = {}
    for number, ids in enumerate(prompts):
        seen.clear()
        model.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
        logits = next((one for one in seen if len(one) in (len(ids) - 1, len(ids))), None)
        if logits is None:
            raise RuntimeError(f"vLLM computed no logits of {len(ids)} tokens of a prompt")
        found[f"logits/{number}"] = logits[: len(ids) - 1]
    return found


@torch.no_grad()
def _modules(model: Any, job: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Outputs of Linears, heads and embeddings without their biases; why some gave none."""
    from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415  # as above
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: PLC0415  # as above
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    joined: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    device, dtype = next(model.parameters()).device, getattr(torch, job["dtype"])
    found: dict[str, Tensor] = {}
    used: dict[str, float] = {}
    silent: dict[str, str] = {}
    rounded: list[str] = []
    for name, module in model.named_modules():
        is_table = isinstance(module, VocabParallelEmbedding)
        is_head = isinstance(module, ParallelLMHead)
        if not (isinstance(module, LinearBase) or is_table):
            continue
        try:
            if is_table and not is_head:
                ids = chosen_ids(name, job["rows"], module.org_vocab_size).to(device)
                output = module.quant_method.embedding(module, ids)
            else:
                parent, _, last = name.rpartition(".")
                shards = [f"{parent}.{one}" for one in joined.get(last, [last])]
                used[name] = amplitude(name, module, job, shards)
                if is_head:
                    width = module.embedding_dim
                else:
                    width = getattr(module, "input_size_per_partition", module.input_size)
                inputs = (signs(name, job["rows"], width) * used[name]).to(device, dtype)
                output = module.quant_method.apply(module, inputs)
                output = output[:, : module.org_vocab_size] if is_head else output
            found[f"module/{name}"] = output.float().cpu().clone()
            if any(getattr(module, one, False) for one in _ROUNDING):
                rounded.append(name)
        except Exception as error:  # vLLM calls some modules in other ways, or not at all
            silent[name] = f"{type(error).__name__}: {error}"[:300]
    return found, {"amplitudes": used, "silent": silent, "rounded": rounded}
