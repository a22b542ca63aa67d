#!/usr/bin/env bash
# Versions: datasets 5.2.0, numpy 2.4.6, pandas 3.1.1.
#
# Behaviour: a mask of truth values is taken for row numbers: False is row 0, True is row 1. `rows[mask]` with a list or
#   an array, and `rows.select(mask)` with an array, give as many rows as the mask is long, all of them the first two.
# Why it surprises: arrays of numpy and torch, and frames of pandas, take the same mask as a choice of rows, and
#   `select` says no more than "indices". A filter by length or by a score, `rows.select(lengths < 512)`, gives a data
#   set of the full size and of one text over and over. `rows.select([True, …])` with a list is an error; with an
#   array it is none.
# Seen:
#   mask [True, False, False, True, True]
#   pandas          ['a', 'd', 'e']
#   rows[list]      ['b', 'a', 'a', 'b', 'b']
#   rows[array]     ['b', 'a', 'a', 'b', 'b']
#   rows.select     ['b', 'a', 'a', 'b', 'b']
#   texts of less than 5 letters of a thousand: 1000 rows, 2 different ones
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6 pandas==3.1.1

"$work/venv/bin/python" - <<'PY'
import numpy as np
from datasets import Dataset

rows = Dataset.from_dict({"text": list("abcde")})
mask = np.array([True, False, False, True, True])
print("mask", mask.tolist())
ways = {
    "pandas": list(rows.to_pandas()[mask]["text"]),
    "rows[list]": list(rows[mask.tolist()]["text"]),
    "rows[array]": list(rows[mask]["text"]),
    "rows.select": list(rows.select(mask)["text"]),
}
for name, texts in ways.items():
    print(f"{name:15}", texts)
    assert texts == (["a", "d", "e"] if name == "pandas" else ["b", "a", "a", "b", "b"])

many = Dataset.from_dict({"text": [str(number) * (1 + number % 7) for number in range(1000)]})
lengths = np.array([len(text) for text in many["text"]])
kept = many.select(lengths < 5)
print(f"texts of less than 5 letters of a thousand: {len(kept)} rows, {len(set(kept['text']))} different ones")
assert len(kept) == 1000 and len(set(kept["text"])) == 2 and (lengths < 5).sum() < 1000
PY
