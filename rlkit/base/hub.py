"""The Hugging Face hub: without a network, and as the place of a trained model."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from rlkit.base.errors import CheckpointError, RecipeError, explain

PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


@cache
def work_offline_without_network() -> None:
    """Switch the hub's libraries to their caches if the hub's host has no address, instead of half a minute of retries.

    Behind a proxy the host is not looked up: only the proxy knows its address.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if constants.HF_HUB_OFFLINE or not host or any(os.environ.get(name) for name in PROXIES):
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read by libraries that are imported later, and by child processes
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


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
