#!/usr/bin/env bash
# The gRPC API by hand through server reflection: examples/grpcurl.sh [HOST:PORT]. Needs grpcurl.
# With keys: DIPTYCH_API_KEY=… examples/grpcurl.sh. With TLS: DIPTYCH_CA=FILE, the authority of the router's certificate.
set -euo pipefail
address=${1:-127.0.0.1:50051}
options=(-H "authorization: Bearer ${DIPTYCH_API_KEY:-unused}")
if [[ -n ${DIPTYCH_CA:-} ]]; then options+=(-cacert "$DIPTYCH_CA"); else options+=(-plaintext); fi
call() { grpcurl "${options[@]}" "$@"; }

echo "-- what there is; what each field means is in proto/diptych/v1/inference.proto"
call "$address" list
call "$address" describe diptych.v1.GenerateRequest

echo "-- which models"
call "$address" diptych.v1.Inference/ListModels

echo "-- text, streamed"
call -d '{"text": "Once upon a time", "sampling": {"temperature": 0, "max_tokens": 16}}' \
  "$address" diptych.v1.Inference/Generate

echo "-- a conversation; at most 30 seconds"
call -max-time 30 -d '{"chat": {"messages": [{"role": "user", "content": "What is the capital of France?"}]}, "sampling": {"temperature": 0, "max_tokens": 16}}' \
  "$address" diptych.v1.Inference/Generate

echo "-- is it well"
call -d '{"service": "diptych.v1.Inference"}' "$address" grpc.health.v1.Health/Check

echo "-- what is wrong comes as google.rpc.BadRequest"
call -d '{"text": "x", "sampling": {"temperature": -1}}' "$address" diptych.v1.Inference/Generate || true
