# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of DeepSeek V3.2, which transformers has."""
