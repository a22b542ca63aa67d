# SPDX-License-Identifier: Apache-2.0
"""Reading models from files and writing compressed checkpoints."""
