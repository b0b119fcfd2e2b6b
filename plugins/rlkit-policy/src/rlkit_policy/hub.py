"""The Hugging Face hub as the place of a trained model."""

from __future__ import annotations

import shlex
from pathlib import Path

from rlkit.base.errors import CheckpointError, RecipeError, explain


def check_repository(name: str) -> None:
    """Refuse a name that no repository can have, and a push without a token.

    Raises:
        RecipeError: The name is invalid, or there is no token.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RecipeError(f"--push is {name!r}, expected a repository such as 'user/model': {error}") from error
    if get_token() is None:
        raise RecipeError("--push needs a token of the hub, and there is none; run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, name: str, private: bool) -> str:
    """Add a commit with a folder's files to a repository of the hub, which is created if it does not exist.

    Args:
        folder: The folder of a model; it stays as it is.
        name: Name of the repository.
        private: Whether a new repository is private; an existing one keeps its visibility.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: The hub refuses it, or cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi(library_name="rlkit")
        repository = api.create_repo(name, private=private, exist_ok=True).repo_id
        message = "A policy that rlkit trained"
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message).commit_url)
    except Exception as error:
        visibility = " --private" if private else ""
        raise CheckpointError(
            f"the push to {name!r} failed: {explain(error)}. The export in {str(folder)!r} is complete; to push it "
            f"later: hf upload {name} {shlex.quote(str(folder))}{visibility}"
        ) from error
