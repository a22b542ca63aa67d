# SPDX-License-Identifier: Apache-2.0
"""Moving scales between modules: the mappings and rescaling that SmoothQuant and AWQ share."""
