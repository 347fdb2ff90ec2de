"""Print an answer as its tokens come, then where the time of the steps went.

python examples/stream.py "Tell me a story about an owl."
"""

import sys

from minivllm import LLM, SamplingParams


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "Tell me a story about an owl."
    with LLM(model="pocket") as llm:
        params = SamplingParams(temperature=0, max_tokens=48)
        for piece in llm.chat_stream([{"role": "user", "content": question}], params):
            print(piece.delta, end="", flush=True)
        print()
        stats = llm.stats()
        print({name: stats[name] for name in ("steps", "plan_ms", "submit_ms", "wait_ms", "publish_ms")})


if __name__ == "__main__":
    main()
