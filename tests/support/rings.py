# SPDX-License-Identifier: Apache-2.0
"""Code for processes that see whether what is unreachable is found."""

__all__ = ["RINGS"]

RINGS = """
class Ring:
    def __init__(self):
        self.me = self

def is_found(ring):
    gc.collect()
    return ring() is None
"""
