# SPDX-License-Identifier: Apache-2.0
"""Old paths of helpers for tensors and modules."""
