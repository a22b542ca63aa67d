# SPDX-License-Identifier: Apache-2.0
"""Numerics: pure functions on tensors for number grids, scales, Gram matrices and solvers.

Nothing here depends on modules, configurations, sessions or files. Names carry shapes: ``R`` rows
(output features), ``C`` columns (input features), ``G`` groups along a row, ``T`` tokens.
"""
