# SPDX-License-Identifier: Apache-2.0
"""Smoothing: the shared base of modifiers that move scales from a module to its readers."""
