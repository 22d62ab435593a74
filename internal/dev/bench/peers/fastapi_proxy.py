"""A proxy on FastAPI and httpx under uvicorn, in the shape of the engines'
example proxies.

usage: fastapi_proxy.py HOST:PORT UPSTREAM_HOST:PORT pass|pd

pass: requests are decoded and sent on. pd: each makes a prefill call for one
token, then a decode call that carries the prefill's kv_transfer_params.
"""

import sys
import uuid

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

LISTEN, UPSTREAM, MODE = sys.argv[1:4]

app = FastAPI()
client = httpx.AsyncClient(
    base_url="http://" + UPSTREAM,
    timeout=None,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
)


async def stream(path, body):
    async with client.stream("POST", path, json=body) as answer:
        async for part in answer.aiter_bytes():
            yield part


@app.post("/{path:path}")
async def handle(request: Request):
    path, body = request.url.path, await request.json()
    if MODE == "pd":
        prefill = {
            **body,
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        answer = await client.post(path, json=prefill, headers={"X-Request-Id": str(uuid.uuid4())})
        answer.raise_for_status()
        body["kv_transfer_params"] = answer.json()["kv_transfer_params"]
    if not body.get("stream"):
        answer = await client.post(path, json=body)
        return Response(answer.content, status_code=answer.status_code, media_type="application/json")
    return StreamingResponse(stream(path, body), media_type="text/event-stream")


host, port = LISTEN.rsplit(":", 1)
uvicorn.run(app, host=host, port=int(port), log_level="error", access_log=False, backlog=4096, loop="asyncio")
