"""Talk to a running kvray cluster with the official OpenAI client.

pip install openai
python examples/openai_client.py "Name three rivers."
"""

from __future__ import annotations

import argparse
import sys

import openai


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Name three rivers.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    client = openai.OpenAI(base_url=args.base_url, api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.prompt}],
        max_tokens=args.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        usage = chunk.usage or usage
    if usage is not None and usage.prompt_tokens_details is not None:
        cached = usage.prompt_tokens_details.cached_tokens
        print(
            f"\n[{usage.prompt_tokens} prompt tokens, {cached} from the cache, {usage.completion_tokens} generated]",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
