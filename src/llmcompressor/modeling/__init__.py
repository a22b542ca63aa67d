# SPDX-License-Identifier: Apache-2.0
"""Structure of models: target matching, fused layers, MoE experts, the paused forward.

Names are imported when they are asked for, so that importing this package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.runtime.registry import lazy_exports

if TYPE_CHECKING:
    from llmcompressor.modeling.fused import expert_sets, fused_partners, fused_sets
    from llmcompressor.modeling.matching import (
        check_targets,
        match_modules_set,
        match_named_modules,
        matches,
        unmatched,
    )

__all__ = [
    "center_embeddings",
    "check_targets",
    "expert_sets",
    "fuse_norm_linears",
    "fused_partners",
    "fused_sets",
    "match_modules_set",
    "match_named_modules",
    "matches",
    "moe_calibration_context",
    "patch_moe_mappings",
    "prepare_for_calibration",
    "replace_modules_for_calibration",
    "unmatched",
]

_HOMES = {
    "center_embeddings": "llmcompressor.equalization.rescale:center_embeddings",
    "fuse_norm_linears": "llmcompressor.equalization.rescale:fuse_norm_linears",
    **dict.fromkeys(("expert_sets", "fused_partners", "fused_sets"), ".fused"),
    **dict.fromkeys(
        ("check_targets", "match_modules_set", "match_named_modules", "matches", "unmatched"),
        ".matching",
    ),
    "moe_calibration_context": "llmcompressor.moe.noop_compat:moe_calibration_context",
    "patch_moe_mappings": "llmcompressor.moe.linear_experts:patch_moe_mappings",
    "prepare_for_calibration": "llmcompressor.moe.noop_compat:replace_modules_for_calibration",
    "replace_modules_for_calibration": (
        "llmcompressor.moe.noop_compat:replace_modules_for_calibration"
    ),
}

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
