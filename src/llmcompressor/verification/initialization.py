# SPDX-License-Identifier: Apache-2.0
"""Whose weights transformers 5.17 names while it initializes a model, as a table.

After a load transformers passes over every module to initialize what the file did not hold. What
was loaded is not touched, but the ``_init_weights`` of these model types reads ``.weight`` of
Linears to see that. Types without a row read none but those of embeddings, which all types do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["NAMED", "Named", "named_weights"]

Named = tuple[str, re.Pattern[str]]
"""A model type, and what the paths of the modules match whose weights it names."""


def _last(names: str) -> str:
    """A pattern for modules whose paths end so."""
    return rf"(?:.*\.)?(?:{names})"


_ALL = r".*"
_CLIP = _last(r"vision_model\..*\.(?:fc[12]|[qkv]_proj|out_proj)|(?:text|visual)_projection")
_DEFORMABLE = r"attention_weights|sampling_offsets"
_DEFORMABLE_ALL = rf"{_DEFORMABLE}|value_proj|output_proj"
_T5 = r"\w*[aA]ttention\.[qkvo]|wi(?:_[01])?|wo"

_ROWS: tuple[tuple[str, str], ...] = (
    # all of their Linears
    ("blt modernbert modernbert-decoder pop2piano recurrent_gemma rwkv xlstm", _ALL),
    ("siglip siglip_vision_model siglip2 siglip2_vision_model", _ALL),
    ("clipseg clvp kosmos-2 mgp-str owlv2 owlvit pix2struct videoprism", _ALL),
    ("chinese_clip_vision_model mlcd_vision_model videoprism_vision_model", _ALL),
    ("bridgetower clap fastspeech2_conformer fastspeech2_conformer_with_hifigan", _ALL),
    ("cvt depth_pro dinov2 dinov2_with_registers dinov3_vit hiera ijepa pvt pvt_v2", _ALL),
    ("radio sapiens2 seggpt swiftformer swin2sr timesformer tipsv2_vision_model", _ALL),
    ("vitdet vjepa2", _ALL),
    # some of them
    ("t5 mt5 umt5 longt5 udop", _last(_T5)),
    ("switch_transformers", _last(rf"{_T5}|router\.classifier|lm_head")),
    ("mamba falcon_mamba", _last(r"mixer\.(?:dt_proj|out_proj)")),
    ("mamba2", _last(r"mixer\.out_proj")),
    ("falcon", _last(r"h\.\d+\..*")),
    ("gpt_bigcode", _last("c_proj")),
    ("nanochat", _last(r"self_attn\.o_proj")),
    ("modernvbert", _last(r"lm_head|modality_projection")),
    ("xcodec", _last("fc[12]?")),
    ("neomme", _last(r"o_proj|mlp\.down_proj|lm_head")),
    ("afmoe", _last(r"router\.gate")),
    ("longcat_flash", _last(r"router\.classifier")),
    ("phimoe", _last("router|gate")),
    ("phi4_multimodal", _last(r"img_processor\..*")),
    ("lfm2_vl", _last(r"vision_tower\..*")),
    ("align", _last("text_projection")),
    ("altclip chinese_clip", _CLIP),
    ("groupvit", _last(r".*(?:fc[12]|attn\.[qkv]_proj|out_proj)")),
    (
        "xclip",
        _last(r"fc[12]|(?:self|message)_attn\.[qkv]_proj|out_proj|(?:text|visual)_projection"),
    ),
    (
        "data2vec-audio speecht5 unispeech unispeech-sat wav2vec2 wav2vec2-bert "
        "wav2vec2-conformer wavlm neucodec xcodec2",
        _last(r"feature_projection\.projection"),
    ),
    ("sam3_lite_text_text_model", _last("projection")),
    ("d_fine", _last(rf"{_DEFORMABLE}|enc_score_head|gate|reg_conf\.layers\.\d+")),
    (
        "deimv2",
        _last(rf"{_DEFORMABLE}|enc_score_head|gate|reg_conf\.layers\.\d+|(?:gate|up|down)_proj"),
    ),
    (
        "grounding-dino mm-grounding-dino",
        _last(rf"{_DEFORMABLE_ALL}|\w*(?:text|vision)_proj|layers\.\d+"),
    ),
    ("mask2former", _last(_DEFORMABLE_ALL)),
    ("oneformer", _last(rf"{_DEFORMABLE_ALL}|layers(?:\.\d+)+")),
    ("lw_detr rf_detr", _last(rf"{_DEFORMABLE_ALL}|backbone\.encoder\..*")),
    ("pp_doclayout_v3", _last(rf"{_DEFORMABLE_ALL}|class_embed|enc_score_head")),
    ("rt_detr rt_detr_v2", _last(rf"{_DEFORMABLE_ALL}|enc_score_head")),
)
NAMED: Mapping[str, str] = {name: pattern for names, pattern in _ROWS for name in names.split()}
# How the path of a model within a model says which part of config.json it is.
_PLACES = {"vision": "vision|visual|image|img", "text": "text|language", "audio": "audio|speech"}


def named_weights(config: Mapping[str, Any]) -> list[Named]:
    """The rows for a model, and for the models that it is made of.

    Args:
        config: the content of ``config.json``.

    >>> [(name, path.pattern) for name, path in named_weights({"model_type": "rwkv"})]
    [('rwkv', '.*')]
    """
    return [(name, re.compile(pattern)) for name, pattern in _rows(config, "")]


def _rows(config: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
    name = str(config.get("model_type") or "")
    if name in NAMED:
        yield name, f"{place}{NAMED[name]}"
    for key, part in config.items():
        if isinstance(part, Mapping) and not key.startswith("quantization"):
            stem = key.removesuffix("_config")
            yield from _rows(part, rf"(?:.*\.)?(?:{_PLACES.get(stem, re.escape(stem))})\w*\.")
