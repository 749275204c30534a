"""OpenAI's own client against `nanok3 serve`: a stream, a tool, a JSON schema, a picture.

nanok3 serve runs/x --served-model-name k3
python examples/clients/openai_client.py http://127.0.0.1:8000/v1 [picture.png]
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

from openai import OpenAI

COLOR = {"enum": ["red", "green", "blue"]}
OBJECT = {"type": "object", "properties": {"color": COLOR}, "required": ["color"], "additionalProperties": False}
QUIET = {"thinking": {"type": "disabled"}}


def main(address: str, picture: str | None = None) -> None:
    client = OpenAI(base_url=address, api_key="none")
    model = client.models.list().data[0].id
    ask = {"model": model, "max_tokens": 200, "temperature": 0, "extra_body": QUIET}

    messages = [{"role": "user", "content": "Name a color."}]
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(messages=messages, stream=True, stream_options=options, **ask):
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\nstream: {chunk.usage.prompt_tokens} tokens read, {chunk.usage.completion_tokens} said")

    paint = {"type": "function", "function": {"name": "paint", "parameters": OBJECT, "strict": True}}
    answer = client.chat.completions.create(messages=messages, tools=[paint], tool_choice="required", **ask)
    choice = answer.choices[0]
    for call in choice.message.tool_calls or []:
        print("tool:", call.function.name, json.loads(call.function.arguments))
    if not choice.message.tool_calls:
        print("tool: none,", choice.finish_reason)

    schema = {"type": "json_schema", "json_schema": {"name": "color", "schema": OBJECT}}
    answer = client.chat.completions.create(messages=messages, response_format=schema, **ask)
    print("schema:", json.loads(answer.choices[0].message.content or ""))

    if picture:
        url = f"data:image/png;base64,{base64.b64encode(Path(picture).read_bytes()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        answer = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **ask)
        print("picture:", answer.usage.prompt_tokens, "tokens read,", answer.choices[0].finish_reason)


main(*sys.argv[1:])
