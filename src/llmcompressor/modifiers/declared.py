# SPDX-License-Identifier: Apache-2.0
"""Property that a subclass may replace by a field of the same name.

A property of a base class takes precedence over the instance dictionary, and so over a field of
the same name in a subclass, such as ``requires_calibration_data: bool = True``. This descriptor
does not: it only supplies the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["declared"]

if TYPE_CHECKING:
    declared = property
else:

    class declared:  # noqa: N801 - used like property
        """A property that a subclass may override with a field.

        It exists on instances only: pydantic would warn about a field that shadows one of
        the class.
        """

        def __init__(self, default: Callable[[Any], Any]) -> None:
            self._default = default
            self.__doc__ = default.__doc__

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                raise AttributeError(self._default.__name__)
            return self._default(instance)
