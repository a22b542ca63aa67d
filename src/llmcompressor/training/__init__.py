# SPDX-License-Identifier: Apache-2.0
"""Training with a recipe: the bridge between transformers' ``Trainer`` and a session.

:class:`SessionManagerMixIn` makes any subclass of ``transformers.Trainer`` send the events of its
training loop to the active session; :class:`Trainer` is the ready-made combination. ``train()``
begins the session and ends it: when it returns, every modifier is finalized, ``trainer.model`` is
ready to be saved, and the modifiers' reports can be read from
``active_session().lifecycle.recipe.modifiers``. When it raises, the session is reset.
"""

from llmcompressor.training.mixin import SessionManagerMixIn, Trainer

__all__ = ["SessionManagerMixIn", "Trainer"]
