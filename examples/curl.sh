#!/usr/bin/env bash
# OpenAI's HTTP API by hand: examples/curl.sh [URL]. With keys: DIPTYCH_API_KEY=… examples/curl.sh
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
headers=(-H 'Content-Type: application/json' -H "Authorization: Bearer ${DIPTYCH_API_KEY:-unused}")

echo "-- which models"
curl -sS --fail-with-body "${headers[@]}" "$url/v1/models"

echo; echo "-- chat, streamed; X-Request-Id comes back and is in the router's log"
curl -sSN --fail-with-body "${headers[@]}" -H 'X-Request-Id: from-curl' "$url/v1/chat/completions" -d '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "stream": true, "temperature": 0, "max_tokens": 16
}'

echo "-- completion, whole, with its stages: where the time went"
curl -sS --fail-with-body "${headers[@]}" "$url/v1/completions" -d '{
  "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "diptych": {"stages": true}
}'

echo; echo "-- what is wrong is named (HTTP 400)"
curl -sS "${headers[@]}" "$url/v1/completions" -d '{"prompt": "x", "temperature": -1}'

echo; echo "-- is it well"
curl -sS "$url/health"
echo
