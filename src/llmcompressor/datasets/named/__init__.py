# SPDX-License-Identifier: Apache-2.0
"""The data sets known by name; ``table.py`` lists them."""
