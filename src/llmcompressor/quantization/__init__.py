# SPDX-License-Identifier: Apache-2.0
"""Schemes and observers on modules: what every quantizing modifier stands on."""
