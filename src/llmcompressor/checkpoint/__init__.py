# SPDX-License-Identifier: Apache-2.0
"""Load models from checkpoints and write compressed checkpoints."""
