# SPDX-License-Identifier: Apache-2.0
"""The pages that show what a run did, and how checkpoints differ."""
