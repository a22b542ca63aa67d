# SPDX-License-Identifier: Apache-2.0
"""What else can go wrong between two attempts: damaged files, a full disk, another run."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.killed_runs import BLOCKS, KILLED, Job, rows, run, tree, write_model
from tests.support.thinned import few
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, plan
from llmcompressor.checkpoint import tensor_files
from llmcompressor.checkpoint.journal import Journal
from llmcompressor.errors import CheckpointError, CompressorError, OutputError
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.observers.input_statistics import InputStatistics

Expected = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def broken_off(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two passes that was killed in the second."""
    folder = tmp_path_factory.mktemp("broken")
    job = Job(model, "two", folder / "output")
    assert run(job, die_at=f"append {BLOCKS + 4}").code == KILLED
    return folder


def copied(broken_off: Path, tmp_path: Path) -> Path:
    shutil.copytree(broken_off, tmp_path, dirs_exist_ok=True)
    return tmp_path / "output.partial"


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-(len(content) // 3)] ^= 0x40
    file.write_bytes(content)


def remove(file: Path) -> None:
    file.unlink()


SLOW = [pytest.mark.slow]
"""For cases like others, which the whole suite has."""


def files_of(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    )


@pytest.mark.parametrize(
    ("number", "damage"),
    [
        pytest.param(number, damage, marks=[] if number == 0 or turn == number % 3 else SLOW)
        for number in range(1 + 1 + BLOCKS)
        for turn, damage in enumerate((truncate, flip, remove))
    ],
)
def test_a_damaged_file_of_the_working_folder(
    number: int,
    damage: Callable[[Path], None],
    broken_off: Path,
    model: Path,
    tmp_path: Path,
    expected: Expected,
) -> None:
    """The right bytes all the same, or one clear error, and the progress stays."""
    partial = copied(broken_off, tmp_path)
    names = files_of(partial)
    assert len(names) == 1 + 1 + BLOCKS, names  # the journal, the output, the scratch blocks
    damage(partial / names[number])
    before = tree(partial)
    ended = run(Job(model, "two", tmp_path / "output"))
    if ended.code == 0:
        assert tree(tmp_path / "output") == expected("two")
    else:
        assert names[number] == "journal"
        assert "OutputError" in ended.said
        assert "resume" in ended.said
        assert {name: hashed for name, hashed in tree(partial).items() if name != "lock"} == {
            name: hashed for name, hashed in before.items() if name != "lock"
        }


@pytest.mark.parametrize(
    "damage", [pytest.param(truncate, marks=SLOW), flip, pytest.param(remove, marks=SLOW)]
)
def test_what_was_learned_is_damaged(
    damage: Callable[[Path], None], model: Path, tmp_path: Path, expected: Expected
) -> None:
    """It is learned again, and the blocks that were made with it are made again."""
    job = Job(model, "learned", tmp_path / "output")
    assert run(job, die_at="append 8").code == KILLED
    [kept] = (job.partial / "scratch").glob("*rotations*")
    damage(kept)
    again = run(job)
    assert again.code == 0, again.said
    assert "damaged on the disk" in again.said
    assert "they are done again" in again.said
    assert tree(job.output) == expected("learned")


def test_what_was_learned_is_not_learned_again(
    model: Path, tmp_path: Path, expected: Expected
) -> None:
    job = Job(model, "learned", tmp_path / "output")
    assert run(job, die_at="append 8").code == KILLED
    (progress,) = Journal(job.partial / "journal").progress.values()
    assert progress.figures["steps"] == 3
    assert progress.figures["after"] is not None
    assert run(job).code == 0
    assert tree(job.output) == expected("learned")


def own_copy(model: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    return copy


@pytest.mark.parametrize(
    "damage", [truncate, pytest.param(flip, marks=SLOW), pytest.param(remove, marks=SLOW)]
)
def test_a_damaged_source(
    damage: Callable[[Path], None], model: Path, tmp_path: Path, expected: Expected
) -> None:
    source = own_copy(model, tmp_path)
    job = Job(source, "gptq", tmp_path / "output")
    assert run(job, die_at="append 4").code == KILLED
    progress = tree(job.partial / "files")
    victim = sorted(source.glob("model-*.safetensors"))[0]
    damage(victim)
    ended = run(job)
    assert ended.code == 1
    assert "CheckpointError" in ended.said or "OutputError" in ended.said, ended.said
    assert tree(job.partial / "files") == progress
    shutil.copy(model / victim.name, victim)
    assert run(job).code == 0
    assert tree(job.output) == expected("gptq")


# ---------------------------------------------------------------------- in this process


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def call(model: Path, output: Path, recipe: Any = None, **arguments: Any) -> torch.nn.Module:
    recipe = recipe or GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    return oneshot(
        model=str(model),
        recipe=recipe,
        dataset=arguments.pop("dataset", rows()),
        output_dir=str(output),
        verify=False,
        **arguments,
    )


class InterruptError(Exception):
    """Stands for whatever stops a run in the middle."""


@pytest.fixture
def stopped_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Have the n-th write of a tensor fail."""
    write = tensor_files._write_all

    def arm(number: int, error: BaseException) -> None:
        left = [number]

        def failing(descriptor: int, view: memoryview, offset: int) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise error
            write(descriptor, view, offset)

        monkeypatch.setattr(tensor_files, "_write_all", failing)

    yield arm
    monkeypatch.undo()


@pytest.mark.parametrize("number", [1, pytest.param(12, marks=SLOW), 40])
def test_a_full_disk(
    number: int,
    small: Path,
    tmp_path: Path,
    stopped_at: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call(small, tmp_path / "whole")
    stopped_at(number, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OutputError, match="full") as caught:
        call(small, tmp_path / "output")
    assert "Free some space" in str(caught.value)
    assert not (tmp_path / "output").exists()
    monkeypatch.undo()
    call(small, tmp_path / "output")
    assert tree(tmp_path / "output") == tree(tmp_path / "whole")


def test_a_disk_too_small_is_found_before_any_work(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OutputError, match="kB more, and the disk"):
        call(small, tmp_path / "output")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("pipeline", [None, "basic"])
def test_so_it_is_for_a_model_in_memory(
    pipeline: str | None, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(small)
    before = {name: one.clone() for name, one in loaded.state_dict().items()}
    runs: list[object] = []
    loaded.register_forward_pre_hook(lambda *given: runs.append(given))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    recipe = [GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])]
    with pytest.raises(OutputError, match="kB more, and the disk"):
        oneshot(loaded, recipe, rows(), output_dir=tmp_path / "output", pipeline=pipeline)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    after = loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    # whether the data reaches what is to be calibrated was looked at, and no more
    assert len(runs) <= 1


def test_what_waits_between_passes_has_to_fit_the_disk_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = [
        GPTQModifier(targets=["re:.*mlp.*proj"], scheme="W4A16"),
        QuantizationModifier(targets=["re:.*self_attn.*_proj"], scheme="FP8"),
    ]
    planned = plan(str(model), recipe, rows(), output_dir=tmp_path / "output", measure=False)
    assert planned.ok
    assert planned.sizes is not None
    usage = shutil.disk_usage(tmp_path)
    room = planned.sizes.weights + 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=room))
    found = plan(str(model), recipe, rows(), output_dir=tmp_path / "output", measure=False)
    [problem] = found.problems
    assert "for blocks between passes" in problem.message
    with pytest.raises(OutputError) as caught:
        oneshot(str(model), recipe, rows(), output_dir=tmp_path / "output")
    assert caught.value.problem.split(" the disk")[0] == problem.message.split(" the disk")[0]
    assert not list(tmp_path.iterdir())


def test_a_shard_that_cannot_be_read_in_mid_run(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(small, tmp_path / "whole")
    preadv, left = os.preadv, [60]

    def failing(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(*arguments)

    monkeypatch.setattr(tensor_files.os, "preadv", failing)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
        call(small, tmp_path / "output")
    monkeypatch.undo()
    call(small, tmp_path / "output")
    assert tree(tmp_path / "output") == tree(tmp_path / "whole")


@pytest.fixture
def halfway(small: Path, tmp_path: Path, stopped_at: Callable[..., None]) -> Path:
    """The output of a run that was stopped when one block was done."""
    stopped_at(40, InterruptError())
    with pytest.raises(InterruptError):
        call(small, tmp_path / "output")
    assert (tmp_path / "output.partial" / "journal").is_file()
    return tmp_path / "output"


OTHER_RUNS = {
    "recipe": {"recipe": GPTQModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"])},
    "data": {"dataset": rows()[:3]},
    "seed": {"seed": 5, "shuffle_calibration_samples": False},
    "dtype": {"precision": "float32"},
    "save_compressed": {"save_compressed": False},
    "propagate_error": {"propagate_error": False},
}


@pytest.mark.parametrize("item", OTHER_RUNS)
def test_another_run_is_refused_and_throws_nothing_away(
    item: str, halfway: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    partial = halfway.with_name("output.partial")
    before = tree(partial)
    with pytest.raises(OutputError, match="progress of another run") as caught:
        call(small, halfway, **OTHER_RUNS[item])
    assert item in str(caught.value)
    assert 'resume="never"' in str(caught.value)
    after = tree(partial)
    assert {**after, "lock": ""} == {**before, "lock": ""}


def test_another_source_is_refused(
    halfway: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    shard = sorted(small.glob("model-*.safetensors"))[-1]
    tensors = load_file(shard)
    save_file({**tensors, "new": torch.ones(3)}, shard, metadata={"format": "pt"})
    with pytest.raises(CompressorError) as caught:
        call(small, halfway)
    assert shard.name in str(caught.value) or "index" in str(caught.value)


def test_never_throws_the_progress_away(
    halfway: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    other = QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"])
    call(small, halfway, recipe=other, resume="never")
    call(small, tmp_path / "whole", recipe=QuantizationModifier(**other.model_dump()))
    assert tree(halfway) == tree(tmp_path / "whole")


def test_must_wants_progress(small: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nothing to resume"):
        call(small, tmp_path / "output", resume="must")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_must_continues(
    halfway: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    call(small, halfway, resume="must")
    call(small, tmp_path / "whole")
    assert tree(halfway) == tree(tmp_path / "whole")


def test_a_second_run_on_the_same_output_is_refused(small: Path, tmp_path: Path) -> None:
    partial = tmp_path / "output.partial"
    partial.mkdir()
    with (partial / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("4711")
        held.flush()
        with pytest.raises(OutputError, match=r"Another run \(process 4711\) is writing"):
            call(small, tmp_path / "output")
    call(small, tmp_path / "output")  # the lock has died with its holder
    assert (tmp_path / "output" / "config.json").is_file()


def test_interrupted_by_the_user(
    small: Path, tmp_path: Path, stopped_at: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(small, tmp_path / "whole")
    stopped_at(30, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        call(small, tmp_path / "output")
    monkeypatch.undo()
    call(small, tmp_path / "output")
    assert tree(tmp_path / "output") == tree(tmp_path / "whole")


def test_the_returned_model_is_usable(small: Path, tmp_path: Path) -> None:
    """It reads its blocks from the output, computes, and can be saved again."""
    model: Any = call(small, tmp_path / "output")
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        first = model(ids).logits
    assert bool(torch.isfinite(first).all())
    model.save_pretrained(tmp_path / "again")
    weights = load_file(tmp_path / "again" / "model.safetensors")
    written = load_file(tmp_path / "output" / "model.safetensors")
    assert weights.keys() == written.keys()
    assert all(torch.equal(weights[name], written[name]) for name in written)


@pytest.mark.parametrize("moved", few([0, 1, 3], 1))
def test_killed_while_files_are_moved_into_a_mount_point(
    moved: int, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that cannot be renamed over gets its files one by one, the configuration last."""
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name in ("whole", "output"))
    for name in ("whole", "output"):
        (tmp_path / name).mkdir()
    call(small, tmp_path / "whole")
    replace, left = Path.replace, [moved]

    def killed(self: Path, target: Path) -> Path:
        if self.parent.name == "files":
            left[0] -= 1
            if left[0] < 0:
                raise InterruptError
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(InterruptError):
            call(small, tmp_path / "output")
    assert not (tmp_path / "output" / "config.json").exists()
    call(small, tmp_path / "output")
    assert tree(tmp_path / "output") == tree(tmp_path / "whole")


def test_what_was_moved_aside_goes_when_the_new_one_is_in_place(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(small, tmp_path / "output")
    (tmp_path / "output").rename(tmp_path / "output.old-vm-999999-0")
    monkeypatch.setattr("llmcompressor.checkpoint.atomic_output._owner", lambda: "vm-1")
    call(small, tmp_path / "output", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "output"]


def test_what_is_finished_is_not_measured_again(
    halfway: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data only passes through it: what was summed up there would stay to the end of the run."""
    update = InputStatistics.update
    seen: set[str] = set()

    def recorded(statistics: InputStatistics, *args: Any) -> None:
        seen.add(statistics.name.split(".")[2])
        update(statistics, *args)

    monkeypatch.setattr(InputStatistics, "update", recorded)
    call(small, halfway)
    assert seen == {"1", "2"}
