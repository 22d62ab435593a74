"""Anthropic's Python client against a proxy (PDPROXY_URL), its operators' side
(PDPROXY_ADMIN) and one engine alone (PDPROXY_ALONE)."""

import asyncio
import json
import os
import re
import time
import unittest
import urllib.request

import anthropic

URL, ADMIN, ALONE = (os.environ[k] for k in ("PDPROXY_URL", "PDPROXY_ADMIN", "PDPROXY_ALONE"))
CONNECTOR = os.environ["PDPROXY_CONNECTOR"]
PROMPT = 'Tell me of the sea, the "☕ 🙂" and\n\tgüne水 \\ at the shore.'
TOOL = {
    "name": "run",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
PATIENCE = 20 # seconds, for events that are certain


def messages(text=PROMPT, **more):
    return {"model": "sim", "max_tokens": 16, "system": "You answer in riddles.", "messages": [{"role": "user", "content": text}]} | more


def get(url):
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return answer.read().decode()


def busy():
    """The open leases of the proxy, and the requests and blocks of its engines."""
    engines = json.loads(get(ADMIN + "/v1/engines"))
    sims = [json.loads(get(e["url"] + "/sim/state")) for e in engines]
    leases = re.search(r"^pdproxy_leases_open (\S+)$", get(ADMIN + "/metrics"), re.M)
    return float(leases.group(1)) + sum(s["requests_running"] + s["requests_waiting"] + s["blocks_used"] for s in sims)


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}
        cls.proxied = anthropic.Anthropic(base_url=URL, **options)
        cls.alone = anthropic.Anthropic(base_url=ALONE, **options)
        cls.addClassCleanup(cls.proxied.close)
        cls.addClassCleanup(cls.alone.close)
        cls.options = options

    def until_idle(self):
        end = time.monotonic() + PATIENCE
        while busy():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def test_models(self):
        self.assertEqual([m.id for m in self.proxied.models.list(limit=1000)], ["sim"])
        self.assertEqual(self.proxied.models.retrieve("sim").id, "sim")


class Refused(Case):
    """The connector that does not serve /v1/messages."""

    def test_not_served(self):
        with self.assertRaises(anthropic.APIStatusError) as caught:
            self.proxied.messages.create(**messages())
        self.assertEqual((caught.exception.status_code, caught.exception.body["type"]), (501, "error"))


class Served(Case):
    def test_message(self):
        got, want = (c.messages.create(**messages()) for c in (self.proxied, self.alone))
        self.assertTrue(got.content[0].text)
        self.assertEqual(got.content[0].text, want.content[0].text)
        self.assertEqual((got.stop_reason, got.role), ("max_tokens", "assistant"))
        self.assertEqual(got.usage.output_tokens, 16)

    def test_request_id(self):
        got = self.proxied.messages.with_raw_response.create(**messages())
        id = got.headers["x-request-id"]
        self.assertEqual(json.loads(get(f"{ADMIN}/v1/explain/{id}"))["request_id"], id)

    def test_stream(self):
        want = self.alone.messages.create(**messages())
        with self.proxied.messages.stream(**messages()) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(text, want.content[0].text)
        self.assertEqual((final.content[0].text, final.stop_reason), (text, "max_tokens"))
        self.assertEqual(final.usage.output_tokens, 16)

    def test_tools(self):
        turn = messages("run it <call run command> <eos6>", tools=[TOOL], max_tokens=64)
        with self.proxied.messages.stream(**turn) as stream:
            got = stream.get_final_message()
        want = self.alone.messages.create(**turn)
        self.assertEqual((got.stop_reason, got.content[0].type, got.content[0].name), ("tool_use", "tool_use", "run"))
        self.assertEqual(got.content[0].input, want.content[0].input)
        self.assertTrue(got.content[0].input["command"].startswith("echo "))
        turn["messages"] += [
            {"role": "assistant", "content": [b.to_dict() for b in got.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": got.content[0].id, "content": "done"}]},
        ]
        got, want = (c.messages.create(**turn) for c in (self.proxied, self.alone))
        self.assertEqual((got.content[0].type, got.stop_reason), ("text", "end_turn"))
        self.assertEqual(got.content[0].text, want.content[0].text)

    def test_beta(self):
        got = self.proxied.beta.messages.create(**messages(), betas=["context-management-2025-06-27"], context_management={"edits": []})
        self.assertEqual(got.content[0].text, self.alone.messages.create(**messages()).content[0].text)

    def test_count_tokens(self):
        ask = {k: v for k, v in messages().items() if k != "max_tokens"}
        got, want = (c.messages.count_tokens(**ask).input_tokens for c in (self.proxied, self.alone))
        self.assertGreater(got, 10)
        self.assertEqual(got, want)

    def test_async_streams(self):
        want = self.alone.messages.create(**messages()).content[0].text

        async def one(client):
            async with client.messages.stream(**messages()) as stream:
                return "".join([text async for text in stream.text_stream])

        async def run():
            async with anthropic.AsyncAnthropic(base_url=URL, **self.options) as client:
                return await asyncio.gather(*(one(client) for _ in range(8)))

        self.assertEqual(asyncio.run(run()), [want] * 8)

    def test_bad_field(self):
        with self.assertRaises(anthropic.BadRequestError) as caught:
            self.proxied.messages.create(**messages(max_tokens=-1))
        self.assertEqual(caught.exception.body["type"], "error")
        self.assertEqual(caught.exception.body["error"]["param"], "max_tokens")

    def test_unknown_model(self):
        for stream in (False, True):
            with self.subTest(stream=stream), self.assertRaises(anthropic.NotFoundError) as caught:
                self.proxied.messages.create(**messages(model="nobody"), stream=stream)
            self.assertEqual(caught.exception.body["error"]["code"], "model_not_found")

    def test_close_a_stream(self):
        self.until_idle()
        with self.proxied.messages.create(**messages(max_tokens=2000), stream=True) as stream:
            for _ in range(5):
                next(stream)
            self.assertTrue(busy())
        self.until_idle()


if __name__ == "__main__":
    unittest.main(verbosity=2, defaultTest="Refused" if CONNECTOR == "trtllm" else "Served")
