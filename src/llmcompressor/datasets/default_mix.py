# SPDX-License-Identifier: Apache-2.0
"""``dataset="default"``: text, chat, code and several languages, mixed from data sets of the hub.

The parts are :data:`PARTS`, and :data:`ORDER` has their shares. Every part is streamed, so that
only the rows that are used and those of a small buffer are downloaded. The same seed gives the same
rows as long as the hub's files and the datasets library stay the same.

Where the hub is switched off (``HF_HUB_OFFLINE=1``) the source of Python's standard library takes
the place of all parts, with a warning. A hub that cannot be reached is an error: no other data is
taken without being asked for.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import huggingface_hub

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets.named import TextGenerationDataset
from llmcompressor.datasets.rows import Row, Stream
from llmcompressor.datasets.stdlib_text import calibration_passages
from llmcompressor.datasets.text import normalize_turns
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.runtime.registry import resolve


@dataclass(frozen=True)
class Part:
    """A part of the mix: a data set of the hub that needs no login.

    Attributes:
        hub_id: its name on the hub.
        license: its license, as its page tells it.
        configs: configurations, of which rows are taken in turn.
        split: the split.
    """

    hub_id: str
    license: str
    configs: tuple[str | None, ...] = (None,)
    split: str = "train"


PARTS: Mapping[str, Part] = {
    "text": Part("HuggingFaceFW/fineweb-edu", "ODC-By 1.0", ("sample-10BT",)),
    "chat": Part("HuggingFaceH4/ultrachat_200k", "MIT", split="train_sft"),
    "code": Part("theblackcat102/evol-codealpaca-v1", "Apache-2.0"),
    "languages": Part(
        "HuggingFaceFW/fineweb-2",
        "ODC-By 1.0",
        (
            *("cmn_Hani", "spa_Latn", "arb_Arab", "rus_Cyrl"),
            *("hin_Deva", "jpn_Jpan", "deu_Latn", "fra_Latn"),
        ),
    ),
}
"""Kind of text → where it is from."""

ORDER = (
    *("text", "chat", "code", "text", "chat"),
    *("languages", "text", "chat", "code", "languages"),
)
"""The kinds of ten rows; the next ten have the same, and so on."""

_BUFFER = 100
"""Rows of a stream that are shuffled at a time, beside the order of its files."""
_CHARACTERS = 8192
"""Of a passage of the standard library: about 2,000 tokens."""
_UNUSED = ("dataset_config_name", "dataset_path", "raw_kwargs", "splits")
_YES = frozenset({"1", "ON", "TRUE", "YES"})


def is_offline() -> bool:
    """Return True if the user has switched the hub off by an environment variable."""
    switch = os.environ.get("HF_DATASETS_OFFLINE", "").upper()
    return huggingface_hub.is_offline_mode() or switch in _YES


class StandardLibraryText(TextGenerationDataset):
    """``dataset="python_stdlib"``: source text that every Python has, for trying things.

    Raises:
        DatasetError: an argument names a part of a data set, or all rows are asked for.
    """

    default_split = None
    is_mix: ClassVar[bool] = True

    def __init__(
        self, dataset_args: DatasetArguments, split: str | None = None, processor: Any = None
    ) -> None:
        super().__init__(dataset_args, split, processor)
        for name in _UNUSED:
            if getattr(dataset_args, name):
                raise DatasetError(
                    f"dataset={dataset_args.dataset!r} has no parts, and takes no {name}.",
                    f"Leave {name} out, or name one data set.",
                )
        if dataset_args.num_calibration_samples is None:
            raise DatasetError(
                f"dataset={dataset_args.dataset!r} has more rows than any run takes, and "
                "num_calibration_samples=None asks for all.",
                "Give num_calibration_samples a number, such as 512.",
            )

    def load_dataset(self) -> Any:
        """Return the stream of passages."""
        args = self.dataset_args
        seed = args.seed if args.shuffle_calibration_samples else None
        return Stream(_StandardLibrary(args.num_calibration_samples or 1, seed or 0))


class DefaultMix(StandardLibraryText):
    """Rows of all parts, by turns.

    Raises:
        DatasetError: an argument names a part of a data set, or all rows are asked for.
    """

    def load_dataset(self) -> Any:
        """Return the stream of mixed rows; a part is opened when its first row is asked for."""
        args = self.dataset_args
        if is_offline():
            logger.warning(
                "The hub is switched off (HF_HUB_OFFLINE): dataset='default' is the source text of "
                "Python's standard library, and nothing else. For a model that reads more than "
                "code, give texts of your own."
            )
            return super().load_dataset()
        parts = ", ".join(f"{name} {ORDER.count(name)}/10 ({PARTS[name].hub_id})" for name in PARTS)
        logger.info(f"dataset='default' is a mix that is streamed from the hub: {parts}.")
        return Stream(_HubMix(args.seed if args.shuffle_calibration_samples else None))

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Return the text of a row: turns go through the chat template, if there is one."""
        if "messages" not in row:
            return {"text": row["text"]}
        turns = normalize_turns(row["messages"])
        if self.chat.has_template:
            return {"text": self.chat(turns)}
        return {"text": "\n\n".join(str(turn["content"]) for turn in turns)}


class _HubMix:
    """Rows of the hub's data sets in :data:`ORDER`; each iteration begins anew.

    Args:
        seed: draws the rows; ``None`` takes the first of each stream.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[Row]:
        parts = {name: self._rows(part) for name, part in PARTS.items()}
        for name in itertools.cycle(ORDER):
            row = next(parts[name], None)
            if row is None:  # the shares could not be kept any more
                return
            yield row

    def _rows(self, part: Part) -> Iterator[Row]:
        streams = [self._stream(part, config) for config in part.configs]
        for stream in itertools.cycle(streams):
            row = next(stream, None)
            if row is None:
                return
            yield row

    def _stream(self, part: Part, config: str | None) -> Iterator[Row]:
        load = resolve("llmcompressor.datasets.hub:load_hub")
        try:
            loaded = load(part.hub_id, config=config, split=part.split, streaming=True)
        except DatasetError as error:
            raise DatasetError(
                f"dataset='default': {error.problem}",
                "Check the network, or give data of your own. HF_HUB_OFFLINE=1 takes the source "
                "text of Python's standard library in place of the mix.",
            ) from error
        if self._seed is not None:
            # Else ten files are opened at once, and closing them takes five seconds.
            takes_one = "max_buffer_input_shards" in inspect.signature(loaded.shuffle).parameters
            one_file = {"max_buffer_input_shards": 1} if takes_one else {}
            loaded = loaded.shuffle(seed=self._seed, buffer_size=_BUFFER, **one_file)
        yield from map(_plain_row, Stream(loaded))


def _plain_row(row: Row) -> Row:
    """Return a row of any part with ``text`` or ``messages`` alone.

    >>> _plain_row({"text": "One.", "id": 3})
    {'text': 'One.'}
    >>> _plain_row({"instruction": "Add.", "output": "a + b"})["messages"][1]
    {'role': 'assistant', 'content': 'a + b'}
    """
    if "instruction" in row:
        said = (("user", row["instruction"]), ("assistant", row["output"]))
        return {"messages": [{"role": role, "content": text} for role, text in said]}
    name = "messages" if "messages" in row else "text"
    return {name: row[name]}


class _StandardLibrary:
    """Passages of the standard library, without end; each iteration begins anew.

    Args:
        count: how many are drawn at a time.
        seed: draws them.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed

    def __iter__(self) -> Iterator[Row]:
        for seed in itertools.count(self._seed):
            for text in calibration_passages(self._count, seed=seed, characters=_CHARACTERS):
                yield {"text": text}
