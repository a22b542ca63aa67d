# SPDX-License-Identifier: Apache-2.0
"""Named data sets; ``table.py`` lists them."""
