"""Messages to data, and results to messages."""

from __future__ import annotations

import numpy as np
import pytest
from rlkit_tinker import ForwardBackwardOutput, RequestFailedError, TensorData
from rlkit_tinker.server.codec import data_of, encode_pass
from rlkit_tinker.server.messages import CLASSES


def test_sparse_matrices_are_read_and_hostile_ones_refused() -> None:
    """target_tokens [3,2] with 4 of 6 numbers, as the SDK sends 2-D tensors of torch."""
    message = CLASSES["ForwardBackwardRequest"]()
    row = message.data.add()
    row.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    tensor = row.loss_fn_inputs["target_tokens"]
    tensor.dtype = 2
    tensor.shape.extend([3, 2])
    tensor.sparse_csr.values = np.array([5, 6, 7, 8], "<i8").tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 2, 2, 4], "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array([0, 1, 0, 1], "<i8").tobytes()
    [datum] = data_of(message)
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [[5, 6], [0, 0], [7, 8]]
    hostile = [
        ("shape", [2**40, 2**40]), ("shape", [3, 1]), ("shape", [3]), ("shape", [-3, -2]), ("shape", [2, 2]),
        ("crow_indices", [0, 2, 1, 4]), ("crow_indices", [0, 2, 2, 9]), ("crow_indices", []),
        ("crow_indices", [1, 2, 2, 4]), ("col_indices", [0, 1, 0, -1]),
        ("col_indices", [0, 1, 0, 2]), ("col_indices", [0]), ("values", [1]),
    ]  # fmt: skip
    for name, numbers in hostile:
        broken = CLASSES["ForwardBackwardRequest"]()
        broken.CopyFrom(message)
        target = broken.data[0].loss_fn_inputs["target_tokens"]
        if name == "shape":
            del target.shape[:]
            target.shape.extend(numbers)
        else:
            setattr(target.sparse_csr, name, np.array(numbers, "<i8").tobytes())
        with pytest.raises(RequestFailedError, match="datum 0: 'target_tokens' has"):
            data_of(broken)


def test_results_of_unequal_widths_are_records_of_their_own() -> None:
    """Log-probs [3], [3], [2,2]: two records, with offsets in bytes."""
    arrays = [np.arange(3, dtype=np.float32), np.ones(3, np.float32), np.array([[1, 2], [3, 4]], np.float32)]
    output = ForwardBackwardOutput([{"logprobs": TensorData(array)} for array in arrays], {"loss:sum": 1.5})
    message = CLASSES["ForwardBackwardOutput"].FromString(encode_pass(output))
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1]
    fields = [record.fields["logprobs"] for record in message.loss_fn_outputs]
    assert [list(field.trailing_shape) for field in fields] == [[], [2]]
    assert np.frombuffer(fields[0].offsets, "<i8").tolist() == [0, 12, 24]
    assert np.frombuffer(fields[1].data, "<f4").tolist() == [1, 2, 3, 4]
    assert dict(message.metrics) == {"loss:sum": 1.5}
