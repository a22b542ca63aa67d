# SPDX-License-Identifier: Apache-2.0
"""``modify_save_pretrained`` for scripts, with defaults from earlier runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from llmcompressor.checkpoint import save
from llmcompressor.checkpoint.save import SaveOptions, Text, options_of
from llmcompressor.core.session_functions import active_session
from llmcompressor.entrypoints.checking import check_saved
from llmcompressor.recipe import Recipe
from llmcompressor.recipe.stages import number_clashes
from llmcompressor.recipe.writing import to_yaml

__all__ = ["modify_save_pretrained"]


def modify_save_pretrained(
    model: PreTrainedModel,
    *,
    recipe: Text = None,
    source: str | os.PathLike[str] | None = None,
    processor: Any | None = None,
    report: Mapping[str, Any] | None = None,
) -> None:
    """Make ``model.save_pretrained`` write compressed checkpoints and verify them.

    Arguments default to those of an earlier run of ``oneshot`` or ``train`` on the model.

    Args:
        model: the model. Copies of it, deep or through pickle, save compressed too.
        recipe: the text of ``recipe.yaml``, or a function that returns it when saving. It
            defaults to the recipes of separately compressed parts, or to that of the active
            session, if the model has none.
        source: the original model's folder or hub id; by default the one it was loaded from.
        processor: the processor to write too; ``save_pretrained`` of a model writes none itself.
        report: JSON data to save with the weights.
    """
    known = [one for one in map(options_of, model.modules()) if one is not None]
    own = options_of(model) or SaveOptions()
    save.modify_save_pretrained(
        model,
        recipe=recipe or own.recipe or _of_parts(known) or _of_session(model),
        source=source or own.source,
        processor=own.processor if processor is None else processor,
        report=report or own.report,
        check=known[0].check if known else check_saved,  # a run may have left it out
        once=any(one.once for one in known),
    )


def _of_parts(known: list[SaveOptions]) -> Text:
    recipes = list(dict.fromkeys(one.recipe for one in known if one.recipe is not None))
    return recipes[0] if len(recipes) == 1 else partial(_joined, recipes) if recipes else None


def _joined(recipes: list[Any]) -> str:
    texts = [one() if callable(one) else one for one in recipes]
    stages = [stage for text in texts if text for stage in Recipe.create_instance(text).stages]
    return to_yaml(number_clashes(stages))


def _of_session(model: PreTrainedModel) -> str | None:
    session = active_session()
    return session.get_serialized_recipe() if session.state.model is model else None
