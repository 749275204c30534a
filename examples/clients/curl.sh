#!/bin/sh
# The same server by hand: sh examples/clients/curl.sh http://127.0.0.1:8000
set -eu
curl -sS "$1/v1/models"; echo
curl -sS "$1/v1/chat/completions" -H 'content-type: application/json' \
  -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0, "stream": true}'
curl -sS "$1/v1/completions" -H 'content-type: application/json' \
  -d '{"prompt": "Hello", "max_tokens": 0, "echo": true, "logprobs": 0}'; echo
curl -sS "$1/v1/messages" -H 'content-type: application/json' -d '{"messages": []}'; echo
