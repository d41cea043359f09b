#!/usr/bin/env bash
# The API with nothing but curl: create, upload, exec, download, destroy.
set -euo pipefail
call() { curl -fsS -H "Authorization: Bearer $BOXED_API_KEY" "$@"; }
name=curl-$RANDOM
call -H 'Content-Type: application/json' -d "{\"name\": \"$name\", \"ttl\": \"10m\"}" "$BOXED_ENDPOINT/v1/sandboxes" > /dev/null
trap 'call -X DELETE "$BOXED_ENDPOINT/v1/sandboxes/$name"' EXIT
printf 'some text\n' | call -T - "$BOXED_ENDPOINT/v1/sandboxes/$name/files?path=input.txt" > /dev/null
call -H 'Content-Type: application/json' -d '{"args": ["sh", "-c", "tr a-z A-Z < input.txt > output.txt"]}' \
  "$BOXED_ENDPOINT/v1/sandboxes/$name/exec" > /dev/null
call "$BOXED_ENDPOINT/v1/sandboxes/$name/files?path=output.txt"
