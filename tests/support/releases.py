# SPDX-License-Identifier: Apache-2.0
"""What the installed release of transformers does, for tests that depend on it."""

from __future__ import annotations

import transformers
from packaging.version import Version

__all__ = ["refuses_other_shapes", "refuses_packed_zero_points", "renamed_keep_their_dtype"]

_RELEASE = Version(transformers.__version__)


def refuses_other_shapes() -> bool:
    """A scale that is one number has to have the shape ``[1]``."""
    return Version("5.23") <= _RELEASE


def refuses_packed_zero_points() -> bool:
    """Zero points that are packed have no place in a model without data."""
    return Version("5.23") <= _RELEASE


def renamed_keep_their_dtype() -> bool:
    """A scale that is renamed while it loads keeps the dtype of the file."""
    return Version("5.21") > _RELEASE
