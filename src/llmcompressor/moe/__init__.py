# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: layouts, linear experts, and calibration of every expert."""
