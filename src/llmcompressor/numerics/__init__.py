# SPDX-License-Identifier: Apache-2.0
"""Pure mathematics on tensors: number grids, scales, Gram matrices, solvers.

Nothing here knows a module, a configuration, a session or a file. Names carry shapes: ``R`` rows
(output features), ``C`` columns (input features), ``G`` groups along a row, ``T`` tokens.
"""
