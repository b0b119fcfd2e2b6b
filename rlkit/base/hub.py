"""The Hugging Face hub without a network."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from urllib.parse import urlsplit

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
