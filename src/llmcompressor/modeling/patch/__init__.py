# SPDX-License-Identifier: Apache-2.0
"""Compatibility paths of model patches, none of which is needed here."""
