# SPDX-License-Identifier: Apache-2.0
"""What else can go wrong between two attempts: damaged files, a full disk, another run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.killed_runs import BLOCKS, KILLED, Job, rows, run, tree, write_model
from tests.support.thinned import few

from llmcompressor import oneshot
from llmcompressor.checkpoint import journal, tensor_files
from llmcompressor.errors import OutputError, TargetError
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

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
        held.write(str(os.getpid()))
        held.flush()
        with pytest.raises(OutputError, match=rf"Another run \(process {os.getpid()}\) is writing"):
            call(small, tmp_path / "output")
    call(small, tmp_path / "output")  # the lock has died with its holder
    assert (tmp_path / "output" / "config.json").is_file()


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


def call_of(model: Path, output: Path, recipe: Any = None, **arguments: Any) -> None:
    oneshot(
        model=str(model),
        recipe=recipe or GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
        dataset=rows(),
        output_dir=str(output),
        verify=False,
        **arguments,
    )


def committed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks that a run finishes, as it does."""
    blocks: list[str] = []
    add = journal.Journal.add

    def watched(self: journal.Journal, entry: journal.BlockEntry) -> None:
        add(self, entry)
        blocks.append(entry.block)

    monkeypatch.setattr(journal.Journal, "add", watched)
    return blocks


def test_a_module_that_no_batch_reaches_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")

    def unreached(self: Any, *args: Any, **kwargs: Any) -> None:
        raise TargetError("No calibration batch reached x.", "Add data.")

    blocks = committed(monkeypatch)
    monkeypatch.setattr(
        "llmcompressor.pipelines.block_loading.BlockLoader.finish_unvisited", unreached
    )
    with pytest.raises(TargetError, match="No calibration batch"):
        call_of(model, tmp_path / "output")
    assert blocks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def replace_by_file(path: Path) -> None:
    if path.is_dir():
        path.rename(path.with_name("aside"))
    path.write_text("x")


def replace_by_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("", replace_by_file),
        ("files", replace_by_file),
        ("scratch", replace_by_file),
        ("journal", replace_by_folder),
        ("lock", replace_by_folder),
    ],
)
def test_a_file_for_a_folder_is_one_clear_error(
    name: str, damage: Callable[[Path], None], resume: str, tmp_path: Path
) -> None:
    model, partial = write_model(tmp_path / "model"), tmp_path / "output.partial"
    (partial / "files").mkdir(parents=True)
    journal.Journal(partial / "journal").begin({"recipe": "a"})
    damage(partial / name if name else partial)
    before = tree(tmp_path)
    recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    with pytest.raises(OutputError, match="part of a run's progress") as caught:
        call_of(model, tmp_path / "output", recipe, resume=resume)
    assert f"{partial / name} is a" in str(caught.value)
    assert f"Remove {partial}" in str(caught.value)
    assert tree(tmp_path) == before


def test_another_processor_is_refused_unless_digits_may_mix(
    halfway: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is mixed is told by the report, also if the last part is done where it began."""
    monkeypatch.undo()
    other = f"not {torch.backends.cpu.get_cpu_capability()}"
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.cpu, "get_cpu_capability", lambda: other)
        with pytest.raises(OutputError, match=rf"instructions: \S+ then, {other} now.*mixed"):
            call(small, halfway)
        call(small, halfway, resume="mixed")
    report = json.loads((halfway / "compression_report.json").read_text())
    assert [one["instructions"] for one in report["processors"]] == [other[4:], other]
