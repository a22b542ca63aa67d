#!/usr/bin/env bash
# Versions: safetensors 0.8.0 (and 0.7.0 to compare), numpy 2.4.6, mlx 0.32.4.
#
# Behaviour: safetensors.numpy.save writes the memory of an array in the order in which it lies there and calls
#   it by the shape of the array. A transposed matrix arrives with its values in other places. safetensors.mlx goes
#   through it and does the same. There is neither an error nor a warning.
# Why it surprises: 0.7.0 wrote the same call rightly; safetensors.torch raises ValueError for a tensor that is not
#   contiguous; an mlx array does not even tell its user how it lies in memory. The docstring asks for contiguous
#   arrays, and nothing checks it.
# Seen:
#   safetensors 0.7.0: numpy [[0, 3], [1, 4], [2, 5]] -> [[0, 3], [1, 4], [2, 5]]
#   safetensors 0.8.0: numpy [[0, 3], [1, 4], [2, 5]] -> [[0, 1], [2, 3], [4, 5]]
#   safetensors 0.7.0: mlx [[0, 3], [1, 4], [2, 5]] -> [[0, 3], [1, 4], [2, 5]]
#   safetensors 0.8.0: mlx [[0, 3], [1, 4], [2, 5]] -> [[0, 1], [2, 3], [4, 5]]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"

cat > "$work/show.py" <<'PY'
import sys

import mlx.core as mx
import numpy as np
import safetensors.mlx
import safetensors.numpy

right = sys.argv[1] == "0.7.0"
matrix = np.arange(6, dtype=np.int32).reshape(2, 3)
for name, library, given in (
    ("numpy", safetensors.numpy, matrix.T),
    ("mlx", safetensors.mlx, mx.array(matrix).T),
):
    read = safetensors.numpy.load(library.save({"weight": given}))["weight"]
    print(f"safetensors {sys.argv[1]}: {name} {given.tolist()} -> {read.tolist()}")
    assert read.shape == (3, 2)
    assert (read.tolist() == given.tolist()) is right
    if not right:
        assert read.ravel().tolist() == [0, 1, 2, 3, 4, 5]
PY
for version in 0.7.0 0.8.0; do
    "$work/venv/bin/pip" install --quiet "safetensors==$version" numpy==2.4.6 "mlx[cpu]==0.32.4"
    "$work/venv/bin/python" "$work/show.py" "$version"
done
