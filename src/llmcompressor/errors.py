# SPDX-License-Identifier: Apache-2.0
"""All errors that this package raises on purpose.

::

    CompressorError
    ├── InputError (ValueError)        an input of the user cannot be used
    │   ├── ArgumentError              an argument of an entrypoint
    │   ├── RecipeError                the recipe: grammar, modifiers, fields
    │   ├── TargetError                targets and ignores against the model
    │   ├── DatasetError               calibration data
    │   ├── CheckpointError            the model's files
    │   └── OutputError                the output directory
    ├── LifecycleError (RuntimeError)  a modifier was called out of order
    ├── ProcessError (RuntimeError)    another process of the same run has failed
    ├── GateError                      a checkpoint does not keep its gates, and lies elsewhere
    ├── BudgetError                    no choice of schemes was measured to keep a budget
    └── NonFiniteError (ArithmeticError)  NaN or infinity in weights or activations

An :class:`InputError` names the thing, the reason and the remedy. It is raised before any
work is done and nothing has been written when it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class CompressorError(Exception):
    """Base of all errors that this package raises on purpose."""


class InputError(CompressorError, ValueError):
    """An input of the user cannot be used.

    Args:
        problem: the thing and the reason, in one sentence.
        remedy: the remedy, in one sentence.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem} {remedy}".strip())


class ArgumentError(InputError):
    """An argument of an entrypoint is unknown, misspelt or out of range."""


class RecipeError(InputError):
    """The recipe cannot be read, or one of its modifiers or fields is wrong."""


class TargetError(InputError):
    """A target or ignore does not fit the model."""


class DatasetError(InputError):
    """The calibration data is missing, empty or of the wrong form."""


class CheckpointError(InputError):
    """The model's files are missing, damaged or already compressed."""


class OutputError(InputError):
    """The output directory cannot be written."""


class LifecycleError(CompressorError, RuntimeError):
    """A modifier was initialized, updated or finalized out of order."""


class ProcessError(CompressorError, RuntimeError):
    """Another process of the same run has failed or cannot be reached."""


class GateError(CompressorError):
    """A checkpoint does not keep its quality gates: it is kept, but not under its name.

    Args:
        folder: where it lies, with its report.
        target: the output directory, which is as it was before.
        reasons: a clause for each gate that is not kept.
    """

    def __init__(self, folder: str, target: str, reasons: Sequence[str]) -> None:
        self.folder, self.target, self.reasons = folder, target, tuple(reasons)
        super().__init__(
            f"The checkpoint does not keep its gates: {'; '.join(reasons)}. It lies in {folder} "
            f"with its report, and {target} is as it was."
        )

    def __reduce__(self) -> tuple[type[GateError], tuple[str, str, tuple[str, ...]]]:
        return type(self), (self.folder, self.target, self.reasons)


class BudgetError(CompressorError):
    """No choice of a budget's candidates was measured to keep its limit of the KL divergence.

    Args:
        limit: the limit, in nats a token.
        kl: the least that was measured; ``None`` if it was never a number.
        size: bytes of the weight files of the choice that it was measured of.
        target: the output directory, which is as it was before.
    """

    def __init__(self, limit: float, kl: float | None, size: int, target: str) -> None:
        self.limit, self.kl, self.size, self.target = limit, kl, size, target
        found = "no number" if kl is None else f"{kl:.5g}"
        super().__init__(
            f"No choice of the budget's candidates keeps a KL divergence of {limit:g}. The best "
            f"that was found has {found} and {size:,} bytes of weights, and {target} is as it was. "
            "Allow more, or give candidates of more bits. keep_rejected=True (--keep-rejected) "
            "writes the best to a folder beside it."
        )

    def __reduce__(self) -> tuple[type[BudgetError], tuple[float, float | None, int, str]]:
        return type(self), (self.limit, self.kl, self.size, self.target)


class NonFiniteError(CompressorError, ArithmeticError):
    """NaN or infinity in weights or activations; the message names the module."""


def did_you_mean(name: str, options: Iterable[str], *, limit: int = 3) -> str:
    """Return a sentence that suggests the nearest ``options``, or lists all if none is near.

    >>> did_you_mean("W4A61", ["W4A16", "W8A8", "FP8"])
    'Did you mean W4A16?'
    >>> did_you_mean("x", ["W4A16", "FP8"])
    'Choose one of: FP8, W4A16.'
    """
    known = sorted(set(options))
    by_folded = {option.casefold(): option for option in known}
    near = difflib.get_close_matches(name.casefold(), list(by_folded), n=limit, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(by_folded[folded] for folded in near)}?"
    return f"Choose one of: {', '.join(known)}." if known else ""


def listed(names: Sequence[str]) -> str:
    """Join names for a sentence.

    >>> listed(["bits", "size", "kl"]), listed(["bits", "kl"]), listed(["kl"])
    ('bits, size and kl', 'bits and kl', 'kl')
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
