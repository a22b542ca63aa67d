# SPDX-License-Identifier: Apache-2.0
"""The search for the schemes of a bit budget: options, sensitivity, choice."""
