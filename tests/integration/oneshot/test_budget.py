# SPDX-License-Identifier: Apache-2.0
"""A bit budget: kept to the byte, in sets that servers hold as one, and found only once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from tests.support import small_models as small
from tests.support.killed_runs import CrashError, crashing_after
from transformers import AutoModelForCausalLM

from llmcompressor import model_free_ptq, oneshot, plan, reproduce, train
from llmcompressor.entrypoints import budget as search
from llmcompressor.errors import ArgumentError, InputError, RecipeError, TargetError
from llmcompressor.modeling.fused import expert_sets, fused_sets
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.reporting.report import write_page

CANDIDATES = ["W3A16", "W4A16", "W8A16"]
MODELS: dict[str, Callable[[], Any]] = {
    "llama": small.llama,
    "mixture": small.mixture,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            MODELS[name]().save_pretrained(made[name])
        return made[name]

    return of


def recipe(cls: Any = GPTQModifier, **fields: Any) -> Any:
    given = {"targets": "Linear", "ignore": ["lm_head"], "candidates": CANDIDATES, **fields}
    return cls(**given)


def run(model: Any, output: Path | None, modifier: Any, **arguments: Any) -> Any:
    data = {"dataset": small.token_rows(), "max_seq_length": 16}
    return oneshot(model=model, recipe=modifier, output_dir=output, **{**data, **arguments})


def weight_bytes(output: Path) -> int:
    return sum(one.stat().st_size for one in output.glob("*.safetensors"))


def fields_of(output: Path) -> dict[str, Any]:
    (stage,) = yaml.safe_load((output / "recipe.yaml").read_text()).values()
    (modifiers,) = stage.values()
    (fields,) = modifiers.values()
    return fields


def schemes_of(model: Any) -> dict[str, int]:
    """Module → bits."""
    return {
        name: module.quantization_scheme.weights.num_bits
        for name, module in model.named_modules()
        if getattr(module, "quantization_scheme", None) is not None
    }


@pytest.mark.parametrize("name", MODELS)
def test_members_of_a_set_share_a_scheme_and_the_recipe_says_it(
    name: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = run(folder(name), tmp_path / "out", recipe(budget={"bits": 5}))
    schemes = schemes_of(model)
    assert len(set(schemes.values())) > 1
    joined = [*fused_sets(model), *expert_sets(model)]
    for names in joined:
        assert len({schemes[one] for one in names}) == 1, names
    fields = fields_of(tmp_path / "out")
    assert "budget" not in fields
    assert "candidates" not in fields
    again = run(folder(name), tmp_path / "again", tmp_path / "out" / "recipe.yaml")
    assert schemes_of(again) == schemes
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_a_size_is_kept_and_planned_to_the_byte(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, data = folder("llama"), small.token_rows()
    least, most = (
        plan(model, recipe(scheme=one, candidates=None), data, measure=False).sizes.weights
        for one in ("W3A16", "W8A16")
    )
    for place, share in enumerate((0.0, 0.77)):
        limit = int(least + (most - least) * share)
        budget = recipe(budget={"size": limit})
        found = plan(model, budget, data, max_seq_length=16)
        output = tmp_path / str(place)
        run(model, output, recipe(budget={"size": limit}))
        assert weight_bytes(output) <= limit
        assert weight_bytes(output) == found.sizes.weights
        (chosen,) = (one for one in found.budget if one.is_chosen)
        assert chosen.bytes == found.sizes.weights
        losses = [one.loss for one in found.budget]
        assert losses == sorted(losses, reverse=True)  # with more bytes less is lost
        assert found.budget[0].bytes == least
        assert found.budget[-1].bytes == most


@pytest.mark.parametrize("order", [1, -1])
def test_the_ends_of_a_size_are_kept_in_any_order(
    order: int, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Headers differ by a few bytes between candidates."""
    model, data = folder("llama"), small.token_rows()
    candidates = CANDIDATES[::order]
    ends = [
        plan(model, recipe(scheme=one, candidates=None), data, measure=False).sizes.weights
        for one in ("W3A16", "W8A16")
    ]

    def planned(limit: int) -> Any:
        modifier = recipe(budget={"size": limit}, candidates=candidates)
        return plan(model, modifier, data, measure=False)

    for end in ends:
        found = planned(end)
        assert found.ok, found.problems
        assert found.sizes.weights == end
        assert not [one for one in found.notes if "above what" in one]
    below = planned(ends[0] - 1).problems[0].message
    assert f"budget of {ends[0] - 1:,} bytes is below" in below
    assert f"{ends[0]:,} bytes to {ends[1]:,} bytes" in below
    dense = weight_bytes(model)
    assert f"unquantized, {dense:,} bytes" in planned(dense).problems[0].message
    assert planned(dense - 1).ok


def test_a_size_counts_embeddings_that_others_quantize(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    group = {"targets": ["Embedding"], "weights": {"num_bits": 8, "strategy": "channel"}}
    behind = QuantizationModifier(config_groups={"rows": group})

    def written(**fields: Any) -> int:
        output = tmp_path / str(len(list(tmp_path.iterdir())))
        run(folder("llama"), output, [recipe(**fields), behind], verify=False, report=False)
        return weight_bytes(output)

    for one in ("W3A16", "W8A16"):
        end = written(scheme=one, candidates=None)
        assert written(budget={"size": end}) == end


def test_no_header_breaks_a_size(folder: Callable[[str], Path]) -> None:
    """Zero points have entries of their own, which the candidate of most bits has not."""
    model, candidates = folder("llama"), ["W3A16_ASYM", "W4A16_ASYM", "W5A16"]
    given: dict[str, Any] = {"model": model, "data": small.token_rows()}

    def found(limit: int) -> int:
        modifier = recipe(budget={"size": limit}, candidates=candidates)
        planned = plan(given["model"], modifier, given["data"], measure=False)
        assert planned.ok, planned.problems
        return int(planned.sizes.weights)

    least, most = (
        plan(model, recipe(scheme=one, candidates=None), given["data"], measure=False).sizes.weights
        for one in (candidates[0], candidates[-1])
    )
    sizes = [found(limit) for limit in range(least, most + 1, (most - least) // 7)]
    limits = range(least, most + 1, (most - least) // 7)
    assert all(size <= limit for size, limit in zip(sizes, limits, strict=True))
    assert len(set(sizes)) > 3
    assert found(least) == least
    assert found(most) == most


def test_bits_count_all_that_is_stored_of_the_modules(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    run(folder("llama"), tmp_path / "out", recipe(budget={"bits": 4.5}))
    stored, weights = 0, 0
    for name, one in load_file(tmp_path / "out" / "model.safetensors").items():
        if "_proj.weight_" in name:
            stored += one.nbytes
        if name.endswith("weight_shape"):
            weights += int(one.prod())
    assert 4.4 < 8 * stored / weights <= 4.5


@pytest.mark.parametrize("cls", [QuantizationModifier, AWQModifier])
def test_other_techniques_take_a_budget(
    cls: Any, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    given = {"budget": {"bits": 5}, "candidates": CANDIDATES, "ignore": ["lm_head"]}
    text = yaml.safe_dump({"modifiers": {cls.__name__: {"targets": "Linear", **given}}})
    model = run(folder("llama"), tmp_path / "out", text)
    assert len(set(schemes_of(model).values())) > 1


def test_a_model_in_memory_gets_what_its_folder_gets(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    streamed = schemes_of(run(folder("llama"), tmp_path / "out", recipe(budget={"bits": 5})))
    model = AutoModelForCausalLM.from_pretrained(folder("llama"), dtype="auto")
    assert schemes_of(run(model, None, recipe(budget={"bits": 5}))) == streamed


def test_the_losses_do_not_depend_on_how_samples_are_batched(
    folder: Callable[[str], Path],
) -> None:
    """Samples of several lengths, which are padded in batches of three and not alone."""
    lengths = (16, 9, 16, 12, 16, 5, 7)
    rows = [{"input_ids": list(range(3, 3 + length))} for length in lengths]
    found = [
        plan(
            folder("llama"),
            recipe(budget={"bits": 5, "samples": 7}),
            dataset=rows,
            max_seq_length=16,
            batch_size=size,
            data_collator="padding",
        ).budget
        for size in (1, 3)
    ]
    for one, other in zip(*found, strict=True):
        assert one.bytes == other.bytes
        assert one.loss == pytest.approx(other.loss, rel=1e-3)


def test_the_losses_do_not_depend_on_the_order_of_candidates(
    folder: Callable[[str], Path],
) -> None:
    """One that names an observer keeps scales from being searched; 4 bits correct errors."""
    weights = {"num_bits": 3, "group_size": 32, "strategy": "group", "symmetric": True}
    given = [{"weights": {**weights, "observer": "mse"}}, "W4A16", "W8A16"]
    found = [
        plan(
            folder("llama"),
            recipe(budget={"bits": 5}, candidates=order),
            dataset=[{"input_ids": list(range(3, 19))}] * 4,
        ).budget
        for order in (given, given[::-1])
    ]
    for one, other in zip(*found, strict=True):
        assert (one.bytes, one.loss) == (other.bytes, pytest.approx(other.loss, rel=1e-6))


def test_without_a_model_class_errors_of_weights_decide(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model_free_ptq(
        folder("llama"),
        tmp_path / "out",
        budget={"bits": 5},
        candidates=CANDIDATES,
        ignore="lm_head",
    )
    assert len(fields_of(tmp_path / "out")["config_groups"]) > 1


ROTATION = {"SpinQuantModifier": {"rotations": ["R1", "R4"]}}


def test_what_other_modifiers_add_counts_for_a_size(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rotations at run time are stored beside the modules that the budget is shared among."""
    fields = {"targets": "Linear", "ignore": ["lm_head"], "candidates": CANDIDATES}
    for limit, fits in ((300_000, False), (640_000, True)):
        modifiers = {**ROTATION, "GPTQModifier": {**fields, "budget": {"size": limit}}}
        given = {"modifiers": modifiers}
        found = plan(folder("llama"), given, small.token_rows(), max_seq_length=16)
        said = [one.message for one in found.problems if "The budget allows" in one.message]
        assert bool(said) != fits
        output = tmp_path / str(limit)
        if fits:
            run(folder("llama"), output, given)
            assert weight_bytes(output) == found.sizes.weights <= limit
        else:
            with pytest.raises(RecipeError, match="The budget allows 300,000 bytes"):
                run(folder("llama"), output, given)
            assert not list(tmp_path.glob(f"{limit}*"))


def test_experts_that_go_are_not_shared_among(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pruning = {"REAPPruningModifier": {"sparsity": 0.5}}
    fields = {"targets": "Linear", "ignore": ["lm_head"], "budget": {"bits": 5}}
    given = {"modifiers": {**pruning, "GPTQModifier": fields}}
    with pytest.raises(RecipeError, match="REAPPruningModifier removes parts"):
        run(folder("mixture"), tmp_path / "out", given)
    assert not list(tmp_path.glob("out*"))
    problems = plan(folder("mixture"), given, small.token_rows()).problems
    assert "REAPPruningModifier removes parts" in problems[0].message


def test_bits_stand_for_a_recipe(folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = run(folder("llama"), tmp_path / "out", None, bits=6)
    assert set(schemes_of(model).values()) == {4, 8}
    assert reproduce(tmp_path / "out", dataset=small.token_rows()).same


def test_the_report_has_the_curve_of_the_plan(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    given = {"model": folder("llama"), "data": small.token_rows()}
    planned = plan(given["model"], recipe(budget={"bits": 5}), given["data"], max_seq_length=16)
    run(folder("llama"), tmp_path / "out", recipe(budget={"bits": 5}))
    report = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    found = report["budget"]
    points = {one["bytes"]: one["loss"] for one in [*found["curve"], found["chosen"]]}
    assert points == {one.bytes: one.loss for one in planned.budget}
    assert found["chosen"]["bytes"] == weight_bytes(tmp_path / "out")
    assert not found["rounds"]
    page = write_page(tmp_path / "out").read_text()
    for size in points:
        assert f"{size:,} bytes" in page.partition('id="budget"')[2].partition("</section>")[0]


def test_a_plan_matches_the_patterns_that_were_given(folder: Callable[[str], Path]) -> None:
    targets = ["re:.*mlp.*", "Linear"]
    given = {"budget": {"bits": 5}, "targets": targets}
    modifiers = [AWQModifier(**given, candidates=CANDIDATES, ignore=["lm_head"])]
    for modifier in (recipe(**given), modifiers):
        found = plan(folder("llama"), modifier, small.token_rows(), max_seq_length=16)
        matches = [one for one in found.matches if one.modifier != "AWQModifier"]
        assert [one.pattern for one in matches] == [*targets, "lm_head"]
        assert sum(one.decided for one in matches[:2]) == len(found.schemes)
        assert len(set(found.schemes.values())) > 1
        assert "self_attn" in found.recipe  # the run's recipe has the choice


def test_an_interrupted_run_goes_on_with_its_choice(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(folder("llama"), tmp_path / "whole", recipe(budget={"bits": 5}))
    with crashing_after(2), pytest.raises(CrashError):
        run(folder("llama"), tmp_path / "out", recipe(budget={"bits": 5}))
    with monkeypatch.context() as patched:
        patched.setattr(search, "measure_losses", lambda *_, **__: pytest.fail("measured again"))
        again = run(folder("llama"), tmp_path / "out", recipe(budget={"bits": 5}), resume="must")
    assert schemes_of(again) == schemes_of(whole)
    for name in ("model.safetensors", "compression_report.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


REFUSED: dict[str, tuple[dict[str, Any], type[InputError], str]] = {
    "below": ({"budget": {"bits": 3}}, RecipeError, "below what its candidates"),
    "too small": ({"budget": {"size": 1000}}, RecipeError, "below what its candidates"),
    "above dense": ({"budget": {"bits": 16}}, RecipeError, "no less than the model takes"),
    "embedding": (
        {"budget": {"bits": 5}, "targets": ["Linear", "Embedding"]},
        TargetError,
        "shared among Linears",
    ),
    "no real server": (  # transformers alone reads it
        {"budget": {"bits": 5}, "candidates": ["W4A16", {"weights": {"num_bits": 9}}]},
        RecipeError,
        "No server takes the candidates",
    ),
    "no server": (
        {"budget": {"bits": 5}, "candidates": ["W4A16", {"weights": {"num_bits": 12}}]},
        RecipeError,
        "No server takes the candidates",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_any_work(
    case: str, folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "measure_losses", lambda *_, **__: pytest.fail("measured"))
    fields, kind, said = REFUSED[case]
    # vLLM reads no integers of 12 bits, transformers no packed experts
    model = folder("mixture" if case == "no server" else "llama")
    with pytest.raises(kind, match=said):
        run(model, tmp_path / "out", recipe(**fields))
    assert not list(tmp_path.glob("out*"))
    problems = plan(model, recipe(**fields), small.token_rows(), measure=False).problems
    assert said in problems[0].message


def test_it_is_refused_before_statistics_are_collected(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"output": tmp_path / "out", "save_statistics": tmp_path / "kept"}
    with pytest.raises(RecipeError, match="below what its candidates"):
        run(folder("llama"), modifier=recipe(budget={"bits": 3}), **given)
    given["gates"] = {"size": "9kB"}
    with pytest.raises(ArgumentError, match="The gate 'size' allows 9,000 bytes"):
        run(folder("llama"), modifier=recipe(budget={"bits": 5}), **given)
    assert not list(tmp_path.iterdir())


GROUP = {"num_bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"budget": {"nats": 0.1}}, "no key 'nats'"),
        ({"budget": {}}, "no limit"),
        ({"budget": {"bits": 4, "size": 5}}, "both bits and size"),
        ({"budget": {"bits": 4, "size": 5, "kl": 1}}, "has bits, size and kl"),
        ({"budget": {"bits": 0.5}}, "from 1.0 to 16.0"),
        ({"budget": 4}, "must be a mapping"),
        ({"budget": {"bits": 4, "samples": 0}}, "samples"),
        ({"budget": {"bits": 4}, "scheme": "W4A16"}, "scheme and budget are both set"),
        ({"budget": {"bits": 4}, "candidates": ["W4A16"]}, "two schemes or more"),
        ({"budget": {"bits": 4}, "candidates": ["W4A16", "w4a16"]}, "given twice"),
        ({"budget": {"bits": 4}, "candidates": ["W4A16", {"weights": GROUP}]}, "the same scheme"),
        ({"budget": {"bits": 4}, "candidates": [4, 8]}, "is 4, but must be a preset or"),
        (
            {"budget": {"bits": 4}, "candidates": ["W4A16", {"bits": 8}]},
            "no field 'bits'. (?!.*tar)",
        ),
        ({"budget": {"bits": 4}, "candidates": ["W4A16", "W4A15"]}, "no preset"),
        ({"budget": {"bits": 4}, "candidates": ["W4A16", "UNQUANTIZED"]}, "no weights"),
        ({"budget": {"bits": 4}, "candidates": ["W4A16", "W8A8"]}, "activations differently"),
        ({"scheme": "W4A16"}, "without a budget"),
    ],
)
def test_a_wrong_budget_is_refused_when_the_recipe_is_read(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe(**fields)


def test_arguments_and_recipes_do_not_mix(folder: Callable[[str], Path]) -> None:
    with pytest.raises(ArgumentError, match="stands for a recipe"):
        run(folder("llama"), None, recipe(budget={"bits": 5}), bits=5)
    with pytest.raises(ArgumentError, match="both given"):
        run(folder("llama"), None, None, bits=5, size="1GB")
    with pytest.raises(ArgumentError, match="'bits', 'size' and 'max_kl' were all given"):
        run(folder("llama"), None, None, bits=5, size="1GB", max_kl=1)
    with pytest.raises(ArgumentError, match="without a limit"):
        run(folder("llama"), None, None, candidates=["W4A16", "W8A16"])


def test_only_oneshot_finds_schemes_for_a_budget(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    modifier = recipe(QuantizationModifier, budget={"bits": 5})
    with pytest.raises(RecipeError, match="oneshot finds the schemes"):
        train(
            folder("llama"),
            modifier,
            dataset={"train": small.token_rows()},
            output_dir=tmp_path / "out",
            max_steps=1,
        )


def test_two_budgets_are_refused(folder: Callable[[str], Path]) -> None:
    both = [
        recipe(budget={"bits": 5}, targets=["re:.*mlp.*proj"]),
        recipe(budget={"bits": 5}, targets=["re:.*self_attn.*proj"]),
    ]
    with pytest.raises(RecipeError, match="2 modifiers of the recipe have a budget"):
        run(folder("llama"), None, both)
