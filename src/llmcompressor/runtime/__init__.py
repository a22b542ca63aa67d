# SPDX-License-Identifier: Apache-2.0
"""The machine: memory, threads, processes, progress, and tables of names to import."""
