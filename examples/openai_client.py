"""The official openai package against a router: python examples/openai_client.py [--url URL] [--api-key KEY] [--ca FILE]."""

import argparse
from pathlib import Path

import httpx
from openai import BadRequestError, OpenAI


def main() -> None:
    """Chat, streaming, a plain completion, an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="unused", help="any word where the router has no keys")
    parser.add_argument("--ca", type=Path, help="the certificate authority of a router that speaks TLS")
    given = parser.parse_args()
    http = None if given.ca is None else httpx.Client(verify=str(given.ca))
    client = OpenAI(base_url=given.url, api_key=given.api_key, http_client=http)
    model = client.models.list().data[0].id

    print("-- chat, streamed")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        max_completion_tokens=32,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")

    print("\n-- completion with log-probabilities, and what vLLM's users pass beside it")
    done = client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=8, logprobs=1, extra_body={"top_k": 1, "ignore_eos": True}
    )
    choice = done.choices[0]
    print(choice.text, [] if choice.logprobs is None else choice.logprobs.token_logprobs)

    print("\n-- what is refused is refused by name")
    try:
        client.completions.create(model=model, prompt="x", best_of=3)
    except BadRequestError as error:
        print(f"{error.param}: {error.message}")


if __name__ == "__main__":
    main()
