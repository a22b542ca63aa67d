#!/usr/bin/env bash
# Versions: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6.
#
# Behaviour: Cast from a float to INT4 or UINT4 rounds to the nearest whole number, halves away from zero. Cast to INT8
#   or INT32 of the same numbers cuts off what stands behind the point.
# Why it surprises: one operator, two meanings by the width of the target. The reference evaluator of ONNX cuts off
#   in all of them, as C and numpy do; QuantizeLinear rounds halves to even, so that this is a third rule. A model that
#   casts to INT8 and is changed to INT4 gets other numbers although all of them fit.
# Seen:
#   of           [0.4, 0.5, 0.6, 1.5, 2.5, -0.6, -1.5, 6.9]
#   INT4 by onnxruntime [0, 1, 1, 2, 3, -1, -2, 7]  by the reference [0, 0, 0, 1, 2, 0, -1, 6]
#   INT8 by onnxruntime [0, 0, 0, 1, 2, 0, -1, 6]  by the reference [0, 0, 0, 1, 2, 0, -1, 6]
#   INT32 by onnxruntime [0, 0, 0, 1, 2, 0, -1, 6]  by the reference [0, 0, 0, 1, 2, 0, -1, 6]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6

"$work/venv/bin/python" - <<'PY'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

numbers = np.array([0.4, 0.5, 0.6, 1.5, 2.5, -0.6, -1.5, 6.9], np.float32)


def cast(name):
    """Cast to a type and back to float, by both."""
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["whole"], to=getattr(TensorProto, name)),
            helper.make_node("Cast", ["whole"], ["y"], to=TensorProto.FLOAT),
        ],
        "cast",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results = [one.run(None, {"x": numbers})[0].astype(int).tolist() for one in (session, ReferenceEvaluator(model))]
    print(name, "by onnxruntime", results[0], " by the reference", results[1])
    return results


print("of          ", [round(float(one), 1) for one in numbers])
cut = np.trunc(numbers).astype(int).tolist()
assert cast("INT4") == [[0, 1, 1, 2, 3, -1, -2, 7], cut]
assert cast("INT8") == [cut, cut]
assert cast("INT32") == [cut, cut]
PY
