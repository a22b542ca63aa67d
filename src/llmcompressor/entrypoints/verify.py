# SPDX-License-Identifier: Apache-2.0
"""``verify``: read a written checkpoint as its readers will, and say what is wrong with it."""

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
    """Check a checkpoint: its files, its structure, its values, and the rules of servers.

    The files are read by code that shares nothing with what writes them, each tensor once and in
    slices, so the memory does not grow with the model.

    Args:
        checkpoint: folder, or the id of a model in the hub's cache.
        reference: the model that it was made from, likewise; with it every tensor is accounted
            for and every decoded weight is compared.
        serve: ``"vllm"``, ``"transformers"`` or ``"sglang"``; the rules of all three by default.
        tp: over how many devices it is to be split; 1, 2, 4 and 8 by default, where a misfit
            above 1 is a warning.
        gpu: the device's capability as ``"sm90"``, or its name as ``"h100"``.
        dtype: the dtype of activations while serving; the model's own by default.
        workers: threads that read; as many as there are cores by default, four at most.

    Returns:
        The report; its ``ok`` says whether there is no error.

    Raises:
        CheckpointError: a folder is not there or holds no model, or the reference is damaged.
        ArgumentError: a fact about the deployment is not known.

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
    """The folder of a model in the hub's cache; anything else as it is."""
    model = path(argument, given)
    return local_directory(model) or model
