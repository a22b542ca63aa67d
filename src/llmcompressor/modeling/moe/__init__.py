# SPDX-License-Identifier: Apache-2.0
"""Compatibility paths for MoE calibration, which every run does by itself."""
