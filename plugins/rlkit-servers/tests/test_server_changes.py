"""Weights that are sent as changes: what arrives is bit for bit what was sent, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlkit_servers.changes import (
    MAX_PAUSE,
    CheckpointReceiver,
    RefusedWeights,
    SentWeights,
    WeightReceiver,
    checksum_of,
    metadata_tensor,
    words_of,
)
from torch import Tensor, nn

Message = tuple[Mapping[str, Tensor], Mapping[str, str]]

SPECIAL = [float("nan"), -0.0, 0.0, float("inf"), float("-inf"), 1e-40, -1e-45, 1.0]


def random_weights(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors of several shapes; two names share one of them."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        "matrix": torch.randn(64, 33, generator=generator).to(dtype),
        "odd": torch.randn(7, generator=generator).to(dtype),
        "scalar": torch.tensor(1.5, dtype=dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "steps": torch.arange(300),
        "mask": torch.zeros(201, dtype=torch.bool),
        "bytes": torch.zeros(99, dtype=torch.uint8),
        "transposed": torch.randn(16, 40, generator=generator).to(dtype).T,
    }
    return weights | {"tied": weights["matrix"]}


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(a[n].dtype == b[n].dtype and torch.equal(words_of(a[n]), words_of(b[n])) for n in a)


class Pair:
    """A trainer's weights and a server's, both in buckets of two tensors."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.weights = random_weights(dtype)
        self.own = {name: torch.zeros_like(x).contiguous() for name, x in self.weights.items() if name != "tied"}
        self.own["tied"] = self.own["matrix"]
        self.sent = SentWeights()
        self.receiver = WeightReceiver(self.own)
        self.number = 0

    def messages(self, shared: bool | None = None) -> list[Message]:
        """Return the buckets of the next version; unless `shared` says so, compare what each side has."""
        self.number += 1
        self.sent.begin(f"v{self.number}", self.receiver.version == self.sent.label if shared is None else shared)
        items = list(self.weights.items())
        encoded = [self.sent.encode(items[i : i + 2]) for i in range(0, len(items), 2)]
        self.sent.end()
        return [(dict(tensors), metadata) for tensors, metadata in encoded]

    def receive(self, messages: list[Message], label: str = "") -> None:
        self.receiver.begin()
        for tensors, metadata in messages:
            self.receiver.load({name: x.clone() for name, x in tensors.items()}, dict(metadata))
        self.receiver.finish(label or f"v{self.number}")

    def learn(self, count: int = 3) -> None:
        """Change a few elements of each tensor, some to special values."""
        generator = torch.Generator().manual_seed(self.number)
        for tensor in self.weights.values():
            for _ in range(count if tensor.numel() else 0):
                at = tuple(int(torch.randint(size, (), generator=generator)) for size in tensor.shape)
                value = SPECIAL[int(torch.randint(len(SPECIAL), (), generator=generator))]
                tensor[at] = value if tensor.is_floating_point() else self.number % 2

    def heals(self) -> bool:
        """Whether the next update arrives, whatever has happened."""
        self.learn()
        self.receive(self.messages())
        return same_bits(self.own, self.weights) and self.receiver.version == self.sent.label


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_after_200_updates_weights_are_bit_for_bit_the_same(dtype: torch.dtype) -> None:
    pair = Pair(dtype)
    bases = []
    for _ in range(200):
        messages = pair.messages()
        bases.append(messages[0][1]["base"])
        pair.receive(messages)
        assert pair.receiver.version == f"v{pair.number}"
        assert same_bits(pair.own, pair.weights)
        pair.learn()
    assert bases == ["", *(f"v{number}" for number in range(1, 200))]


def test_only_elements_that_differ_are_sent() -> None:
    pair = Pair()
    pair.receive(pair.messages())
    assert pair.sent.changed_share == 1.0
    pair.weights["matrix"][5, 2] = -0.0
    pair.weights["matrix"][0, 1] = float("nan")
    pair.weights["odd"].mul_(-1)
    tensors = {name: x for message, _ in pair.messages() for name, x in message.items()}
    assert tensors["matrix:index"].tolist() == [1, 5 * 33 + 2]
    assert tensors["matrix:index"].dtype == torch.int32
    assert tensors["matrix:value"][0].isnan()
    assert torch.signbit(tensors["matrix:value"][1])
    assert torch.equal(tensors["odd"], pair.weights["odd"])
    assert tensors.keys() == {"matrix:index", "matrix:value", "odd", "tied:index", "tied:value"}
    assert pair.sent.bytes == 2 * 2 * (4 + 2) + 7 * 2
    elements = sum(x.numel() for x in pair.weights.values())
    assert pair.sent.changed_share == (2 + 2 + 7) / elements


def corrupt(messages: list[Message], data: st.DataObject) -> list[Message]:
    """Change one bit of one tensor that is sent."""
    filled = [(i, name) for i, (tensors, _) in enumerate(messages) for name, x in tensors.items() if x.numel()]
    number, name = data.draw(st.sampled_from(sorted(filled)))
    tensor = messages[number][0][name].clone()
    raw = tensor.view(-1).view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    return [({**t, name: tensor}, m) if i == number else (t, m) for i, (t, m) in enumerate(messages)]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_faulty_updates_are_refused_and_healed_by_a_full_one(data: st.DataObject) -> None:
    pair = Pair()
    pair.receive(pair.messages())
    for _ in range(data.draw(st.integers(1, 3))):
        pair.learn()
        messages = pair.messages()
        if not messages[0][1]["base"]:
            pair.receive(messages)
            continue
        number = data.draw(st.integers(0, len(messages) - 1))
        fault = data.draw(st.sampled_from(["lost", "bucket lost", "twice", "bucket twice", "late", "corrupt", "cut"]))
        if fault == "lost":
            pair.learn()
            assert_refused(pair, pair.messages(shared=True))
            continue
        if fault == "late":
            pair.learn()
            later = pair.messages(shared=False)
            pair.receive(later)
            assert_refused(pair, messages)
        elif fault == "twice":
            pair.receive(messages)
            assert_refused(pair, messages)
        elif fault == "bucket lost":
            assert_refused(pair, messages[:number] + messages[number + 1 :])
        elif fault == "bucket twice":
            assert_refused(pair, [*messages, messages[number]])
        elif fault == "corrupt":
            assert_refused_or_harmless(pair, corrupt(messages, data))
        else:
            pair.receiver.begin()
            pair.receiver.load(*messages[number])
    assert pair.heals()
    assert pair.heals()


def assert_refused(pair: Pair, messages: list[Message]) -> None:
    with pytest.raises(RefusedWeights):
        pair.receive(messages)


def assert_refused_or_harmless(pair: Pair, messages: list[Message]) -> None:
    """A byte of a bool that is not 0 is True, whatever its other bits are."""
    try:
        pair.receive(messages)
    except RefusedWeights:
        assert pair.receiver.version == ""
    else:
        assert same_bits(pair.own, pair.weights)


def test_the_order_of_buckets_within_an_update_is_free() -> None:
    pair = Pair()
    pair.receive(pair.messages())
    pair.learn()
    pair.receive(pair.messages()[::-1])
    assert same_bits(pair.own, pair.weights)
    assert pair.receiver.version == "v2"


def test_what_refuses_says_why() -> None:
    pair = Pair()
    pair.receive(pair.messages())
    pair.learn()
    messages = pair.messages()
    stranger = WeightReceiver(random_weights(torch.bfloat16))
    with pytest.raises(RefusedWeights, match="these are changes of v1, but the weights are unknown"):
        stranger.load(*messages[0])
    spoilt = {**messages[0][1], "checksums": json.dumps({"matrix": [1, 2]})}
    with pytest.raises(RefusedWeights, match="matrix has another checksum than the trainer's"):
        pair.receiver.load({}, spoilt)
    assert pair.receiver.version == ""
    pair.receive(pair.messages(shared=False))
    outside: dict[str, Any] = {"odd:index": torch.tensor([7]), "odd:value": torch.zeros(1, dtype=torch.bfloat16)}
    with pytest.raises(RefusedWeights, match="the changes of odd have indices outside of its 7 elements"):
        pair.receiver.load(outside, {"base": "v3", "version": "v4", "checksums": json.dumps({"odd": [0, 0]})})


def test_a_full_update_that_lacks_tensors_is_no_base() -> None:
    pair = Pair()
    pair.receive(pair.messages())
    pair.receive(pair.messages(shared=False)[1:])
    assert pair.receiver.version == ""
    assert pair.heals()


def test_dense_updates_are_full_and_compared_less_often() -> None:
    layer = nn.Linear(40, 40)
    own = {name: torch.zeros_like(x) for name, x in layer.named_parameters()}
    sent, receiver = SentWeights(), WeightReceiver(own)
    compared = []
    for number in range(300):
        sent.begin(str(number), receiver.version == sent.label != "")
        tensors, metadata = sent.encode([(n, x.detach()) for n, x in layer.named_parameters()])
        sent.end()
        receiver.begin()
        receiver.load(dict(tensors), metadata)
        receiver.finish(str(number))
        assert same_bits(own, dict(layer.named_parameters()))
        if metadata["base"]:
            compared.append(number)
            assert sent.changed_share == 1.0
        with torch.no_grad():
            layer.weight.add_(0.01)
            layer.bias.add_(0.01)
    assert compared == [1, 4, 8, 14, 24, 42, 76, 142, 208, 274]
    assert MAX_PAUSE == 64


def test_an_abandoned_update_leaves_no_copy() -> None:
    pair = Pair()
    pair.receive(pair.messages())
    pair.sent.begin("v2", True)
    pair.sent.encode([("matrix", pair.weights["matrix"])])
    pair.sent.abandon()
    assert pair.sent.label == ""
    assert pair.sent.encode([("odd", pair.weights["odd"])])[1] == {}
    assert pair.heals()


def test_a_server_may_keep_weights_in_a_wider_type() -> None:
    pair = Pair()
    pair.own["odd"] = pair.own["odd"].float()
    for number in range(6):
        pair.weights["odd"][number] *= -1 if number % 2 else 1
        pair.receive(pair.messages())
        assert pair.receiver.version == f"v{number + 1}"
        assert torch.equal(pair.own["odd"], pair.weights["odd"].float())
    assert pair.sent.full_updates == 1


def test_a_copy_of_a_checkpoint_takes_another_runs_type() -> None:
    receiver = CheckpointReceiver()
    for dtype in (torch.bfloat16, torch.float32):
        pair = Pair(dtype)
        for share in (False, True):
            for tensors, metadata in pair.messages(shared=share):
                metadata_name, packed = metadata_tensor(dict(metadata))
                names = receiver.receive({**tensors, metadata_name: packed})
                assert names == list(dict.fromkeys(name.partition(":")[0] for name in tensors))
            assert receiver.receive(dict([metadata_tensor({"finish": f"v{pair.number}"})])) is None
            assert same_bits(receiver.copies, pair.weights)
            pair.learn()


def test_checksums_depend_on_values_and_their_order() -> None:
    assert checksum_of(torch.tensor([3, 4])) == [7, 11]
    assert checksum_of(torch.tensor([4, 3])) == [7, 10]
    assert checksum_of(torch.tensor([-1])) == [2**64 - 1, 2**64 - 1]
    long = torch.arange(200_000) * 2**40
    positions = list(range(1, 200_001))
    total = sum(p * ((p - 1) * 2**40) for p in positions)
    assert checksum_of(long) == [int(long.sum()) % 2**64, total % 2**64]
