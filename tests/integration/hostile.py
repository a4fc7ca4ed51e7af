"""Messages that are well formed and say what nobody should: every field of a message at values chosen to hurt."""

import random

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_DEEP = 4
_TEXTS = (
    "",
    "a",
    "x" * 3000,
    "\x00",
    "a\nb\r\nc: d",
    "💥",
    "../../etc/passwd",
    "127.0.0.1:1",
    "[::1]:99999999",
    "tiny",
    "-1",
)
_BYTES = (b"", b"\x00", b"\xff" * 64, b"x" * 5000)
_INTEGERS = (0, 1, -1, 7, 2**31 - 1, -(2**31), 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e308, -1e308, 1e-320, float("nan"), float("inf"), float("-inf"))
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def hostile_message(kind: Descriptor, chance: random.Random, depth: int = 0) -> Message:
    message = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if chance.random() < 0.3:
            continue
        repeated = field.is_repeated
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is not None:
            if depth >= _DEEP:
                continue
            for _ in range(chance.choice((0, 1, 3)) if repeated else 1):
                inner = hostile_message(field.message_type, chance, depth + 1)
                getattr(message, field.name).add().CopyFrom(inner) if repeated else getattr(
                    message, field.name
                ).CopyFrom(inner)
        elif repeated:
            getattr(message, field.name).extend(_value(field, chance) for _ in range(chance.choice((0, 1, 5, 300))))
        else:
            setattr(message, field.name, _value(field, chance))
    return message


def _value(field: FieldDescriptor, chance: random.Random) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return chance.choice(_BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return chance.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_ENUM if chance.random() < 0.7:
            return chance.choice(field.enum_type.values).number
        case kind:
            low, high = _RANGES[kind]
            return chance.choice([number for number in _INTEGERS if low <= number <= high])
