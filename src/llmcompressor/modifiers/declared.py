# SPDX-License-Identifier: Apache-2.0
"""What a modifier says of itself: by a property, by data of its class, or by a field.

A property of a base class goes before what an object holds, and with that before a field of the
same name in a subclass, such as ``requires_calibration_data: bool = True``. Here it goes behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["declared"]

if TYPE_CHECKING:
    declared = property
else:

    class declared:  # noqa: N801 - used like property
        """A property which a subclass may have as a field instead.

        Objects alone have it: pydantic would warn of a field that hides what the class has.
        """

        def __init__(self, default: Callable[[Any], Any]) -> None:
            self._default = default
            self.__doc__ = default.__doc__

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                raise AttributeError(self._default.__name__)
            return self._default(instance)
