# SPDX-License-Identifier: Apache-2.0
"""Old paths of what opens mixtures of experts: here every run does it by itself."""
