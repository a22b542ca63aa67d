# SPDX-License-Identifier: Apache-2.0
"""Pictures reach the processor from wherever rows hold them, or their lack is an error."""

from __future__ import annotations

import base64
import copy
import io

import numpy
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, LlavaProcessor

from llmcompressor.errors import DatasetError

TEMPLATE = (
    "{% for turn in messages %}{% if turn['content'] is string %}{{ turn['content'] }}"
    "{% else %}{% for part in turn['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
TEXT = "<image>x = 1"
FIRST = {"shuffle_calibration_samples": False}


@pytest.fixture(scope="module")
def processor(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.add_tokens(["<image>"], special_tokens=True)
    return LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        own,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def picture(seed: int = 0) -> Image.Image:
    drawn = numpy.random.default_rng(seed).integers(0, 255, (9, 8, 3), dtype=numpy.uint8)
    return Image.fromarray(drawn)


def turns(*shown: dict) -> list[dict]:
    parts = [*({"type": "image", **one} for one in shown), {"type": "text", "text": "x = 1"}]
    return [{"role": "user", "content": parts}]


def encoded(image: Image.Image) -> str:
    written = io.BytesIO()
    image.save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


@pytest.fixture
def pixels(batches, processor):
    def made(row: dict) -> torch.Tensor:
        (batch,) = batches([row], processor=processor)
        assert batch["pixel_values"].shape[1:] == (3, 8, 8)
        return batch["pixel_values"]

    return made


def test_however_a_row_holds_a_picture_the_model_gets_it(pixels, tmp_path):
    image, file = picture(), tmp_path / "picture.png"
    image.save(file)
    rows = [
        {"text": TEXT, "images": image},
        {"text": TEXT, "images": [image]},
        {"text": TEXT, "image": image},
        {"messages": turns({}), "images": image},
        {"messages": turns({}), "image": [image]},
        {"messages": turns({"image": None}), "image": image},
        {"messages": turns({"image": image})},
        {"messages": turns({"image": str(file)})},
        {"messages": turns({"path": str(file)})},
        {"messages": turns({"url": str(file), "path": None})},
        {"messages": turns({"base64": encoded(image)})},
    ]
    first, *others = map(pixels, rows)
    assert all(torch.equal(first, one) for one in others)


def test_a_placeholder_without_a_picture_is_refused(batches, processor):
    for row, match in [
        ({"text": TEXT}, "sample 0: the text has <image>.*column 'images'"),
        ({"text": TEXT, "pictures": "here"}, "sample 0: the text has <image>"),
        ({"messages": turns({})}, "sample 0: the text has <image>"),
        ({"messages": turns({"image": "x.png"})}, r"x\.png.*cannot be read"),
        ({"messages": turns({}, {"image": 5})}, "sample 0: 1 of 2 parts for images"),
    ]:
        with pytest.raises(DatasetError, match=match):
            batches([row], processor=processor)


def test_no_cut_takes_tokens_that_stand_for_a_picture(batches, processor):
    """Whichever batch it is: the model would fail in the middle of a run."""
    for how, remedy in [
        ({"batch_size": 2}, "data_collator='padding'"),
        ({"max_seq_length": 5}, "larger max_seq_length"),
        ({"batch_size": 2, "data_collator": "padding"}, None),
        ({}, None),
    ]:
        made = processor(text="x = 1 and then <image>", images=picture(), return_tensors="np")
        rows = [{"input_ids": [5, 6, 7]}] * 3 + [dict(made)]
        if remedy is None:
            assert "pixel_values" in batches(rows, processor=processor, **FIRST, **how)[-1]
            continue
        with pytest.raises(DatasetError, match=r"to \d tokens, sample 3 would lose 4 of") as error:
            batches(rows, processor=processor, **FIRST, **how)
        assert remedy in error.value.remedy


def test_for_a_tokenizer_no_picture_is_read(batches, processor):
    """Its token for one is a token like others."""
    for shown in ["x.png", "http://127.0.0.1:9/x.png"]:
        tokenizer = copy.deepcopy(processor.tokenizer)
        tokenizer.chat_template, tokenizer.image_token = TEMPLATE, "<image>"
        (batch,) = batches([{"messages": turns({}, {"image": shown})}], processor=tokenizer)
        assert batch["input_ids"][0].tolist() == tokenizer("<image>" + TEXT)["input_ids"]


def test_an_address_that_cannot_be_read_is_told(batches, processor):
    with pytest.raises(DatasetError, match=r"sample 0: The picture http.*cannot be read"):
        batches([{"messages": turns({"url": "http://127.0.0.1:9/x.png"})}], processor=processor)
