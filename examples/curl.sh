#!/usr/bin/env bash
# OpenAI's HTTP API by hand: examples/curl.sh [URL]. With keys: DIPTYCH_API_KEY=… examples/curl.sh
# With TLS: DIPTYCH_CA=FILE examples/curl.sh https://127.0.0.1:8000, FILE the authority of the router's certificate.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
options=(-sS -H 'Content-Type: application/json' -H "Authorization: Bearer ${DIPTYCH_API_KEY:-unused}")
if [[ -n ${DIPTYCH_CA:-} ]]; then options+=(--cacert "$DIPTYCH_CA"); fi

echo "-- which models"
curl "${options[@]}" --fail-with-body "$url/v1/models"

echo; echo "-- chat, streamed; X-Request-Id comes back and is in the router's log"
curl "${options[@]}" -N --fail-with-body -H 'X-Request-Id: from-curl' "$url/v1/chat/completions" -d '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "stream": true, "temperature": 0, "max_tokens": 16
}'

echo "-- completion, whole, with its stages: where the time went"
curl "${options[@]}" --fail-with-body "$url/v1/completions" -d '{
  "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "diptych": {"stages": true}
}'

echo; echo "-- what is wrong is named (HTTP 400)"
curl "${options[@]}" "$url/v1/completions" -d '{"prompt": "x", "temperature": -1}'

echo; echo "-- is it well"
curl "${options[@]}" "$url/health"
echo
