# SPDX-License-Identifier: Apache-2.0
"""Proof by a server itself: a checkpoint run by an installed engine, beside its decoded weights."""
