# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in an engine: good ones pass, planted faults are told, refusals are told as such."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from tests.support.checkpoint_samples import Sample
from tests.support.in_process import HERE, answer, run_here
from tests.support.small_architectures import build

from llmcompressor import oneshot, reset_session, verify
from llmcompressor.engines import check
from llmcompressor.engines.check import Engine, verify_with
from llmcompressor.engines.compare import tolerance_of
from llmcompressor.engines.overruled import UNSEEN
from llmcompressor.engines.process import Answer
from llmcompressor.engines.runner import of_transformers
from llmcompressor.entrypoints.verify import verify_written
from llmcompressor.errors import ArgumentError, CheckpointError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import SpinQuantModifier
from llmcompressor.verification.catalogue import RULES
from llmcompressor.verification.check import verify_files
from llmcompressor.verification.facts import Deployment, Finding, Severity
from llmcompressor.verification.report import VerificationReport

Good = Callable[[str], Sample]
ATTENTION = "model.layers.1.self_attn"


def rules(report: VerificationReport) -> list[str]:
    return [one.rule for one in report.findings if one.rule.startswith("E")]


def tried(folder: Path, engine: Engine = HERE, **named: Any) -> VerificationReport:
    return verify_with(verify_files(folder, **named), engine)


@pytest.mark.parametrize(
    "base", ["W4A16", "W4A16_ASYM", "W8A8", "W8A8-static", "FP8", "FP8_BLOCK", "cache", "head"]
)
def test_good_ones_pass(
    base: str, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    report = tried(good(base).write(tmp_path / "model"))
    assert not rules(report)
    assert report.engine is not None
    assert report.verdict == "good"
    assert report.engine.modules == 2 * 7 + 2
    assert report.engine.error < 2.0**-6
    assert report.engine.decoded is not None
    assert report.engine.decoded.kl < 0.001
    assert any("modules beside their decoded weights" in line for line in report.figures())


def _exchange(sample: Sample, first: str, second: str) -> None:
    """Exchange what two modules hold."""
    ours, theirs = sample.own(f"{ATTENTION}.{first}"), sample.own(f"{ATTENTION}.{second}")
    for name in ours:
        sample.tensors[f"{ATTENTION}.{first}.{name}"] = theirs[name]
        sample.tensors[f"{ATTENTION}.{second}.{name}"] = ours[name]


def _rows(sample: Sample) -> None:
    packed = sample.tensors[f"{ATTENTION}.o_proj.weight_packed"]
    packed[[3, 4]] = packed[[4, 3]]


def _scale(sample: Sample) -> None:
    sample.tensors[f"{ATTENTION}.o_proj.weight_scale"][5] *= 2


def _rotated(sample: Sample) -> None:
    packed = sample.tensors[f"{ATTENTION}.v_proj.weight_packed"]
    sample.tensors[f"{ATTENTION}.v_proj.weight_packed"] = packed.roll(8, dims=0)


FAULTS: dict[str, Callable[[Sample], None]] = {
    "two rows": _rows,
    "a scale": _scale,
    "heads turned": _rotated,
    "q and k": lambda sample: _exchange(sample, "q_proj", "k_proj"),
    "k and v": lambda sample: _exchange(sample, "k_proj", "v_proj"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_way_into_the_engine(
    fault: str, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine reads is not what was decoded: it names the modules."""
    sample = good("W4A16")
    folder = sample.write(tmp_path / "model")
    FAULTS[fault](sample)
    run_here(monkeypatch, reads=sample.write(tmp_path / "spoilt"))
    report = tried(folder)
    wrong = {one.module for one in report.findings if one.rule == "E2"}
    assert wrong
    assert all(one.startswith(ATTENTION) for one in wrong)
    assert len(wrong) == (2 if " and " in fault else 1)
    assert report.verdict == "NOT good"


def test_a_rotation_that_an_engine_leaves_out(
    source: Path, compressed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoded model has it in its weights, and computes what the original does."""
    recipe = [
        SpinQuantModifier(rotations=["R1", "R2", "R4"]),
        QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"]),
    ]
    folder = compressed(source, recipe, verify=False)
    run_here(monkeypatch)
    report = tried(folder, reference=source)
    wrong = {one.module.rpartition(".")[2] for one in report.findings if one.rule == "E2"}
    assert wrong == {"down_proj"}
    assert report.engine is not None
    assert report.engine.decoded_original is not None
    assert report.engine.decoded_original.kl < 0.001


def test_distances_from_the_original(
    good: Good, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    report = tried(good("W8A8").write(tmp_path / "model"), reference=source)
    assert report.engine is not None
    ours, theirs = report.engine.original, report.engine.decoded_original
    assert ours is not None
    assert theirs is not None
    assert 0 < ours.kl < 0.01
    assert 0 < theirs.kl < 0.01
    assert not rules(report)


def test_another_model_than_the_original(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    model = small.llama(seed=3, num_key_value_heads=4)
    model.lm_head.weight.data *= 40  # its distributions are no longer flat
    model.save_pretrained(tmp_path / "other")
    report = tried(good("W4A16").write(tmp_path / "model"), reference=tmp_path / "other")
    assert "E8" in rules(report)


def test_a_refusal_stands_beside_the_rules(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    sample = good("W4A16")
    sample.group["weights"]["strategy"] = "nonsense"
    report = tried(sample.write(tmp_path / "model"))
    [refused] = [one for one in report.findings if one.rule == "E1"]
    assert "nonsense" in refused.message
    assert "So do its rules (" in refused.message
    assert report.engine is not None
    assert report.engine.status == "refused"


@pytest.mark.parametrize("server", [None, "vllm"])
def test_a_refusal_that_a_rule_warns_of(
    server: str | None, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one server alone refuses is a warning if none is named; other devices are no reason."""
    sample = good("W4A16")
    sample.group["input_activations"] = {
        **{"num_bits": 8, "type": "float", "strategy": "token"},
        **{"dynamic": True, "symmetric": True},
    }

    def run_job(job: Any, folder: Path, *_: Any) -> Answer:
        return Answer("loading", "NotImplementedError: No scheme") if job["rows"] else answer(job)

    monkeypatch.setattr(check, "run_job", run_job)
    folder = sample.write(tmp_path / "model")
    report = tried(folder, Engine("vllm", "python"), deployment=Deployment(server))
    [refused] = [one for one in report.findings if one.rule == "E1"]
    assert refused.message.endswith("So do its rules (S48).")
    assert "Do what those rules say" in refused.remedy
    assert len({one.rule for one in report.findings if one.server == "vllm"}) > 2  # S39 too


@pytest.mark.parametrize("stage", ["loading", "running"])
@pytest.mark.parametrize("name", ["original", "decoded", ""])
def test_a_refusal_of_the_model_as_such(
    stage: str,
    name: str,
    good: Good,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another model in full weights is refused too: the codes are not the reason."""
    refused = {"job-quantized", f"job-{name}"}
    said = Answer(stage, "ValueError: Layer 0 has no attention")

    def run_job(job: Any, folder: Path, *_: Any) -> Answer:
        return said if folder.name in refused else answer(job)

    monkeypatch.setattr(check, "run_job", run_job)
    reference = source if name == "original" else None
    report = tried(good("W4A16").write(tmp_path / "model"), reference=reference)
    [told] = [one for one in report.findings if one.rule.startswith("E")]
    assert told.rule == ("E1" if stage == "loading" else "E5")
    assert ("its codes are not the reason" in told.message) == bool(name)
    assert ("No rule of verify has told it" in told.message) == (not name and stage == "loading")
    assert report.verdict == "NOT good"
    assert report.engine is not None
    assert report.engine.alike == name


def test_a_failure_after_the_load(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "run_job", lambda *_: Answer("running", "RuntimeError: no kernel"))
    report = tried(good("W4A16").write(tmp_path / "model"))
    [failed] = [one for one in report.findings if one.rule.startswith("E")]
    assert failed.rule == "E5"
    assert report.engine is not None
    assert report.engine.status == "failed"


ENDED = {
    "late": (Answer("loading", "it was not done after 5 seconds", is_late=True), "--timeout"),
    "killed": (Answer("loading", "its process was killed by signal 9", signal=9), "memory"),
    "importing": (Answer("importing", "its process was killed by signal 9", signal=9), "memory"),
    "terminated": (Answer("running", "its process was killed by signal 15", signal=15), "memory"),
    "late, running": (Answer("running", "it was not done", is_late=True), "--verify-timeout"),
}


@pytest.mark.parametrize("kind", ENDED)
def test_an_engine_that_is_ended_says_nothing(
    kind: str,
    good: Good,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: list[tuple[str, str]],
) -> None:
    """It has refused nothing, and is not asked once more."""
    ended, remedy = ENDED[kind]
    asked = []
    monkeypatch.setattr(check, "run_job", lambda *_: asked.append(1) or ended)
    folder = good("W4A16").write(tmp_path / "model")
    report = tried(folder, Engine("vllm", "python"))
    [told] = [one for one in report.findings if one.rule.startswith("E")]
    assert told.rule == "E10"
    assert ended.error in told.message
    assert "says nothing of the checkpoint" in told.message
    assert remedy in told.remedy
    assert report.verdict == "not run"
    assert len(asked) == 1
    verify_written(folder, engine=HERE)  # a run is not lost by it, and says so
    assert any(level == "WARNING" and ended.error in text for level, text in log)


CRASH = Answer("loading", "its process was killed by signal 4 (SIGILL)", signal=4)


@pytest.mark.parametrize(
    ("dies", "rule", "verdict"),
    [({"quantized", "decoded"}, "E10", "not run"), ({"quantized"}, "E5", "NOT good")],
)
def test_an_engine_that_crashes(
    dies: set[str],
    rule: str,
    verdict: str,
    good: Good,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decoded model tells whether the codes are the reason."""

    def run_job(job: Any, folder: Path, *_: Any) -> Answer:
        return CRASH if folder.name.removeprefix("job-") in dies else answer(job)

    monkeypatch.setattr(check, "run_job", run_job)
    report = tried(good("W4A16").write(tmp_path / "model"))
    assert rules(report) == [rule]
    assert report.verdict == verdict
    assert "SIGILL" in str(report)


def test_a_decoded_model_that_is_killed(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = Answer("loading", "its process was killed by signal 9", signal=9)

    def run_job(job: Any, folder: Path, *_: Any) -> Answer:
        return killed if folder.name == "job-decoded" else answer(job)

    monkeypatch.setattr(check, "run_job", run_job)
    report = tried(good("W4A16").write(tmp_path / "model"))
    [told] = [one for one in report.findings if one.rule.startswith("E")]
    assert (told.rule, report.verdict) == ("E7", "run, not compared")
    assert "memory" in told.remedy


def test_a_load_with_stand_ins_that_is_killed(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That there is no kernel is no refusal, as long as nothing else was loaded."""

    def run_job(job: Any, folder: Path, *_: Any) -> Answer:
        killed = Answer("loading", "its process was killed by signal 9", signal=9)
        return killed if job.get("stand_ins") else LACKING[0]

    monkeypatch.setattr(check, "run_job", run_job)
    report = tried(good("W4A16").write(tmp_path / "model"), Engine("vllm", "python"))
    assert (rules(report), report.verdict) == (["E10"], "not run")


def test_too_little_time_to_import_an_engine(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Answer("importing", "it was not done after 1 seconds", is_late=True)
    monkeypatch.setattr(check, "run_job", lambda *_: late)
    with pytest.raises(ArgumentError, match="--timeout"):
        tried(good("W4A16").write(tmp_path / "model"))


def test_nan_is_told(good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = good("W4A16")
    folder = sample.write(tmp_path / "model")
    sample.tensors["model.norm.weight"][0] = torch.nan
    run_here(monkeypatch, reads=sample.write(tmp_path / "spoilt"))
    assert "E5" in rules(tried(folder))


LACKING = [
    Answer("loading", "ValueError: Failed to find a kernel"),
    Answer("running", "AttributeError: 'HadamardTransform' object has no attribute 'cpu_linear'"),
    Answer("running", "AttributeError: module 'triton' has no attribute 'next_power_of_2'"),
]


@pytest.mark.parametrize("lacking", LACKING)
def test_a_platform_without_a_kernel(
    lacking: Answer, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was loaded is compared; it is not called good."""

    def run_job(job: Any, folder: Path, *_: Any) -> Answer:
        return lacking if folder.name == "job-quantized" else answer(job)

    monkeypatch.setattr(check, "run_job", run_job)
    report = tried(good("W4A16").write(tmp_path / "model"), Engine("vllm", "python"))
    assert rules(report) == ["E4"]
    assert report.verdict == "loaded, not run"
    assert report.ok
    assert report.engine is not None
    assert report.engine.modules
    assert lacking.error in str(report)


def test_a_refusal_that_is_not_of_the_platform_alone(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the kernels that it lacks it is refused for another reason, which is told."""

    def run_job(job: Any, folder: Path, *_: Any) -> Answer:
        if folder.name == "job-decoded":
            return answer(job)
        return Answer("loading", "KeyError: 'up'") if job.get("stand_ins") else LACKING[0]

    monkeypatch.setattr(check, "run_job", run_job)
    report = tried(good("W4A16").write(tmp_path / "model"), Engine("vllm", "python"))
    [told] = [one for one in report.findings if one.rule.startswith("E")]
    assert told.rule == "E1"
    assert (
        "Failed to find a kernel. With products in place of its kernels: KeyError" in told.message
    )


def test_a_platform_that_does_not_even_load_it(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Answer("loading", "NotImplementedError: No WNA16 MoE backend supports it")
    monkeypatch.setattr(check, "run_job", lambda *_: said)
    report = tried(good("W4A16").write(tmp_path / "model"), Engine("vllm", "python"))
    assert rules(report) == ["E4"]
    assert report.verdict == "not run"


def test_what_cannot_be_decoded_is_run_and_not_compared(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    folder = good("W4A16").write(tmp_path / "model")
    monkeypatch.setattr("llmcompressor.engines.decoded.codes_of_entry", lambda *_: None)
    report = tried(folder)
    assert rules(report) == ["E7"]
    assert report.verdict == "run, not compared"


def test_damaged_files_are_a_finding(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    folder = good("W4A16").write(tmp_path / "model")
    shard = max(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    report = tried(folder)
    assert {"E1", "E7"} & set(rules(report))
    assert report.verdict == "NOT good"


def test_an_engine_that_cannot_be_imported(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "run_job", lambda *_: Answer("importing", "ImportError: libx.so"))
    with pytest.raises(ArgumentError, match=r"cannot be used by python: ImportError: libx\.so\."):
        tried(good("W4A16").write(tmp_path / "model"))


def test_the_output_of_a_run_is_tried_by_one_block_of_each_kind(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    told = verify_written(good("W4A16").write(tmp_path / "model"), engine=HERE)
    assert told["engine"]["blocks"] == 1
    assert told["engine"]["modules"] == 7 + 2


def test_what_an_engine_refuses_of_a_run_gets_no_name(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "run_job", lambda *_: Answer("loading", "KeyError: 'up'"))
    said = r"the model: The engine refuses it: KeyError: 'up'.*without verify_with"
    with pytest.raises(CheckpointError, match=said):
        verify_written(good("W4A16").write(tmp_path / "model"), engine=HERE)


def test_an_engine_that_does_not_start_discards_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call with more time, or without the engine, goes on from what is finished."""
    late = Answer("importing", "it was not done after 2 seconds", is_late=True)
    monkeypatch.setattr(check, "run_job", lambda *_: late)
    recipe = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    given: dict[str, Any] = {"model": str(source), "recipe": recipe, "output_dir": tmp_path / "out"}
    with pytest.raises(CheckpointError, match=r"not done after 2 seconds.*more time by --timeout"):
        oneshot(**given, verify_with="transformers")
    assert (tmp_path / "out.partial" / "journal").is_file()
    reset_session()
    oneshot(**given, resume="must")
    reset_session()
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_python_without_an_engine(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no engine is named"):
        verify(tmp_path, python="python")


def test_the_report_is_json(good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)
    told = json.loads(json.dumps(tried(good("W4A16").write(tmp_path / "model")).as_dict()))
    assert told["verdict"] == "good"
    assert told["engine"]["decoded"]["tokens"] > 100


@pytest.mark.parametrize(("base", "is_told"), [("W4A16", True), ("W8A8", False)])
def test_inputs_that_a_processor_rounds(
    base: str, is_told: bool, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does so with 4-bit integers on some CPUs: a note, and the tolerance of 8-bit inputs."""
    allowed = []

    def run_job(job: dict[str, Any], *_: Any) -> Answer:
        return replace(answer(job), rounded=["model.layers.0.mlp.down_proj"])

    def tolerance(*given: Any, **named: Any) -> Any:
        allowed.append(tolerance_of(*given, **named))
        return allowed[-1]

    monkeypatch.setattr(check, "run_job", run_job)
    monkeypatch.setattr(check, "tolerance_of", tolerance)
    report = tried(good(base).write(tmp_path / "model"))
    assert rules(report) == (["E9"] if is_told else [])
    assert report.verdict == "good"
    assert [one.kl for one in allowed] == [0.1]


def test_an_embedding_that_takes_other_arguments(
    compressed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions of OPT are one: it is left out, and all else is compared."""
    build("opt").save_pretrained(tmp_path / "opt")
    recipe = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    run_here(monkeypatch)
    report = tried(compressed(tmp_path / "opt", recipe))
    assert not rules(report)
    assert report.engine is not None
    assert report.engine.status == "run"
    assert report.engine.modules == 2 * 6 + 2


# ------------------------------------------------------------------ rules and what an engine shows

VLLM = Engine("vllm", "python")
UP = "model.layers.{}.mlp.up_proj"


def _stray(sample: Sample, *layers: int) -> None:
    """Tensors that vLLM would not load, and transformers does without (S23)."""
    for at in layers:
        sample.tensors[f"{UP.format(at)}.weight_g_idx"] = torch.zeros(32, dtype=torch.int32)


def of_rule(report: VerificationReport, rule: str) -> list[Finding]:
    return [one for one in report.findings if one.rule == rule]


def test_an_engine_overrules_the_rules_of_its_server(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it there is an error; the exit code follows the engine."""
    run_here(monkeypatch)
    sample = good("W4A16")
    _stray(sample, 0)
    folder = sample.write(tmp_path / "model")
    before = verify_files(folder, deployment=Deployment("vllm", tp=(1,)))
    [told] = of_rule(before, "S23")
    assert (told.severity, before.ok) == (Severity.ERROR, False)
    report = verify_with(before, VLLM, deployment=Deployment("vllm", tp=(1,)))
    [note] = of_rule(report, "S23")
    assert note.severity is Severity.NOTE
    assert note.message == f"{told.message} The engine has run it all the same."
    assert rules(report) == ["E6"]
    assert "S23 would have it refused" in of_rule(report, "E6")[0].message
    assert (report.verdict, report.ok) == ("good", True)
    assert report.engine is not None
    assert report.engine.overruled == ("S23",)
    assert report.as_dict()["engine"]["overruled"] == ("S23",)


@pytest.mark.parametrize("outcome", ["refused", "another product", "no kernel", "not compared"])
def test_rules_that_an_engine_does_not_overrule(
    outcome: str, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = good("W4A16")
    _stray(sample, 0)
    folder = sample.write(tmp_path / "model")
    _rows(sample)
    spoilt = sample.write(tmp_path / "spoilt")

    def run_job(job: Any, job_folder: Path, *_: Any) -> Answer:
        is_first = job_folder.name == "job-quantized"
        if is_first and outcome == "refused":
            return Answer("loading", "KeyError: 'weight_g_idx'")
        if is_first and outcome == "no kernel":
            return LACKING[0]
        if is_first and outcome == "another product":
            return answer({**job, "model": str(spoilt)})
        if job_folder.name == "job-decoded" and outcome == "not compared":
            return Answer("loading", "KeyError: 'up'")
        return answer(job)

    monkeypatch.setattr(check, "run_job", run_job)
    report = tried(folder, VLLM, deployment=Deployment("vllm", tp=(1,)))
    assert [one.severity for one in of_rule(report, "S23")] == [Severity.ERROR]
    assert "E6" not in rules(report)
    assert report.verdict == "NOT good"
    assert report.engine is not None
    assert not report.engine.overruled


@pytest.mark.parametrize(
    ("rule", "asked"),
    [
        ("S23", Deployment("vllm", tp=(1,), gpu="h100")),  # of a device that it has not run on
        ("S33", Deployment("vllm", tp=(1,), dtype="float16")),  # of a dtype
        ("S43", Deployment("vllm", tp=(3,))),  # of several devices
    ],
)
def test_rules_about_what_has_not_run(
    rule: str, asked: Deployment, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    sample = good("W4A16")
    if rule == "S23":
        _stray(sample, 0)
    if rule == "S33":
        sample.tensors[f"{UP.format(0)}.weight_scale"][3] = 1e-9
    folder = sample.write(tmp_path / "model")
    report = verify_with(verify_files(folder, deployment=asked), VLLM, deployment=asked)
    assert {one.severity for one in of_rule(report, rule)} == {Severity.ERROR}
    [note] = of_rule(report, "E6")
    assert "does not show" in note.message
    assert report.verdict == "NOT good"


def test_a_rule_about_states_stays(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoded model rounds none: that both compute alike says nothing of the cache."""
    run_here(monkeypatch)
    sample = good("W4A16")
    scheme = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}
    sample.settings["kv_cache_scheme"] = scheme
    asked = Deployment("vllm", tp=(1,))
    before = verify_files(sample.write(tmp_path / "model"), deployment=asked)
    assert of_rule(before, "S49")
    report = verify_with(before, VLLM, deployment=asked)
    assert {one.severity for one in of_rule(report, "S49")} == {Severity.ERROR}


@pytest.mark.parametrize("layers", [(0, 1), (1,)])
def test_a_part_of_a_checkpoint_speaks_for_blocks_of_its_kind(
    layers: tuple[int, ...], good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    sample = good("W4A16")
    _stray(sample, *layers)
    report = verify_files(sample.write(tmp_path / "model"), deployment=Deployment("vllm", tp=(1,)))
    asked = Deployment("vllm", tp=(1,))
    after = verify_with(report, VLLM, deployment=asked, is_trial=True)
    assert after.engine is not None
    assert after.engine.blocks == (1 if len(layers) == 2 else None)
    assert len(of_rule(after, "S23")) == len(layers)
    assert {one.severity for one in of_rule(after, "S23")} == {Severity.NOTE}


def test_every_rule_that_a_run_does_not_show_is_one_of_a_server() -> None:
    assert all(RULES[rule].server for rule in UNSEEN)


# ------------------------------------------------------------------ what an engine draws


def test_weights_that_an_engine_draws_at_random(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the decoded model it draws the same ones: what they compute is alike, and of no model."""
    sample = good("W4A16")
    folder = sample.write(tmp_path / "model")
    name = "model.layers.0.mlp.down_proj"
    for own in sample.own(name):
        sample.tensors[f"elsewhere.{own}"] = sample.tensors.pop(f"{name}.{own}")
    sample.settings["ignore"].append(name)
    run_here(monkeypatch, reads=sample.write(tmp_path / "spoilt"))
    report = tried(folder)
    [told] = [one for one in report.findings if one.rule.startswith("E")]
    assert told.rule == "E5"
    assert f"no values for {name}.weight" in told.message
    assert report.engine is not None
    assert report.engine.status == "failed"


def test_experts_of_a_class_that_stacks_them(
    compressed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6 is right, though all modules and distributions of both models are alike."""
    build("gpt_oss").save_pretrained(tmp_path / "moe")
    recipe = QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"])
    run_here(monkeypatch)
    folder = compressed(tmp_path / "moe", recipe, verify=False)
    report = tried(folder, deployment=Deployment("transformers"))
    assert {one.severity for one in of_rule(report, "T6")} == {Severity.ERROR}
    [told] = [one for one in report.findings if one.rule.startswith("E")]
    assert told.rule == "E5"
    assert "experts" in told.message
    assert told.message.endswith("So do its rules (T6).")


def test_a_decoded_model_that_lacks_values(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(job: Any, folder: Path, *_: Any) -> Answer:
        drawn = ["model.layers.0.mlp.experts"] if folder.name == "job-decoded" else []
        return replace(answer(job), drawn=drawn)

    monkeypatch.setattr(check, "run_job", run_job)
    report = tried(good("W4A16").write(tmp_path / "model"))
    assert rules(report) == ["E7"]
    assert report.verdict == "run, not compared"


def test_what_the_file_lacks_is_no_fault_of_the_engine(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S70 tells, and whether the original lacks it too."""
    run_here(monkeypatch)
    sample = good("W4A16")
    del sample.tensors["model.layers.1.input_layernorm.weight"]
    report = tried(sample.write(tmp_path / "model"))
    assert of_rule(report, "S70")
    assert not rules(report)


class _Router(torch.nn.Linear):
    def forward(self, given: torch.Tensor) -> Any:
        return super().forward(given), given


class _Routed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.plain = _Router(4, 2), torch.nn.Linear(4, 2, bias=False)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(1, input_ids.shape[1], 3))


def test_a_module_that_gives_several_things() -> None:
    """It cannot be called by itself, and all others are."""
    job = {"prompts": [[1, 2]], "rows": 3, "scales": {}}
    found, facts = of_transformers.run((_Routed(), []), job)
    assert set(found) == {"logits/0", "module/plain"}
    assert facts["silent"] == {"router": "TypeError: it gives a tuple"}
