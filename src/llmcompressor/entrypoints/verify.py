# SPDX-License-Identifier: Apache-2.0
"""``verify``: check the files, the values and the servability of a written checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable

from llmcompressor.args.checks import path
from llmcompressor.checkpoint.source import local_directory
from llmcompressor.verification.check import verify_files
from llmcompressor.verification.facts import DEFAULT_TP, Deployment
from llmcompressor.verification.report import VerificationReport

__all__ = ["verify"]


def verify(
    checkpoint: str | os.PathLike[str],
    reference: str | os.PathLike[str] | None = None,
    *,
    serve: str | None = None,
    tp: int | Iterable[int] | None = None,
    gpu: str | None = None,
    dtype: str | None = None,
    workers: int | None = None,
) -> VerificationReport:
    """Verify a checkpoint: its files, structure and values, and the rules of servers.

    The files are read by code that is independent of the code that writes them, each tensor once
    and in slices, so the memory does not grow with the model.

    Args:
        checkpoint: folder, or the id of a model in the hub's cache.
        reference: the original model, likewise; with it every tensor is accounted for and every
            decoded weight is compared.
        serve: ``"vllm"``, ``"transformers"`` or ``"sglang"``; the rules of all three by default.
        tp: size of tensor parallelism, or several; 1, 2, 4 and 8 by default, where a misfit
            above 1 is a warning.
        gpu: the device's capability such as ``"sm90"``, or its name such as ``"h100"``.
        dtype: the dtype of activations while serving; the model's own by default.
        workers: number of reading threads; by default the number of cores, four at most.

    Returns:
        The report; its ``ok`` is True if there is no error.

    Raises:
        CheckpointError: a folder does not exist or holds no model, or the reference is damaged.
        ArgumentError: an argument about the deployment is invalid.

    Example::

        report = verify("./my-model-W4A16", reference="./my-model", serve="vllm", tp=4)
        print(report)
    """
    sizes = DEFAULT_TP if tp is None else (tp,) if isinstance(tp, int) else tuple(tp)
    deployment = Deployment(server=serve, tp=sizes, gpu=gpu, dtype=dtype)
    return verify_files(
        _folder("checkpoint", checkpoint),
        None if reference is None else _folder("reference", reference),
        deployment=deployment,
        workers=workers,
    )


def _folder(argument: str, given: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the folder of a model in the hub's cache; other values are returned unchanged."""
    model = path(argument, given)
    return local_directory(model) or model
