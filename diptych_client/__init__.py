"""A client for `diptych.v1.Inference` over gRPC: for threads (`Client`) and for asyncio (`AsyncClient`).

    Client.generate(prompt, **options) ──▶ Stream ──▶ GenerateResponse, GenerateResponse, …
                                              └────▶ answer(): the pieces joined

It hides nothing: requests and responses are the messages of proto/diptych/v1/inference.proto, every field of a request is an
option of the same name, the gRPC channel and call are at hand, and nothing is retried. Does not know the OpenAI API.
"""

from contracts.pb.diptych.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, GenerateResponse, Model, ToolCall
from diptych_client.aio import AsyncClient, AsyncStream
from diptych_client.answer import Answer, join
from diptych_client.connect import Tls
from diptych_client.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    MessageTooLarge,
    NotFound,
    Overloaded,
    PermissionDenied,
    RpcFailed,
    Unauthenticated,
    Unavailable,
    Violation,
)
from diptych_client.options import Conversation, Options, Prompt, assistant, build_request, system, user
from diptych_client.sync import Client, Stream

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chat",
    "ChatMessage",
    "Client",
    "Conversation",
    "DeadlineExceeded",
    "GenerateRequest",
    "GenerateResponse",
    "InvalidArgument",
    "MessageTooLarge",
    "Model",
    "NotFound",
    "Options",
    "Overloaded",
    "PermissionDenied",
    "Prompt",
    "RpcFailed",
    "Stream",
    "Tls",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Violation",
    "assistant",
    "build_request",
    "join",
    "system",
    "user",
]
