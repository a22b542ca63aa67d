#!/usr/bin/env bash
# Versions: onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6.
#
# Behaviour: QuantizeLinear of ONNX's own reference evaluator gives the *smallest* code for large positive numbers: it
#   goes through int32 before it clips, and what exceeds that becomes its minimum. A quotient from 2147483648 on,
#   and infinity, becomes -128 as INT8 and 0 as UINT8.
# Why it surprises: the operator saturates by its definition, and the reference is what others are compared with. A
#   small scale is enough: 5 with a scale of 2e-9. The sign of the largest weights or activations flips. (On x86: what
#   a processor makes of a float that no int32 holds is its own matter, and numpy leaves it to it.)
# Seen (onnxruntime | reference):
#   INT8, scale 1, of [1, 1000, 2e9, 3e9, inf]   1 127 127 127 127 | 1 127 127 -128 -128
#   UINT8, scale 1, of [1, 1000, 2e9, 3e9, inf]   1 255 255 255 255 | 1 255 255 0 0
#   INT8, scale 2e-09, of [0.5, 4, 5, -5]   127 127 127 -128 | 127 127 -128 -128
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6

"$work/venv/bin/python" -W ignore - <<'PY'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def quantize(name, scale, numbers):
    kind, count = getattr(TensorProto, name), len(numbers)
    graph = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])],
        "quantize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [count])],
        [helper.make_tensor_value_info("y", kind, [count])],
        [helper.make_tensor("scale", TensorProto.FLOAT, [], [scale]), helper.make_tensor("zero", kind, [], [0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {"x": np.array(numbers, np.float32)}
    ours, reference = (run.run(None, given)[0].tolist() for run in (session, ReferenceEvaluator(model)))
    shown = ", ".join(f"{one:g}".replace("e+0", "e") for one in numbers)
    print(f"{name}, scale {scale:g}, of [{shown}]  ", *ours, "|", *reference)
    return ours, reference


large = [1, 1000, 2e9, 3e9, float("inf")]
assert quantize("INT8", 1.0, large) == ([1, 127, 127, 127, 127], [1, 127, 127, -128, -128])
assert quantize("UINT8", 1.0, large) == ([1, 255, 255, 255, 255], [1, 255, 255, 0, 0])
assert quantize("INT8", 2e-9, [0.5, 4, 5, -5]) == ([127, 127, 127, -128], [127, 127, -128, -128])
PY
