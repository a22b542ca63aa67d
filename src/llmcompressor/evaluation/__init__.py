# SPDX-License-Identifier: Apache-2.0
"""Evaluation: perplexity, divergence from the original model, and top-1 agreement."""
