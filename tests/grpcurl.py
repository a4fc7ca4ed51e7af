"""What grpcurl does with the flags that examples/grpcurl.sh gives it, for machines without it: by the server's reflection.

python tests/grpcurl.py [-plaintext | -cacert FILE] [-H HEADER] [-max-time S] [-d JSON] ADDRESS list | describe NAME | METHOD
"""

import argparse
import sys
from pathlib import Path

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status


class Reflected(ProtoReflectionDescriptorDatabase):
    """Asks with the caller's headers, which grpcio's own does not take."""

    def __init__(self, channel: grpc.Channel, metadata: list[tuple[str, str]]) -> None:
        super().__init__(channel)
        ask = self._stub.ServerReflectionInfo
        self._stub.ServerReflectionInfo = lambda requests: ask(requests, metadata=metadata)


def call(channel: grpc.Channel, pool: DescriptorPool, method: str, given: argparse.Namespace, metadata) -> None:
    service, name = method.split("/")
    described = pool.FindServiceByName(service).methods_by_name[name]
    request = json_format.Parse(given.d or "{}", GetMessageClass(described.input_type)())
    ask = channel.unary_stream(
        f"/{method}", type(request).SerializeToString, GetMessageClass(described.output_type).FromString
    )
    for answer in ask(request, metadata=metadata, timeout=given.max_time):
        print(json_format.MessageToJson(answer, descriptor_pool=pool))


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("-plaintext", action="store_true")
    way.add_argument("-cacert", type=Path)
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-max-time", type=float, default=30.0)
    parser.add_argument("-d")
    parser.add_argument("address")
    parser.add_argument("verb")
    parser.add_argument("name", nargs="?")
    given = parser.parse_args()
    metadata = [(key.lower(), value.strip()) for key, _, value in (header.partition(":") for header in given.H)]
    credentials = None if given.plaintext else grpc.ssl_channel_credentials(given.cacert.read_bytes())
    opened = (
        grpc.insecure_channel(given.address) if credentials is None else grpc.secure_channel(given.address, credentials)
    )
    with opened as channel:
        database = Reflected(channel, metadata)
        pool = DescriptorPool(database)
        try:
            if given.verb == "list":
                print("\n".join(database.get_services()))
            elif given.verb == "describe":
                print("\n".join(f"{f.name} = {f.number}" for f in pool.FindMessageTypeByName(given.name).fields))
            else:
                call(channel, pool, given.verb, given, metadata)
        except grpc.RpcError as error:
            status = rpc_status.from_call(error)
            print(f"Code: {error.code().name}\n{'' if status is None else status}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
