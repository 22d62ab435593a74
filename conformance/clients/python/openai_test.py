"""OpenAI's Python client against a proxy (PDPROXY_URL), its operators' side
(PDPROXY_ADMIN) and one engine alone (PDPROXY_ALONE)."""

import asyncio
import json
import os
import re
import time
import unittest
import urllib.request
import warnings

import openai

URL, ADMIN, ALONE = (os.environ[k] for k in ("PDPROXY_URL", "PDPROXY_ADMIN", "PDPROXY_ALONE"))
CONNECTOR = os.environ["PDPROXY_CONNECTOR"]
SOUND = b"RIFF\r\n--\x00\xff\r\n\r\n" * 9000
PROMPT = 'Tell me of the sea, the "☕ 🙂" and\n\tgüne水 \\ at the shore.'
COMPLETION = {"model": "sim", "prompt": PROMPT, "max_tokens": 16}
CHAT = {
    "model": "sim",
    "max_tokens": 16,
    "messages": [
        {"role": "system", "content": "You answer in riddles."},
        {"role": "user", "content": PROMPT},
    ],
}
PATIENCE = 20 # seconds, for events that are certain


def get(url):
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return answer.read().decode()


def state():
    """What the proxy has in its books and what the engines say of themselves."""
    engines = json.loads(get(ADMIN + "/v1/engines"))
    sims = [json.loads(get(e["url"] + "/sim/state")) for e in engines]
    leases = re.search(r"^pdproxy_leases_open (\S+)$", get(ADMIN + "/metrics"), re.M)
    return {
        "booked": sum(r["requests"] for e in engines for r in e["ranks"]),
        "leases": float(leases.group(1)),
        "running": sum(s["requests_running"] + s["requests_waiting"] for s in sims),
        "decoding": sum(s["requests_running"] for e, s in zip(engines, sims) if e["role"] == "decode"),
        "pinned": sum(s["blocks_pinned"] for s in sims),
        "blocks": sum(s["blocks_used"] for s in sims),
    }


class OpenAITest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}
        cls.proxied = openai.OpenAI(base_url=URL + "/v1", **options)
        cls.alone = openai.OpenAI(base_url=ALONE + "/v1", **options)
        cls.addClassCleanup(cls.proxied.close)
        cls.addClassCleanup(cls.alone.close)
        cls.options = options

    def until(self, ok):
        end = time.monotonic() + PATIENCE
        while not ok(s := state()):
            self.assertLess(time.monotonic(), end, s)
            time.sleep(0.02)

    def until_idle(self):
        self.until(lambda s: not any(s.values()))

    def test_models(self):
        self.assertEqual([m.id for m in self.proxied.models.list()], ["sim"])

    def test_model_card(self):
        model = self.proxied.models.retrieve("sim").to_dict()
        self.assertEqual(model["id"], "sim")
        self.assertTrue(model["created"])
        if CONNECTOR != "trtllm": # its engines state no length
            self.assertGreater(model["max_model_len"], 1000)

    def test_embeddings(self):
        if CONNECTOR == "trtllm": # the simulated engine has no embeddings
            self.assertRaises(openai.NotFoundError, self.proxied.embeddings.create, model="sim", input="one")
            return
        got, want = (c.embeddings.create(model="sim", input=["one", "two words"]) for c in (self.proxied, self.alone))
        self.assertEqual([d.embedding for d in got.data], [d.embedding for d in want.data])
        self.assertEqual(len(got.data), 2)

    def test_sound(self):
        warnings.simplefilter("ignore", DeprecationWarning) # OpenAI has deprecated translations
        if CONNECTOR != "vllm-nixl":
            with self.assertRaises(openai.APIStatusError) as raised:
                self.proxied.audio.translations.create(model="sim", file=("a.wav", SOUND))
            self.assertEqual((raised.exception.status_code, raised.exception.code), (501, "not_implemented"))
            return
        for create in ("transcriptions", "translations"):
            got, want = (getattr(c.audio, create).create(model="sim", file=("a \"b\".wav", SOUND)) for c in (self.proxied, self.alone))
            self.assertEqual(got.text, want.text)
            self.assertIn(f"a sound of {len(SOUND)} bytes", got.text)
        stream = self.proxied.audio.transcriptions.create(model="sim", file=SOUND, stream=True, timestamp_granularities=["word", "segment"])
        self.assertGreater(len(list(stream)), 3)
        got, want = (c.audio.speech.create(model="sim", voice="alloy", input="words").content for c in (self.proxied, self.alone))
        self.assertEqual(got, want)
        got, want = (c.images.edit(model="sim", image=[("a.png", SOUND), ("b.png", SOUND)], prompt="words").data[0].b64_json for c in (self.proxied, self.alone))
        self.assertEqual(got, want)
        got, want = (c.images.generate(model="sim", prompt="words").data[0].b64_json for c in (self.proxied, self.alone))
        self.assertEqual(got, want)

    def test_stored_responses(self):
        if CONNECTOR != "vllm-nixl": # the simulated engines of the others store nothing
            return
        first = self.proxied.responses.create(model="sim", input=PROMPT, max_output_tokens=16)
        got = self.proxied.responses.retrieve(first.id)
        self.assertEqual((got.id, got.output_text), (first.id, first.output_text))
        second = self.proxied.responses.create(model="sim", input=PROMPT, max_output_tokens=16, previous_response_id=first.id)
        self.assertNotIn(second.id, ("", first.id))
        self.assertTrue(second.output_text)
        late = self.proxied.responses.create(model="sim", input=PROMPT, max_output_tokens=2000, background=True)
        self.assertEqual(self.proxied.responses.cancel(late.id).status, "cancelled")
        for ask in (self.proxied.responses.retrieve, self.proxied.responses.cancel):
            with self.assertRaises(openai.NotFoundError) as caught:
                ask("resp_unknown")
            self.assertEqual(caught.exception.code, "response_not_found")
        with self.assertRaises(openai.APIStatusError) as caught: # vLLM has no such route
            self.proxied.responses.delete(first.id)
        self.assertEqual((caught.exception.status_code, caught.exception.code), (501, "not_implemented"))

    def test_completion(self):
        got, want = (c.completions.create(**COMPLETION) for c in (self.proxied, self.alone))
        self.assertTrue(got.choices[0].text)
        self.assertEqual(got.choices[0].text, want.choices[0].text)
        self.assertEqual(got.choices[0].finish_reason, "length")
        self.assertEqual(got.usage.prompt_tokens, want.usage.prompt_tokens)
        self.assertEqual(got.usage.completion_tokens, 16)

    def test_chat(self):
        got, want = (c.chat.completions.create(**CHAT) for c in (self.proxied, self.alone))
        self.assertTrue(got.choices[0].message.content)
        self.assertEqual(got.choices[0].message.content, want.choices[0].message.content)
        self.assertEqual(got.choices[0].message.role, "assistant")
        self.assertEqual(got.usage.total_tokens, want.usage.total_tokens)

    def test_request_id(self):
        got = self.proxied.chat.completions.create(**CHAT)
        explained = json.loads(get(f"{ADMIN}/v1/explain/{got._request_id}"))
        self.assertEqual(explained["request_id"], got._request_id)

    def test_completion_stream(self):
        want = self.alone.completions.create(**COMPLETION)
        with self.proxied.completions.create(**COMPLETION, stream=True) as stream:
            text = "".join(choice.text for chunk in stream for choice in chunk.choices)
        self.assertEqual(text, want.choices[0].text)

    def test_chat_stream_with_usage(self):
        want = self.alone.chat.completions.create(**CHAT)
        text, usage = "", None
        with self.proxied.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}) as stream:
            for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
        self.assertEqual(text, want.choices[0].message.content)
        self.assertEqual(usage.total_tokens, want.usage.total_tokens)

    def test_async_streams(self):
        want = self.alone.chat.completions.create(**CHAT).choices[0].message.content

        async def one(client):
            stream = await client.chat.completions.create(**CHAT, stream=True)
            return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

        async def run():
            async with openai.AsyncOpenAI(base_url=URL + "/v1", **self.options) as client:
                return await asyncio.gather(*(one(client) for _ in range(8)))

        self.assertEqual(asyncio.run(run()), [want] * 8)

    def test_bad_field(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.proxied.completions.create(**COMPLETION | {"max_tokens": -1})
        self.assertEqual(caught.exception.status_code, 400)
        self.assertEqual(caught.exception.param, "max_tokens")
        self.assertTrue(caught.exception.request_id)

    def test_unknown_model(self):
        for stream in (False, True):
            with self.subTest(stream=stream), self.assertRaises(openai.NotFoundError) as caught:
                self.proxied.chat.completions.create(**CHAT | {"model": "nobody"}, stream=stream)
            self.assertEqual(caught.exception.status_code, 404)
            self.assertEqual(caught.exception.code, "model_not_found")

    def test_close_a_stream(self):
        self.until_idle()
        with self.proxied.chat.completions.create(**CHAT | {"max_tokens": 2000}, stream=True) as stream:
            for _ in range(5):
                next(stream)
            self.assertEqual(state()["running"], 1)
        self.until_idle()

    def test_cancel_a_unary_request(self):
        self.until_idle()

        async def run():
            async with openai.AsyncOpenAI(base_url=URL + "/v1", **self.options) as client:
                answer = asyncio.create_task(client.completions.create(**COMPLETION | {"max_tokens": 2000}))
                # Decode has taken prefill's blocks.
                await asyncio.to_thread(self.until, lambda s: s["decoding"] and not s["pinned"])
                answer.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await answer
                await asyncio.to_thread(self.until_idle)

        asyncio.run(run())


if __name__ == "__main__":
    unittest.main(verbosity=2)
