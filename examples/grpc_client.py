"""Talk to a router over gRPC: python examples/grpc_client.py [--address HOST:PORT] [--api-key KEY] [--ca FILE]."""

import argparse
from pathlib import Path

from diptych_client import Client, DeadlineExceeded, InvalidArgument, Tls, system, user


def main() -> None:
    """Four things that every client needs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--api-key")
    parser.add_argument("--ca", type=Path, help="the certificate authority of a router that speaks TLS")
    given = parser.parse_args()
    tls = None if given.ca is None else Tls(ca=given.ca.read_bytes())

    with Client(given.address, api_key=given.api_key, tls=tls) as client:
        print("served:", ", ".join(model.name for model in client.models()))

        print("\n-- tokens as they are made; the last piece says where the time went")
        for piece in client.generate("Once upon a time", max_tokens=24, temperature=0):
            print(piece.text, end="", flush=True)
            if piece.HasField("usage"):
                print(
                    f"\n[{piece.usage.completion_tokens} tokens, prefill {piece.stages.prefill_compute_s * 1e3:.1f} ms]"
                )

        print("\n-- a conversation, whole")
        turns = [system("You answer in one sentence."), user("What is the capital of France?")]
        answer = client.generate(turns, max_tokens=32, temperature=0, timeout_s=60).answer()
        print(f"{answer.text} [{answer.finish_reason}]")

        print("\n-- a field that is wrong is named")
        try:
            client.generate("Hello", top_p=7).answer()
        except InvalidArgument as error:
            for violation in error.violations:
                print(violation.description)

        print("\n-- a deadline ends the request everywhere")
        try:
            client.generate("Hello", max_tokens=512, ignore_eos=True, timeout_s=0.2).answer()
        except DeadlineExceeded as error:
            print(error)


if __name__ == "__main__":
    main()
