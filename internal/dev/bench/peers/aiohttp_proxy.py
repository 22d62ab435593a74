"""A proxy on aiohttp, in the shape of the engines' example proxies.

usage: aiohttp_proxy.py HOST:PORT UPSTREAM_HOST:PORT pass|pd

pass: requests go through as they are. pd: each makes a prefill call for one
token, then a decode call that carries the prefill's kv_transfer_params.
"""

import sys

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

LISTEN, UPSTREAM, MODE = sys.argv[1:4]
BASE = "http://" + UPSTREAM


async def client(app):
    timeout = ClientTimeout(total=None)
    async with ClientSession(connector=TCPConnector(limit=0), timeout=timeout, auto_decompress=False) as session:
        app["client"] = session
        yield


async def relay(request, answer):
    kind = answer.headers.get("Content-Type", "application/octet-stream")
    out = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
    await out.prepare(request)
    async for part in answer.content.iter_any():
        await out.write(part)
    await out.write_eof()
    return out


async def pass_through(request):
    body = await request.read()
    headers = {"Content-Type": "application/json"}
    async with request.app["client"].post(BASE + request.path_qs, data=body, headers=headers) as answer:
        if "Content-Length" in answer.headers:
            whole = await answer.read()
            return web.Response(body=whole, status=answer.status, content_type="application/json")
        return await relay(request, answer)


async def prefill_then_decode(request):
    client, url = request.app["client"], BASE + request.path_qs
    decode = await request.json()
    prefill = {
        **decode,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    async with client.post(url, json=prefill) as answer:
        decode["kv_transfer_params"] = (await answer.json())["kv_transfer_params"]
    async with client.post(url, json=decode) as answer:
        return await relay(request, answer)


def main():
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(client)
    app.router.add_post("/{path:.*}", prefill_then_decode if MODE == "pd" else pass_through)
    host, port = LISTEN.rsplit(":", 1)
    web.run_app(app, host=host, port=int(port), access_log=None, print=None, backlog=4096)


main()
