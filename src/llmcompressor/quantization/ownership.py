# SPDX-License-Identifier: Apache-2.0
"""Resolution of scheme conflicts: modules that two modifiers of a recipe quantize.

A modifier that only rounds weights leaves a module to a later modifier with the same scheme: the
later one computes the same kind of parameters, and better ones. Any other pair is an error.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, cast

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch.nn import Module

from llmcompressor.core.state import State
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.weights import has_tied_embeddings, untie_embeddings
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.checks import are_separate_after_untying, tied_weights
from llmcompressor.schemes.presets import format_of
from llmcompressor.schemes.resolve import ResolvedSchemes

_NUMBERS = (
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "dynamic",
    "scale_dtype",
)
"""What of its arguments decides about the numbers on disk, whatever finds their ranges."""


class Quantizer(Protocol):
    """A modifier that quantizes modules and may leave some of them to another."""

    leaves_modules: ClassVar[bool]
    """Whether it only rounds, so that a later modifier with the same scheme may take them."""

    def leave(self, module: Module) -> None:
        """Stop handling ``module``."""


def previous_quantizer(
    state: State, module: Module, name: str, scheme: QuantizationScheme, later: Quantizer
) -> Quantizer | None:
    """The modifier that leaves ``module`` to ``later``; ``None`` if no other modifier has it.

    ``name`` is that of the module, ``scheme`` that of the later modifier.

    Raises:
        TargetError: another modifier quantizes it and cannot leave it.
    """
    earlier = getattr(module, "quantization_scheme", None)
    if earlier is None:
        return None
    owner = cast("Quantizer | None", state.facts.quantizer.get(module))
    own = type(later).__name__
    if owner is None or getattr(module, "quantization_status", None) is not None:
        raise TargetError(
            f"{name} is quantized already, by an earlier run.",
            f"Put it on the ignore list of {own}, or begin with the original model.",
        )
    tensors = ("weights", "input_activations", "output_activations")
    alike = all(have_same_values(getattr(earlier, one), getattr(scheme, one)) for one in tensors)
    by, differ = type(owner).__name__, not alike or format_of(earlier) != format_of(scheme)
    is_free = owner.leaves_modules and module not in state.facts.kv_cache
    if is_free and not later.leaves_modules and not differ:
        return owner
    raise TargetError(
        f"{name} is quantized already, by {by}, which stands before {own}"
        + (" and has another scheme." if differ else "."),
        f"Put it on the ignore list of one of them, or leave {by} out.",
    )


def have_same_values(one: QuantizationArgs | None, other: QuantizationArgs | None) -> bool:
    """Return True if two arguments describe the same numbers, whatever their observers."""
    if one is None or other is None:
        return one is other
    return all(getattr(one, field) == getattr(other, field) for field in _NUMBERS)


# --------------------
# Untying of input and output embeddings if one of them is quantized.
#
# A quantized weight cannot be shared, and servers look for both weights if one is quantized. So
# tied weights get copies of their own, as with ``tie_word_embeddings=False``, if targets match the
# embedding or name the head. A class among the targets does not match a tied head.


def untie_quantized_embeddings(state: State, resolved: ResolvedSchemes) -> None:
    """Untie the model's embeddings if one of them is to be quantized.

    Not if the user wants them tied, and not in a training, whose optimizer has the parameters.
    """
    model: Any = state.model
    in_training = state.optimizer is not None or state.data.train is not None
    if state.run.keeps_tied_embeddings or in_training or not has_tied_embeddings(model):
        return
    meant = resolved.match_schemes(model)
    sets = tied_weights(model, meant)
    if not sets or not are_separate_after_untying(model, meant, sets):
        return
    untie_embeddings(model)
    names = [name for each in sets for name in each]
    if len(sets) == 1:
        tell, shared = logger.info, f"{join_names(names)} shared one weight"
    else:  # more than an embedding: an encoder and a decoder may share all weights
        tell, shared = logger.warning, f"{len(names)} modules ({join_names(names)}) shared weights"
    tell(
        f"{shared}, and {join_names(each for each in names if each in meant)} is to be quantized: "
        "each "
        "gets a weight of its own, so does all else that is tied, and config.json says "
        "tie_word_embeddings: false."
    )
