# SPDX-License-Identifier: Apache-2.0
"""Old paths of patches of models, none of which is needed here."""
