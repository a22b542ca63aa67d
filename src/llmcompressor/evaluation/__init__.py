# SPDX-License-Identifier: Apache-2.0
"""How much a model lost: perplexity, divergence from the original, agreement of the best token."""
