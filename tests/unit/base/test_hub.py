"""The hub where there is no network."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from rlkit.base.errors import RecipeError
from rlkit.base.hub import PROXIES, work_offline_without_network
from rlkit.models.config import load_config
from rlkit.recipe import Model


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    work_offline_without_network.cache_clear()
    yield
    work_offline_without_network.cache_clear()


def without_address(*_: object) -> None:
    raise socket.gaierror(-2, "Name or service not known")


def test_a_host_without_an_address_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", without_address)
    with pytest.raises(RecipeError) as error:
        load_config(Model("nobody/nothing"))
    assert constants.HF_HUB_OFFLINE
    message = str(error.value)
    assert "download it with `hf download nobody/nothing --local-dir FOLDER`, and set model.path to that" in message


def test_a_host_with_an_address_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    work_offline_without_network()
    assert not constants.HF_HUB_OFFLINE


def test_a_proxy_is_asked_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", without_address)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    work_offline_without_network()
    assert not constants.HF_HUB_OFFLINE
