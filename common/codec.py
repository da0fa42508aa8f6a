"""Messages to bytes and back: typed msgspec structs outside, plain msgpack on the wire.

Every message is a msgpack map with its type's name under "type", so any msgpack library can read it; token ids are
bytes (`tokens.py`). Unknown types and malformed bytes raise `WireError`; nothing is ever unpickled.
"""

from __future__ import annotations

import msgspec

from cohort.common.errors import WireError
from cohort.common.messages import Message
from cohort.common.tokens import packed, unpacked

_encoder = msgspec.msgpack.Encoder(enc_hook=packed)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, dec_hook=unpacked)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Decode a message. Raises `WireError` for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message of ours ({len(data)} bytes): {error}") from error
