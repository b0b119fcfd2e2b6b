"""The protobuf messages of the Tinker API: the fields of its `tinker_public.proto` that this server reads or writes."""

from __future__ import annotations

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

MESSAGES = {
    "EncodedTextChunk": "1 bytes tokens",
    "Chunk": "1 EncodedTextChunk encoded_text, 2 bytes image, 3 bytes dmel",
    "SparseCsr": "1 bytes values, 2 bytes crow_indices, 3 bytes col_indices",
    "Tensor": "1 bytes dense, 2 SparseCsr sparse_csr, 3 int32 dtype, 4 int64* shape",
    "Datum": "1 Chunk* model_input, 2 Tensor{} loss_fn_inputs",
    "LossConfigValue": "1 double number, 2 string text",
    "ForwardBackwardRequest": "1 string model_id, 2 int32 seq_id, 3 Datum* data, 4 string loss_fn, "
    "5 double{} loss_fn_config, 6 bool forward_only, 7 LossConfigValue{} loss_fn_config_v2",
    "BatchedTensor": "1 bytes data, 2 bytes offsets, 3 int32 dtype, 4 int64* trailing_shape",
    "ArrayRecord": "1 string type_tag, 2 BatchedTensor{} fields, 3 int64 num_datums",
    "ForwardBackwardOutput": "1 string loss_fn_output_type, 2 ArrayRecord* loss_fn_outputs, 3 double{} metrics",
    "TopkLogprobs": "1 bytes token_ids, 2 bytes logprobs, 3 uint32 k, 4 uint32 length",
    "SampledSequence": "1 int32 stop_reason, 2 bytes tokens, 3 bytes logprobs",
    "SampleResponse": "1 SampledSequence* sequences, 2 bytes prompt_logprobs, 3 TopkLogprobs topk_prompt_logprobs",
}
"""The fields of each message, as `NUMBER TYPE NAME`; `*` is repeated, `{}` a map from strings."""

PACKAGE = "rlkit_tinker"
FieldDescriptor = descriptor_pb2.FieldDescriptorProto


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, kind: str, name: str) -> None:
    field = message.field.add(name=name, number=number, label=FieldDescriptor.LABEL_OPTIONAL)
    base = kind.rstrip("*{}")
    if kind != base:
        field.label = FieldDescriptor.LABEL_REPEATED
    if kind.endswith("{}"):
        entry = message.nested_type.add(name="".join(word.title() for word in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "string", "key")
        _add_field(entry, 2, base, "value")
        base = f"{message.name}.{entry.name}"
    if base.islower():
        field.type = FieldDescriptor.Type.Value(f"TYPE_{base.upper()}")
    else:
        field.type, field.type_name = FieldDescriptor.TYPE_MESSAGE, f".{PACKAGE}.{base}"


def _classes() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(name="rlkit_tinker.proto", package=PACKAGE, syntax="proto2")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, kind, field in (text.split() for text in fields.split(", ")):
            _add_field(message, int(number), kind, field)
    pool = descriptor_pool.DescriptorPool()  # its own, so that the SDK may be in the same process
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = _classes()
