#!/usr/bin/env bash
# Versions: datasets 5.2.0, torch 2.13.0, numpy 2.4.6.
#
# Behaviour: which rows `stream.take(n)` and `stream.skip(n)` give depends on the number of workers of the DataLoader
#   that reads them: a data set of several shards hands n out over the workers, and each counts its part within its
#   own shards. A `take` that is read in the process and the `skip` that is trained on by workers overlap.
# Why it surprises: documented are "the first n" and the rest, and to hold out a part of a stream is what the two
#   are for. The counts stay right (5 and 7 of 12), so that nothing looks wrong: rows of the held-out part are trained
#   on, others are in neither part. The number of workers is a matter of speed, or so one thinks.
# Seen:
#   4 shards, workers 0: take(5) [0, 1, 2, 3, 4]  skip(5) [5, 6, 7, 8, 9, 10, 11]
#   4 shards, workers 4: take(5) [0, 1, 3, 6, 9]  skip(5) [2, 4, 5, 7, 8, 10, 11]
#   held out in the process, trained on by 4 workers: in both [2, 4], in neither [6, 9]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 torch==2.13.0 numpy==2.4.6

cat > "$work/show.py" <<'PY'
from datasets import Dataset
from torch.utils.data import DataLoader


def read(stream, workers):
    return sorted(int(row["id"]) for row in DataLoader(stream, batch_size=None, num_workers=workers))


if __name__ == "__main__":
    stream = Dataset.from_dict({"id": range(12)}).to_iterable_dataset(num_shards=4)
    parts = {}
    for workers in (0, 4):
        taken, rest = parts[workers] = read(stream.take(5), workers), read(stream.skip(5), workers)
        print(f"4 shards, workers {workers}: take(5) {taken}  skip(5) {rest}")
        assert len(taken) == 5 and len(rest) == 7 and sorted(taken + rest) == list(range(12))
    held_out, trained_on = parts[0][0], parts[4][1]
    both = sorted(set(held_out) & set(trained_on))
    neither = sorted(set(range(12)) - set(held_out) - set(trained_on))
    print(f"held out in the process, trained on by 4 workers: in both {both}, in neither {neither}")
    assert held_out == [0, 1, 2, 3, 4] and parts[4][0] != held_out and both and neither
PY
"$work/venv/bin/python" -W ignore "$work/show.py"
