# SPDX-License-Identifier: Apache-2.0
"""Other paths and names of the registered data sets of :mod:`llmcompressor.datasets`."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

__all__ = [
    "C4Dataset",
    "CNNDailyMailDataset",
    "EvolCodeAlpacaDataset",
    "Flickr30K",
    "GSM8KDataset",
    "OpenPlatypusDataset",
    "PeoplesSpeech",
    "PerfectBlendDataset",
    "TextGenerationDataset",
    "UltraChatDataset",
    "WikiTextDataset",
]

_HOMES = {
    "C4Dataset": "llmcompressor.datasets.named.plain:C4",
    "CNNDailyMailDataset": "llmcompressor.datasets.named.tasks:CNNDailyMail",
    "EvolCodeAlpacaDataset": "llmcompressor.datasets.named.tasks:EvolCodeAlpaca",
    "Flickr30K": "llmcompressor.datasets.named.media:Flickr30k",
    "GSM8KDataset": "llmcompressor.datasets.named.tasks:GSM8K",
    "OpenPlatypusDataset": "llmcompressor.datasets.named.tasks:OpenPlatypus",
    "PeoplesSpeech": "llmcompressor.datasets.named.media:PeoplesSpeech",
    "PerfectBlendDataset": "llmcompressor.datasets.named.chats:PerfectBlend",
    "TextGenerationDataset": "llmcompressor.datasets.generation:TextGenerationDataset",
    "UltraChatDataset": "llmcompressor.datasets.named.chats:UltraChat",
    "WikiTextDataset": "llmcompressor.datasets.named.plain:WikiText",
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
