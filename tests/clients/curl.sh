#!/usr/bin/env bash
# What people paste into a terminal.
set -euo pipefail
echo "version $(curl --version | head -n 1 | cut -d' ' -f1-2)"
auth="Authorization: Bearer $API_KEY"
json="Content-Type: application/json"
ask="{\"model\": \"$MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"What is 2 + 3?\"}], \"max_tokens\": 8, \"temperature\": 0"

curl -sSf "$BASE_URL/health" >/dev/null && echo "ok health without a key"
[ "$(curl -s -o /dev/null -w '%{http_code}' "$BASE_URL/v1/models")" = 401 ] && echo "ok 401 without a key"
curl -sSf -H "$auth" "$BASE_URL/v1/models" | grep -q "\"$MODEL\"" && echo "ok models"
curl -sSf -H "$auth" -H "$json" -d "$ask}" "$BASE_URL/v1/chat/completions" | grep -q '"finish_reason"' && echo "ok chat"
stream=$(curl -sSfN -H "$auth" -H "$json" -d "$ask, \"stream\": true}" "$BASE_URL/v1/chat/completions")
[ "$(tail -n 2 <<<"$stream" | head -n 1)" = "data: [DONE]" ] || [ "$(tail -n 1 <<<"$stream")" = "data: [DONE]" ]
[ "$(grep -c '"finish_reason":\s*"' <<<"$stream")" = 1 ] && echo "ok stream"
[ "$(curl -s -o /dev/null -w '%{http_code}' -H "$auth" -H "$json" -d '{not json' "$BASE_URL/v1/chat/completions")" = 400 ]
echo "ok 400 for what is no JSON"
[ "$(curl -s -o /dev/null -w '%{http_code}' -H "$auth" "$BASE_URL/v1/nowhere")" = 404 ] && echo "ok 404"
curl -s -H "$auth" -H "$json" -d "$ask}" "$BASE_URL/v1/messages" | grep -q 'POST /v1/chat/completions' && echo "ok what to ask instead"
curl -sSfI -H "$auth" "$BASE_URL/health" | grep -q '^HTTP/1.1 200' && echo "ok HEAD"
curl -sSf -H "$auth" "$BASE_URL/metrics" | grep -q '^vllm:num_requests_running' && echo "ok metrics"
# a client that goes away in the middle
timeout 1 curl -sN -H "$auth" -H "$json" -d "${ask/\"max_tokens\": 8/\"max_tokens\": 400}, \"stream\": true, \"ignore_eos\": true}" \
  "$BASE_URL/v1/chat/completions" >/dev/null || true
for _ in $(seq 50); do
  curl -s -H "$auth" "$BASE_URL/metrics" | grep -q '^vllm:num_requests_running{[^}]*} 0' && { echo "ok gone and forgotten"; exit 0; }
  sleep 0.1
done
echo "a request of a client that has gone still runs"
exit 1
