# SPDX-License-Identifier: Apache-2.0
"""transformers' training arguments with the three that ``train`` adds.

Import it as ``llmcompressor.args.TrainingArguments``; this module loads transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import transformers

__all__ = ["TrainingArguments"]


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Everything transformers' trainer takes, and how stages of a recipe are run.

    Unlike the other argument classes it is not frozen: the trainer writes to it.
    """

    output_dir: str | None = field(
        default="./output", metadata={"help": "Where the trained model is saved."}
    )
    do_oneshot: bool = field(
        default=False, metadata={"help": "Also run the one-shot stages of the recipe."}
    )
    run_stages: bool = field(
        default=False, metadata={"help": "Run the recipe's stages one after another."}
    )

    @property
    def place_model_on_device(self) -> bool:
        """Never: where the model lives is decided when it is loaded."""
        return False
