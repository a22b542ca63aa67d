# SPDX-License-Identifier: Apache-2.0
"""The runs of ``freeze.py``: one job by its name, and digests of what it wrote.

As a script it does one thing in a process of its own:

    frozen_outputs.py killed NAME OUTPUT     a run with a modifier that may kill it
    frozen_outputs.py command ARGUMENT...    the command llmcompressor
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import frozen_models as models
from frozen_cases import (
    COMMANDS,
    NEEDS_DATA,
    OPTIONS,
    RECIPES,
    STAGES,
    TRAININGS,
    quantized,
    yaml,
)

NATIVE_VARIABLE = "FREEZE_NATIVE"
DIE_VARIABLE = "FREEZE_DIE_AT"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "COLUMNS": "80",
    "NO_COLOR": "1",
    "TERM": "dumb",
}
OLD_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Haswell",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""Instructions that processors of the last ten years have in common."""
_QUESTIONS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported")
REPORT = "compression_report.json"
TRAINING = "training"
"""The part of a report with figures of a training."""
VOLATILE = re.compile(r"second|time|date|version|memory|_at$", re.IGNORECASE)
"""Keys of a report that tell about the machine or the moment."""
_MEMORY = re.compile(r"\b[\d.,]+ ?([KMG]i?B|bytes)\b")
_PLACE = re.compile(r"(?:/[\w.+-]+)+/(?=models/|out/|[\w.-]+\.yaml)")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


# ------------------------------------------------------------------ the process


def settle(*, quiet: bool = True) -> None:
    """Make torch compute as an old processor would, and let nothing be printed."""
    import torch  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if quiet:
        from loguru import logger  # noqa: PLC0415

        logger.remove()
        logging.set_verbosity_error()
        os.environ["LLM_COMPRESSOR_LOG_DISABLED"] = "true"
    if not os.environ.get(NATIVE_VARIABLE):
        torch.backends.mkldnn.set_flags(False)
        for name in _QUESTIONS:
            if hasattr(torch.cpu, name):
                setattr(torch.cpu, name, lambda: False)


def plain(text: str) -> str:
    """A message without places, addresses and sizes of this machine's memory."""
    return _MEMORY.sub("SIZE", _ADDRESS.sub("0x", _PLACE.sub("", text)))


# ------------------------------------------------------------------ digests


def digest(folder: Path) -> dict[str, Any]:
    """Of every file below a folder: its hash; of reports what they tell."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not _is_of_the_moment(name):
            if path.name == REPORT:
                found[name] = _report(json.loads(path.read_text(encoding="utf-8")))
            elif path.name == "stages.json":
                found[name] = _hash(_stable(json.loads(path.read_text(encoding="utf-8"))))
            else:
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _is_of_the_moment(name: str) -> bool:
    """States of a trainer: they hold times, or the names of this machine."""
    parts = Path(name).parts
    return any(part.startswith("checkpoint-") for part in parts) or parts[-1] in (
        "training_args.bin",
        "trainer_state.json",
        "all_results.json",
        "train_results.json",
    )


def _report(content: Any) -> dict[str, Any]:
    """A hash of each part, but the figures of a training; in words what the verifier says."""
    found: dict[str, Any] = {}
    for part, value in _stable(content).items():
        if part == "verification":
            rules = Counter(
                f"{one['severity']} {one['rule']} {one['server']}: {len(one['modules'])} modules"
                for one in value.pop("findings", [])
            )
            found[part] = {**value, "findings": sorted(rules.elements())}
        else:
            found[part] = value if part == TRAINING else _hash(value)
    return found


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _stable(value: Any) -> Any:
    """Data without what tells of the machine or the moment."""
    if isinstance(value, dict):
        return {key: _stable(one) for key, one in value.items() if not VOLATILE.search(str(key))}
    if isinstance(value, list | tuple):
        return [_stable(one) for one in value]
    return plain(value) if isinstance(value, str) else value


# ------------------------------------------------------------------ jobs


def run_job(name: str, keep: str | None = None) -> dict[str, Any]:
    """Do the job of that name; what it wrote, or how it was refused."""
    output = Path("out", name)
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    parts = name.removeprefix("native/").split("/")
    try:
        found = _WAYS[parts[-2] if parts[0] not in ("killed", "command", "plan") else parts[0]](
            parts, output
        )
    except Exception as error:
        own = any(one.__module__.startswith("llmcompressor") for one in type(error).__mro__)
        found = {"refused" if own else "failed": plain(f"{type(error).__name__}: {error}")}
    else:
        found = {**found, **({"files": digest(output)} if output.is_dir() else {})}
    if keep and output.is_dir():
        shutil.copytree(output, Path(keep, name), dirs_exist_ok=True)
    shutil.rmtree(output, ignore_errors=True)
    _forget()
    return found


def _forget() -> None:
    from llmcompressor import reset_session  # noqa: PLC0415

    reset_session()


def _folder(name: str) -> str:
    return str(models.MODELS_FOLDER / name)


def _object(name: str) -> Any:
    """A loaded model, of whatever class its folder says."""
    import transformers  # noqa: PLC0415

    config = transformers.AutoConfig.from_pretrained(_folder(name))
    cls = getattr(transformers, config.architectures[0])
    return cls.from_pretrained(_folder(name), dtype="auto").eval()


def _call(recipe: str, *, data: bool | None = None) -> dict[str, Any]:
    """Arguments of ``oneshot`` for one of the recipes."""
    call: dict[str, Any] = {"recipe": yaml(RECIPES[recipe])}
    if recipe in NEEDS_DATA if data is None else data:
        call |= {"dataset": models.rows(), "max_seq_length": models.LENGTH}
        call |= {"num_calibration_samples": models.SAMPLES}
    return call


def _streamed(parts: list[str], output: Path) -> dict[str, Any]:
    from llmcompressor import oneshot  # noqa: PLC0415

    oneshot(model=_folder(parts[0]), output_dir=output, **_call(parts[-1]))
    return {}


def _in_memory(parts: list[str], output: Path) -> dict[str, Any]:
    from llmcompressor import oneshot  # noqa: PLC0415

    oneshot(model=_object(parts[0]), output_dir=output, **_call(parts[-1]))
    return {}


def _saved(parts: list[str], output: Path) -> dict[str, Any]:
    from llmcompressor import oneshot  # noqa: PLC0415

    model = oneshot(model=_object(parts[0]), **_call(parts[-1]))
    model.save_pretrained(output, max_shard_size="300KB")
    return {}


def _preset(parts: list[str], output: Path) -> dict[str, Any]:
    from llmcompressor import oneshot  # noqa: PLC0415

    call = {**_call("fp8-static"), "recipe": yaml([quantized(parts[-1])])}
    oneshot(model=_folder(parts[0]), output_dir=output, **call)
    return {}


def _option(parts: list[str], output: Path) -> dict[str, Any]:
    from llmcompressor import oneshot  # noqa: PLC0415

    more = dict(OPTIONS[parts[-1]])
    data = {"ragged": lambda: models.rows("ragged"), "text": models.texts}
    data["file"] = lambda: str(models.TEXTS)
    if "dataset" in more:
        more["dataset"] = data[more["dataset"]]()
    call = {**_call("gptq"), **more}
    if call.get("pipeline") == "datafree":
        call = {**_call("rtn"), **more}
    oneshot(model=_folder(parts[0]), output_dir=output, **call)
    return {}


def _model_free(parts: list[str], output: Path) -> dict[str, Any]:
    from llmcompressor import model_free_ptq  # noqa: PLC0415

    model_free_ptq(_folder(parts[0]), output, parts[-1], ignore=["lm_head", "re:.*gate$"])
    return {}


def _training(model: str, recipe: Any, output: Path, **more: Any) -> dict[str, Any]:
    from llmcompressor import train  # noqa: PLC0415

    if "Distillation" in str(recipe):
        more["distill_teacher"] = _folder(model)
    train(
        model=_folder(model),
        recipe=recipe,
        dataset=models.rows(),
        output_dir=output,
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        max_seq_length=models.LENGTH,
        use_cpu=True,
        report_to="none",
        **more,
    )
    return {}


def _train(parts: list[str], output: Path) -> dict[str, Any]:
    return _training(parts[0], yaml(TRAININGS[parts[-1]]), output)


def _stages(parts: list[str], output: Path) -> dict[str, Any]:
    from llmcompressor import run_stages  # noqa: PLC0415

    run_stages(
        _folder(parts[0]),
        STAGES[parts[-1]],
        dataset=models.rows(),
        output_dir=output,
        max_steps=3,
        per_device_train_batch_size=2,
        max_seq_length=models.LENGTH,
        num_calibration_samples=models.SAMPLES,
        use_cpu=True,
        report_to="none",
    )
    return {}


def _plan(parts: list[str], output: Path) -> dict[str, Any]:
    from llmcompressor import plan  # noqa: PLC0415

    found = plan(
        model=_folder(parts[1]), output_dir=output, measure=False, **_call(parts[2])
    ).as_dict()
    return {"plan": stable_plan(found)}


def stable_plan(found: dict[str, Any]) -> dict[str, Any]:
    """A plan without times and what depends on the free memory and on that of this process."""
    for one in found.get("passes", []):
        one.pop("budget", None)
    for one in found.get("phases", []):
        one.pop("host", None)
    found.get("peak", {}).pop("host", None)
    return _stable(found)


# ------------------------------------------------------------------ in processes of their own


def _command(parts: list[str], output: Path) -> dict[str, Any]:
    """The command: its code, and what it prints."""
    arguments = [str(output) if one == "OUTPUT" else one for one in COMMANDS[parts[1]]]
    done = _apart("command", *arguments)
    printed = done.stdout
    if "--json" in arguments and done.returncode in (0, 1):
        content = json.loads(printed)
        return {
            "code": done.returncode,
            "printed": stable_plan(content) if parts[1] == "plan" else _stable(content),
        }
    return {
        "code": done.returncode,
        "printed": plain(printed),
        "errors": plain(done.stderr) if done.returncode == 2 else "",
    }


def _killed(parts: list[str], output: Path) -> dict[str, Any]:
    """A run that is killed late, the same call again, and the same call without the kill."""
    whole = output.with_name(f"{output.name}-whole")
    for folder in (output, whole):
        shutil.rmtree(folder.with_name(f"{folder.name}.partial"), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    died = _apart("killed", parts[1], str(output), **{DIE_VARIABLE: "1"})
    found = {
        "killed": died.returncode == -signal.SIGKILL,
        "nothing under its name": not output.exists(),
    }
    for folder, more in ((output, {"FREEZE_RESUME": "must"}), (whole, {})):
        done = _apart("killed", parts[1], str(folder), **more)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
    files = [digest(one) for one in (output, whole)]
    for one in files:  # the mean loss is that of the steps since the kill
        one[REPORT].pop(TRAINING, None)
    found["same bytes as without the kill"] = files[0] == files[1]
    found["nothing left beside it"] = not output.with_name(f"{output.name}.partial").exists()
    shutil.rmtree(whole)
    return found


def _apart(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def _killers() -> dict[str, type]:
    """Modifiers that kill their process late in the run, if they are told to."""
    from llmcompressor.core import EventType  # noqa: PLC0415
    from llmcompressor.modifiers.pruning import MagnitudePruningModifier  # noqa: PLC0415
    from llmcompressor.modifiers.quantization import GPTQModifier  # noqa: PLC0415
    from llmcompressor.modifiers.transform import AWQModifier  # noqa: PLC0415

    def die() -> None:
        if os.environ.get(DIE_VARIABLE):
            time.sleep(2)  # what is finished is written by a thread
            os.kill(os.getpid(), signal.SIGKILL)

    def in_last_block(state: Any, modules: Any) -> bool:
        last = state.model.model.layers[-1]
        return any(one in set(last.modules()) for one in modules)

    class KilledGPTQ(GPTQModifier):
        def on_sequential_epoch_end(self, state, event, modules, **kwargs):
            if in_last_block(state, modules):
                die()
            super().on_sequential_epoch_end(state, event, modules, **kwargs)

    class KilledAWQ(AWQModifier):
        def on_sequential_epoch_end(self, state, event, modules, **kwargs):
            if in_last_block(state, modules):
                die()
            super().on_sequential_epoch_end(state, event, modules, **kwargs)

    class KilledPruning(MagnitudePruningModifier):
        def on_event(self, state, event, **kwargs):
            super().on_event(state, event, **kwargs)
            if event.type_ is EventType.BATCH_START and event.global_step == 3:
                die()

    return {"gptq": KilledGPTQ, "awq": KilledAWQ, "train": KilledPruning}


def _run_killed(name: str, output: Path) -> None:
    from llmcompressor import oneshot  # noqa: PLC0415

    killer = _killers()[name]
    resume = os.environ.get("FREEZE_RESUME", "auto")
    if name == "train":
        own = TRAININGS["pruned"][0].partition(":")[2]
        recipe = yaml([f"{killer.__name__}:{own}"])
        _training("dense", recipe, output, save_steps=1, resume=resume)
        return
    recipe = RECIPES[name]
    own = recipe[0].partition(":")[2]
    call = {**_call(name), "recipe": yaml([f"{killer.__name__}:{own}", *recipe[1:]])}
    oneshot(model=_folder("dense"), output_dir=output, resume=resume, **call)


_WAYS = {
    "streamed": _streamed,
    "in-memory": _in_memory,
    "saved": _saved,
    "preset": _preset,
    "option": _option,
    "model-free": _model_free,
    "train": _train,
    "stages": _stages,
    "plan": _plan,
    "command": _command,
    "killed": _killed,
}


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "command":
        sys.path.pop(0)  # this folder
        settle(quiet=False)
        sys.argv = ["llmcompressor", *arguments]
        runpy.run_module("llmcompressor", run_name="__main__")
    else:
        settle()
        _run_killed(arguments[0], Path(arguments[1]))


if __name__ == "__main__":
    main()
