# SPDX-License-Identifier: Apache-2.0
"""What users call: parse, wire, run, save."""
