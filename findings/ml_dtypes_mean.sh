#!/usr/bin/env bash
# Versions: ml_dtypes 0.6.0, numpy 2.4.6.
#
# Behaviour: sum, mean, average, var and cumsum of an array of bfloat16, float8 or int4 add in that very type, one
#   value after another. A sum of ones stops at 256 in bfloat16 and at 16 in float8_e4m3fn, and wraps at 8 in int4:
#   the mean of a thousand ones is 0.256, 0.016 and 0.
# Why it surprises: numpy's own float16 has the right mean (it is added in float32), int8 is added in int64, and np.dot of
#   the very same bfloat16 array is right. So the mean of the squares of weights or activations, read from a file
#   in the type that they have there, is silently a fraction of what it is, the less the more there are.
# Seen:
#   float16        mean 1         sum 1000
#   int8           mean 1         sum 1000
#   bfloat16       mean 0.255859  sum 256
#   float8_e4m3fn  mean 0.015625  sum 16
#   int4           mean 0         sum -8
#   bfloat16: np.dot 1000, variance of equal numbers 0.255859, mean of squares of a normal distribution 0.1709 (0.9921)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6

"$work/venv/bin/python" - <<'PY'
import ml_dtypes
import numpy as np

kinds = (np.float16, np.int8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)
seen = {}
for kind in kinds:
    ones = np.ones(1000, kind)
    seen[kind.__name__] = float(ones.mean()), float(ones.sum())
    print(f"{kind.__name__:14} mean {seen[kind.__name__][0]:<9g} sum {seen[kind.__name__][1]:g}")
    assert np.mean(ones, dtype=np.float32) == 1
assert seen["float16"] == seen["int8"] == (1, 1000)
assert seen["bfloat16"] == (0.255859375, 256) and seen["float8_e4m3fn"] == (0.015625, 16)
assert seen["int4"] == (0, -8)

ones = np.ones(1000, ml_dtypes.bfloat16)
normal = np.random.default_rng(0).standard_normal(20000).astype(ml_dtypes.bfloat16)
squares = float(np.mean(np.square(normal))), float(np.mean(np.square(normal.astype(np.float32))))
print(f"bfloat16: np.dot {float(np.dot(ones, ones)):g}, variance of equal numbers {float(ones.var()):g},",
      f"mean of squares of a normal distribution {squares[0]:.4f} ({squares[1]:.4f})")
assert np.dot(ones, ones) == 1000 and ones.var() != 0
assert squares[0] < 0.25 and abs(squares[1] - 1) < 0.05
PY
