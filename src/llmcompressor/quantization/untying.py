# SPDX-License-Identifier: Apache-2.0
"""An embedding that is to be quantized is not shared with the output head any more.

A quantized weight cannot be shared, and servers look for both where one is quantized. So what is
tied gets weights of its own, as ``tie_word_embeddings=False`` gives it, where targets mean the
embedding, or name the head. A class among the targets does not mean a tied head.
"""

from __future__ import annotations

from typing import Any

from llmcompressor.core.state import State
from llmcompressor.logger import logger
from llmcompressor.modeling.embeddings import is_tied, untie_embeddings
from llmcompressor.schemes.checks import are_apart_untied, tied_weights
from llmcompressor.schemes.resolve import ResolvedSchemes
from llmcompressor.wording import listed

__all__ = ["untie_what_is_meant"]


def untie_what_is_meant(state: State, resolved: ResolvedSchemes) -> None:
    """Untie the model's embeddings if one of them is to be quantized.

    Not where the user wants them tied, and not in a training: its optimizer has the parameters.
    """
    model: Any = state.model
    in_training = state.optimizer is not None or state.data.train is not None
    if state.keeps_ties or in_training or not is_tied(model):
        return
    meant = resolved.reached(model)
    sets = tied_weights(model, meant)
    if not sets or not are_apart_untied(model, meant, sets):
        return
    untie_embeddings(model)
    names = [name for each in sets for name in each]
    if len(sets) == 1:
        tell, shared = logger.info, f"{listed(names)} shared one weight"
    else:  # more than an embedding: an encoder and a decoder may have all in common
        tell, shared = logger.warning, f"{len(names)} modules ({listed(names)}) shared weights"
    tell(
        f"{shared}, and {listed(each for each in names if each in meant)} is to be quantized: each "
        "gets a weight of its own, so does all else that is tied, and config.json says "
        "tie_word_embeddings: false."
    )
