# SPDX-License-Identifier: Apache-2.0
"""Structure of models: target matching, fused layers, MoE experts, the paused forward.

Names are imported when they are asked for, so that importing this package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.registry import lazy_page

if TYPE_CHECKING:
    from llmcompressor.modeling.fuse import center_embeddings, fuse_norm_linears
    from llmcompressor.modeling.fused import expert_sets, fused_partners, fused_sets
    from llmcompressor.modeling.matching import (
        check_targets,
        match_modules_set,
        match_named_modules,
        matches,
        unmatched,
    )
    from llmcompressor.modeling.stored_experts import patch_moe_mappings
    from llmcompressor.modeling.unneeded import (
        moe_calibration_context,
        replace_modules_for_calibration,
    )
    from llmcompressor.modeling.unneeded import (
        replace_modules_for_calibration as prepare_for_calibration,
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
    **dict.fromkeys(("center_embeddings", "fuse_norm_linears"), ".fuse"),
    **dict.fromkeys(("expert_sets", "fused_partners", "fused_sets"), ".fused"),
    **dict.fromkeys(
        ("check_targets", "match_modules_set", "match_named_modules", "matches", "unmatched"),
        ".matching",
    ),
    "moe_calibration_context": ".unneeded",
    "patch_moe_mappings": ".stored_experts",
    "prepare_for_calibration": "llmcompressor.modeling.unneeded:replace_modules_for_calibration",
    "replace_modules_for_calibration": ".unneeded",
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
