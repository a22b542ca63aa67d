# SPDX-License-Identifier: Apache-2.0
"""What the modifiers that smooth a model share: they move scales from one module to its readers."""
