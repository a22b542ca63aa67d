# SPDX-License-Identifier: Apache-2.0
"""Schemes and observers applied to modules: the base of all quantizing modifiers."""
