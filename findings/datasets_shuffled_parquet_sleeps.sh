#!/usr/bin/env bash
# Versions: datasets 5.2.0, pyarrow 26.0.1.
#
# Behaviour: reading a streamed parquet data set that was shuffled ends with a sleep of five seconds, whether all
#   rows were read or three were taken. max_buffer_input_shards=1 has none.
# Why it surprises: the rows are there after milliseconds; the same stream without shuffle ends at once; nothing is
#   said while it sleeps. A mix of ten such streams takes 50 s to close. The sleep is meant for pyarrow's threads.
# Seen: in order 0.0 s, shuffled 5.0 s, take(3) of the shuffled 5.0 s, shuffled with max_buffer_input_shards=1 0.0 s
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1

cd "$work"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
import time

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset

files = [f"{number}.parquet" for number in range(4)]
for file in files:
    pq.write_table(pa.table({"text": [f"{file} {row}" for row in range(50)]}), file)


def seconds(stream, rows):
    began = time.perf_counter()
    assert len(list(stream)) == rows
    return time.perf_counter() - began


stream = load_dataset("parquet", data_files=files, split="train", streaming=True)
seconds(stream, 200)  # imports
found = {
    "in order": seconds(stream, 200),
    "shuffled": seconds(stream.shuffle(seed=0, buffer_size=10), 200),
    "shuffled, take(3)": seconds(stream.shuffle(seed=0, buffer_size=10).take(3), 3),
    "shuffled, one file": seconds(
        stream.shuffle(seed=0, buffer_size=10, max_buffer_input_shards=1), 200
    ),
}
for name, took in found.items():
    print(f"{name}: {took:.1f} s")
assert found["in order"] < 1 and found["shuffled, one file"] < 1
assert 4.9 < found["shuffled"] < 7 and 4.9 < found["shuffled, take(3)"] < 7
PY
