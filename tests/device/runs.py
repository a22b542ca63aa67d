# SPDX-License-Identifier: Apache-2.0
"""Runs on the pretended device, each in a process of its own.

``python -m tests.device.runs LIBRARY FOLDER NAME ARGUMENTS`` prints what the function of that name
returns, as JSON in the last line.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.device.pretended import Device, pretend
from tests.device.recipes import RECIPES, TRAININGS

TOKENS, VOCABULARY = 64, 512
MIB = 2**20


class Runs:
    """What can be asked for, by name.

    Args:
        device: that this process has.
        folder: for models and outputs.
    """

    def __init__(self, device: Device, folder: Path) -> None:
        self._device = device
        self._folder = folder

    def itself(self) -> dict[str, Any]:
        """What the device refuses, and what it counts."""
        import torch

        there = torch.ones(4, 4, device="cuda")
        before, whole = self._device.in_use, torch.cuda.mem_get_info()
        refused = []
        for work in (
            lambda: there @ torch.ones(4, 4),
            lambda: there + torch.ones(4),
            there.numpy,
            lambda: there.int() @ there.int(),
            lambda: torch.empty(whole[1], device="cuda"),
        ):
            try:
                work()
            except (RuntimeError, TypeError) as error:
                refused.append(type(error).__name__)
        self._device.reset_peak()
        kept = torch.empty(1000, device="cuda")
        return {
            "refused": refused,
            "taken": bool((there + torch.tensor(1.0) == 2).all()),
            "counted": self._device.in_use - before,
            "size": kept.nbytes,
            "free": whole[0] - torch.cuda.mem_get_info()[0],
            "scores": self._peak(self._attend),
        }

    @staticmethod
    def _attend() -> None:
        """Grouped heads, causal, without a mask: 4 * 256 * 256 scores of 4 bytes are 1 MiB."""
        import torch

        query = torch.ones(1, 4, 256, 8, device="cuda", dtype=torch.bfloat16)
        key = torch.ones(1, 2, 256, 8, device="cuda", dtype=torch.bfloat16)
        torch.nn.functional.scaled_dot_product_attention(
            query, key, key, is_causal=True, enable_gqa=True
        )

    def compress(self, names: list[str]) -> dict[str, str]:
        """Recipes on a model on the device, whose output is read again; devices of the weights."""
        return {name: self._compress(name, name, device="cuda") for name in names}

    def same_bytes(self, names: list[str]) -> dict[str, bool]:
        """Whether what is written is the same wherever it was computed."""
        found = {}
        for name in names:
            written = []
            for device in ("cuda", "cpu"):
                self._compress(name, f"{name}-{device}", device=device)
                files = sorted((self._folder / f"{name}-{device}").glob("*.safetensors"))
                written.append([file.read_bytes() for file in files])
            found[name] = written[0] == written[1]
        return found

    def peaks(self, names: list[str], depths: list[int]) -> dict[str, list[int]]:
        """The most bytes on the device, for models of several depths."""
        found: dict[str, list[int]] = {name: [] for name in names}
        for name in names:
            call = self._call(name, self._rows(8, TOKENS), TOKENS)
            for depth in depths:
                model = self._model(RECIPES[name].kind, depth)
                peak = self._peak(lambda: self._run(model, f"{name}-{depth}", call))  # noqa: B023
                found[name].append(peak)
        return found

    def planned(
        self,
        names: list[str],
        hidden: int,
        length: int,
        samples: int = 16,
        limit: int | None = None,
    ) -> dict[str, list[float]]:
        """Planned and measured MiB, for models of so many columns, under a limit of the device."""
        from llmcompressor import plan

        found = {}
        for name in names:
            model = self._model(RECIPES[name].kind, 4, hidden)
            call = self._call(name, self._rows(samples, length), length)
            if limit is not None:
                call["max_memory"] = {0: limit * MIB}
            peak = plan(model=model, device="cuda", measure=False, **call).peak_device
            measured = self._peak(lambda: self._run(model, name, call))  # noqa: B023
            found[name] = [peak / MIB, measured / MIB]
        return found

    def object(self, names: list[str]) -> dict[str, str]:
        """A model that lies on the device already."""
        from transformers import AutoModelForCausalLM

        found = {}
        for name in names:
            model = AutoModelForCausalLM.from_pretrained(self._model(RECIPES[name].kind))
            model = self._oneshot(name, f"{name}-object", model=model.to("cuda"))
            found[name] = _devices(model)
        return found

    def dispatched(self, names: list[str], kind: str) -> dict[str, Any]:
        """A model on two devices, or with a block that is offloaded to main memory.

        Returns:
            By recipe, where each block's weights are in the end.
        """
        import torch
        from accelerate import dispatch_model
        from accelerate.hooks import attach_align_device_hook_on_blocks
        from transformers import AutoModelForCausalLM

        parts = ["model.embed_tokens", "model.rotary_emb", "model.layers.0"]
        ends = ["model.layers.1", "model.norm", "lm_head"]
        found = {}
        for name in names:
            model = AutoModelForCausalLM.from_pretrained(self._model(RECIPES[name].kind))
            if kind == "offloaded":
                places: Any = {**dict.fromkeys(parts + ends, 0), "model.layers.1": "cpu"}
                dispatch_model(model, places, main_device=0)
            else:
                devices = {**dict.fromkeys(parts, "cuda:0"), **dict.fromkeys(ends, "cpu")}
                attach_align_device_hook_on_blocks(
                    model, {"": "cuda:0", **devices}, offload=dict.fromkeys(devices, False)
                )
            done = self._oneshot(name, f"{name}-{kind}", model=model)
            place = torch.arange(3, 19, device="cuda").unsqueeze(0)
            with torch.no_grad():
                logits = done(place).logits
                read = AutoModelForCausalLM.from_pretrained(self._folder / f"{name}-{kind}")
                expected = read.to("cuda")(place).logits
            distance = (
                logits - expected.to(logits.device)
            ).float().norm() / expected.float().norm()
            layers = [
                sorted({str(one.device) for one in layer.parameters()})
                for layer in done.model.layers
            ]
            found[name] = [layers, float(distance)]
        return found

    def held(self) -> dict[str, Any]:
        """Where models go while an allocator holds nearly all of the device for nobody."""
        import torch

        from llmcompressor.modeling.offload import device_activation_budget

        found: dict[str, Any] = {"free": device_activation_budget(torch.device("cuda", 0))}
        self._device.held = self._device.left - 2**16
        found["free, held"] = device_activation_budget(torch.device("cuda", 0))
        found["folder"] = _devices(self._oneshot("rtn", "held", model=self._model("llama")))
        found["kept"] = self._device.held
        self._device.held = self._device.left - 2**16
        model = self._model("llama")
        found["whole"] = _devices(self._oneshot("gptq", "whole", model=model, pipeline="basic"))
        return found

    def bounded(self, name: str, limits: list[int | None], samples: int = 64) -> list[Any]:
        """Under each limit the planned and the measured peak, or what was said and what is left."""
        from llmcompressor import plan
        from llmcompressor.errors import ArgumentError

        model = self._model("llama", 4)
        call = self._call(name, self._rows(samples, 256), 256)
        found: list[Any] = []
        for number, limit in enumerate(limits):
            own = call if limit is None else call | {"max_memory": {0: limit}}
            output = f"{name}-{number}-{samples}"
            try:
                peak = plan(model=model, device="cuda", measure=False, **own).peak_device
                found.append([peak, self._peak(lambda: self._run(model, output, own))])  # noqa: B023
            except ArgumentError as error:
                left = [one.name for one in self._folder.glob(f"*{output}*")]
                found.append([str(error), left])
        written = [self._folder / f"planned-{name}-{one}-{samples}" for one in (0, 1)]
        weights = [(folder / "model.safetensors").read_bytes() for folder in written]
        return [*found, weights[0] == weights[1]]

    def killed(self, name: str) -> dict[str, Any]:
        """A run that is broken off behind its first block, and continued."""
        from llmcompressor.checkpoint.journal import Journal

        add = Journal.add

        def break_off(self: Any, entry: Any) -> None:
            add(self, entry)
            raise KeyboardInterrupt

        Journal.add = break_off  # type: ignore[method-assign]
        with contextlib.suppress(KeyboardInterrupt):
            self._compress(name, "killed")
        Journal.add = add  # type: ignore[method-assign]
        partial = (self._folder / "killed.partial").is_dir()
        self._compress(name, "killed")
        self._compress(name, "plain")
        files = [self._folder / one / "model.safetensors" for one in ("killed", "plain")]
        return {"partial": partial, "same": files[0].read_bytes() == files[1].read_bytes()}

    def train(self, names: list[str]) -> dict[str, str]:
        """Trainings of four steps."""
        return {name: _devices(self._train(TRAININGS[name], name)) for name in names}

    def train_resumed(self, name: str) -> dict[str, bool]:
        """A training that is broken off, and continued from its checkpoint."""
        from tests.support.breaking import Breaker

        recipe = TRAININGS[name] + "  Breaker: {}\n"
        Breaker.at = 2
        interrupted = False
        try:
            self._train(recipe, "broken", save_steps=1)
        except KeyboardInterrupt:
            interrupted = True
        Breaker.at = None
        for output in ("broken", "whole"):
            self._train(recipe, output, save_steps=1)
        files = [self._folder / one / "model.safetensors" for one in ("broken", "whole")]
        return {"interrupted": interrupted, "same": files[0].read_bytes() == files[1].read_bytes()}

    # ------------------------------------------------------------------ how

    def _compress(
        self, name: str, output: str, *, depth: int = 2, device: str = "cuda", **more: Any
    ) -> str:
        model = self._oneshot(
            name, output, model=self._model(RECIPES[name].kind, depth), device=device, **more
        )
        return _devices(model)

    def _run(self, model: str, name: str, call: dict[str, Any]) -> None:
        """A run whose model nobody asks for: it is not loaded again."""
        from llmcompressor import oneshot

        output = self._folder / f"planned-{name}"
        oneshot(model=model, device="cuda", output_dir=output, verify=False, **call)

    def _oneshot(self, name: str, output: str, **more: Any) -> Any:
        from llmcompressor import oneshot

        call = self._call(name, self._rows(8, TOKENS), TOKENS)
        return oneshot(output_dir=self._folder / output, **call, **more)

    @staticmethod
    def _call(name: str, rows: Any, length: int) -> dict[str, Any]:
        call: dict[str, Any] = {"recipe": f"modifiers:\n{RECIPES[name].text}"}
        if RECIPES[name].takes_data:
            call |= {"dataset": rows, "max_seq_length": length}
            call |= {"num_calibration_samples": len(rows)}
        return call

    def _train(self, recipe: str, output: str, **more: Any) -> Any:
        from llmcompressor import train

        teacher = {"distill_teacher": self._model("llama")} if "Distillation" in recipe else {}
        return train(
            model=self._model("llama"),
            recipe=f"modifiers:\n{recipe}",
            dataset=self._rows(8, TOKENS),
            output_dir=self._folder / output,
            max_steps=4,
            per_device_train_batch_size=2,
            max_seq_length=TOKENS,
            report_to="none",
            device="cuda",
            **teacher,
            **more,
        )

    def _peak(self, work: Callable[[], Any]) -> int:
        gc.collect()
        before = self._device.in_use
        self._device.reset_peak()
        work()
        return self._device.peak - before

    @staticmethod
    def _rows(samples: int, length: int) -> Any:
        import torch
        from datasets import Dataset

        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
        return Dataset.from_dict({"input_ids": ids.tolist()})

    def _model(self, kind: str, depth: int = 2, hidden: int = 128) -> str:
        folder = self._folder / f"{kind}-{depth}-{hidden}"
        if not folder.is_dir():
            _write_model(kind, depth, hidden, folder)
        return str(folder)


def _write_model(kind: str, depth: int, hidden: int, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 4 * hidden,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": depth,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "tie_word_embeddings": False,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = Qwen3MoeConfig(**sizes, **experts, head_dim=32) if kind == "moe" else None
    model = AutoModelForCausalLM.from_config(config or LlamaConfig(**sizes))
    model.to(torch.bfloat16).save_pretrained(folder)


def _devices(model: Any) -> str:
    """Where the weights are, after a forward on whatever device that is."""
    import torch

    place = next(model.parameters()).device
    with torch.no_grad():
        logits = model(torch.arange(3, 19, device=place).unsqueeze(0)).logits
    assert logits.isfinite().all()
    return ", ".join(sorted({str(one.device) for one in model.parameters()}))


def main(library: str, folder: str, name: str, arguments: str) -> None:
    device = pretend(Path(library))
    warnings.simplefilter("ignore")
    from loguru import logger

    logger.remove()
    found = getattr(Runs(device, Path(folder)), name)(**json.loads(arguments))
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
