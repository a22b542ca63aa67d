#!/usr/bin/env bash
# Versions: transformers 5.24.0, tokenizers 0.23.3.
#
# Behaviour: `tokenizer(texts, truncation=True, max_length=8, padding=True)` and then `save_pretrained`: tokenizer.json
#   holds the truncation to 8 tokens and the padding of that last call. What reads the file with the tokenizers library
#   (Rust, Python or JavaScript) cuts every text to 8 tokens and pads each batch.
# Why it surprises: the arguments belong to one call; transformers itself does not cut when it reads the folder
#   again, so that whoever checks the folder with it sees nothing. Calling the tokenizer once more, of any text,
#   without truncation mends what is saved. Preparing calibration or training data and saving beside the model is
#   the usual order of things.
# Seen:
#   saved before any call:            truncation None, padding None
#   saved after a call with 8 tokens: truncation 8, padding BatchLongest
#   a text of 20 tokens: transformers reads 20, tokenizers 8, beside a text of one token [8, 8]
#   saved after one more plain call:  truncation None, padding None
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3

cd "$work"
HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY' 2> "$work/log" || { cat "$work/log"; exit 1; }
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = [f"w{number}" for number in range(50)]
backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["<unk>", "<pad>", *words])}, "<unk>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>")
text = " ".join(words[:20])


def saved(when):
    tokenizer.save_pretrained("folder")
    held = json.loads(Path("folder/tokenizer.json").read_text())
    cut, filled = (held["truncation"] or {}).get("max_length"), (held["padding"] or {}).get("strategy")
    print(f"{when:33} truncation {cut}, padding {filled}")
    return cut, filled


assert saved("saved before any call:") == (None, None)
tokenizer([text, "w1"], truncation=True, max_length=8, padding=True)
assert saved("saved after a call with 8 tokens:") == (8, "BatchLongest")
of_transformers = len(AutoTokenizer.from_pretrained("folder")(text).input_ids)
reader = Tokenizer.from_file("folder/tokenizer.json")
of_tokenizers = len(reader.encode(text).ids)
batch = [len(one.ids) for one in reader.encode_batch([text, "w1"])]
print(f"a text of 20 tokens: transformers reads {of_transformers}, tokenizers {of_tokenizers},",
      f"beside a text of one token {batch}")
assert (of_transformers, of_tokenizers, batch) == (20, 8, [8, 8])
tokenizer("w1")
assert saved("saved after one more plain call:") == (None, None)
PY
