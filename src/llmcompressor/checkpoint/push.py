# SPDX-License-Identifier: Apache-2.0
"""Upload of a written checkpoint to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from transformers.utils.hub import create_and_tag_model_card

from llmcompressor.logger import logger

__all__ = ["push_files"]

_CARD = "README.md"


def push_files(
    folder: Path,
    names: Iterable[str],
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: Sequence[str] | None = None,
) -> None:
    """Upload files unchanged, with a model card if there is none among them.

    Args:
        folder: the folder of the files.
        names: their paths below ``folder``.
        repo_id: the repository; it is created if it does not exist.
        commit_message: by default "Upload model".
        commit_description: more about the commit.
        private: make a created repository private.
        token: the token to log in with.
        revision: the branch; it is created if it does not exist.
        create_pr: open a pull request.
        tags: tags of the model card.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    files = sorted(names)
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in files
    ]
    if _CARD not in files:
        card = create_and_tag_model_card(repo_id, None if tags is None else list(tags), token)  # type: ignore[arg-type]  # it takes a bool too
        operations.append(CommitOperationAdd(_CARD, str(card).encode()))
    if revision is not None and not revision.startswith("refs/pr") and not create_pr:
        api.create_branch(repo_id=repo_id, branch=revision, exist_ok=True)
    api.create_commit(
        repo_id=repo_id,
        operations=operations,
        commit_message=commit_message or "Upload model",
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )
    logger.info(f"Uploaded {len(operations)} files to {repo_id}.")
