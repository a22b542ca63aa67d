# SPDX-License-Identifier: Apache-2.0
"""Serving rules applied to a predicted checkpoint."""

from __future__ import annotations

from llmcompressor.planning.result import ServingNote
from llmcompressor.planning.sizes import Output
from llmcompressor.verification import Deployment, TensorInfo, check_serving

__all__ = ["serving_notes"]


def serving_notes(output: Output, deployment: Deployment | None = None) -> list[ServingNote]:
    """Check the predicted configuration and headers against the serving rules.

    Args:
        output: the predicted checkpoint.
        deployment: serving environment, as far as known.
    """
    headers = {one.name: TensorInfo(one.dtype, one.shape) for one in output.prediction.stored}
    return [
        ServingNote(one.rule, one.severity.value, one.server, one.module, one.message, one.remedy)
        for one in check_serving(
            output.config, headers, deployment=deployment, kinds=output.prediction.kinds
        )
    ]
