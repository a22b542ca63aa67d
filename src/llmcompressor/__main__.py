# SPDX-License-Identifier: Apache-2.0
"""``python -m llmcompressor``: the same as the command ``llmcompressor``."""

from llmcompressor.cli import main

if __name__ == "__main__":
    main()
