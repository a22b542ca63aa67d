# SPDX-License-Identifier: Apache-2.0
"""Old path of what :mod:`llmcompressor.utils.tensors` has."""

from llmcompressor.utils.tensors import (
    ModuleSparsificationInfo,
    tensor_sparsity,
    tensors_to_device,
)

__all__ = ["ModuleSparsificationInfo", "tensor_sparsity", "tensors_to_device"]
