# SPDX-License-Identifier: Apache-2.0
"""What the serving rules say of a checkpoint that is not written yet."""

from __future__ import annotations

from llmcompressor.planning.result import ServingNote
from llmcompressor.planning.sizes import Output
from llmcompressor.verification import Deployment, TensorInfo, check_serving

__all__ = ["serving_notes"]


def serving_notes(output: Output, deployment: Deployment | None = None) -> list[ServingNote]:
    """Check the predicted configuration and headers; values are not known yet.

    Args:
        output: what would be written.
        deployment: where it is to be served, as far as it is known.
    """
    headers = {one.name: TensorInfo(one.dtype, one.shape) for one in output.prediction.stored}
    return [
        ServingNote(one.rule, one.severity.value, one.server, one.module, one.message, one.remedy)
        for one in check_serving(
            output.config, headers, deployment=deployment, kinds=output.prediction.kinds
        )
    ]
