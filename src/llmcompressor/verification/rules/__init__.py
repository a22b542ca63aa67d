# SPDX-License-Identifier: Apache-2.0
"""The rules of servers, one module per section of their specification.

:data:`RULES` is the table; :data:`NOT_CHECKED` says of every other number why it is not there.
"""

from __future__ import annotations

from types import MappingProxyType

from llmcompressor.verification.rules import (
    attention,
    classes,
    config,
    embeddings,
    experts,
    formats,
    kernels,
    loading,
    lookup,
    parallel,
    presence,
    schemes,
    sglang,
    sizes,
    tensors,
    transformers,
    transforms,
)
from llmcompressor.verification.rules.base import Rule

__all__ = ["NOT_CHECKED", "RULES"]

RULES: tuple[Rule, ...] = (
    *config.RULES,
    *sizes.RULES,
    *classes.RULES,
    *lookup.RULES,
    *schemes.RULES,
    *formats.RULES,
    *tensors.RULES,
    *parallel.RULES,
    *kernels.RULES,
    *attention.RULES,
    *embeddings.RULES,
    *experts.RULES,
    *presence.RULES,
    *transforms.RULES,
    *transformers.RULES,
    *loading.RULES,
    *attention.OF_TRANSFORMERS,
    *embeddings.OF_TRANSFORMERS,
    *sglang.RULES,
)

NOT_CHECKED = MappingProxyType(
    {
        "S17": "Data for others: the table of families that S14, S15, S16 and S68 use.",
        "S31": "Servers handle it: shards of FP8 tensors are requantized to the largest scale.",
        "S56": "Says what is left out: attention groups are skipped, which S2 allows for.",
        "T3": "Says when transformers decompresses; nothing in a checkpoint can breach it.",
        "T7": "The same facts as S77 and S5, which are checked.",
        "G8": "The same settings as S5 and S6, which are checked.",
    }
)
