"""Many requests at once over gRPC: python examples/grpc_asyncio.py [--address HOST:PORT] [--api-key KEY] [--ca FILE]."""

import argparse
import asyncio
from pathlib import Path

from diptych_client import Answer, AsyncClient, Overloaded, Tls

PROMPTS = ("The sea is", "In the beginning", "A good engineer", "Rain in the morning")


async def ask(client: AsyncClient, prompt: str) -> Answer:
    """One answer; when the router is full, again after the time that it named."""
    while True:
        try:
            return await client.generate(prompt, max_tokens=16, temperature=0).answer()
        except Overloaded as error:
            await asyncio.sleep(error.retry_after_s or 1.0)


async def run(client: AsyncClient) -> None:
    """Four prompts side by side, then one stream that is left early."""
    for prompt, answer in zip(PROMPTS, await asyncio.gather(*(ask(client, p) for p in PROMPTS)), strict=True):
        print(f"{prompt}{answer.text}")

    print("\n-- leaving the block cancels the call: both workers free what it held")
    num_tokens = 0
    async with client.generate("Once upon a time", max_tokens=500, ignore_eos=True) as stream:
        async for piece in stream:
            num_tokens += len(piece.token_ids)
            if num_tokens >= 8:
                break
    print(f"left after {num_tokens} tokens")


async def main() -> None:
    """Connect and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--api-key")
    parser.add_argument("--ca", type=Path, help="the certificate authority of a router that speaks TLS")
    given = parser.parse_args()
    tls = None if given.ca is None else Tls(ca=given.ca.read_bytes())
    async with AsyncClient(given.address, api_key=given.api_key, tls=tls) as client:
        await run(client)


if __name__ == "__main__":
    asyncio.run(main())
