# SPDX-License-Identifier: Apache-2.0
"""Untying of input and output embeddings if one of them is quantized.

A quantized weight cannot be shared, and servers look for both weights if one is quantized. So tied
weights get copies of their own, as with ``tie_word_embeddings=False``, if targets match the
embedding or name the head. A class among the targets does not match a tied head.
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

    Not if the user wants them tied, and not in a training, whose optimizer has the parameters.
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
    else:  # more than an embedding: an encoder and a decoder may share all weights
        tell, shared = logger.warning, f"{len(names)} modules ({listed(names)}) shared weights"
    tell(
        f"{shared}, and {listed(each for each in names if each in meant)} is to be quantized: each "
        "gets a weight of its own, so does all else that is tied, and config.json says "
        "tie_word_embeddings: false."
    )
