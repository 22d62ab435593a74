"""Clients read streams whose decode engine is killed in the middle. PDPROXY_CONTROL kills it.
OpenAI's and Anthropic's Python clients and LangChain, against a proxy (PDPROXY_URL), its operators'
side (PDPROXY_ADMIN) and one engine alone (PDPROXY_ALONE)."""

import json
import os
import time
import unittest
import urllib.error
import urllib.request

import anthropic
import langchain_openai
import openai

URL, ADMIN, ALONE, CONTROL = (os.environ[k] for k in ("PDPROXY_URL", "PDPROXY_ADMIN", "PDPROXY_ALONE", "PDPROXY_CONTROL"))
PROMPT = 'Tell me of the sea, the "☕ 🙂" and\n\tgüne水 \\ at the shore.'
TOKENS = 100
COMMON = {"model": "sim", "temperature": 0, "max_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}}
PATIENCE = 20 # seconds, for events that are certain


def order(path):
    with urllib.request.urlopen(urllib.request.Request(CONTROL + path, method="POST"), timeout=PATIENCE) as answer:
        answer.read()


def killing(stream):
    """Passes a stream on, and kills its decode engine behind the fifth event."""
    for n, event in enumerate(stream, 1):
        if n == 5:
            order("/kill")
        yield event


def seams(request_id):
    """What became of the stream where it broke off."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(f"{ADMIN}/v1/explain/{request_id}", timeout=PATIENCE) as answer:
                return [c["result"] for c in json.load(answer).get("continuations", [])]
        except urllib.error.HTTPError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def read_openai(create, through, **request):
    seen = {"text": "", "roles": [], "reasons": [], "usage": [], "heads": set()}
    head = None
    for chunk in through(create(**COMMON, **request)):
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            seen["text"] += (delta.content if delta else choice.text) or ""
            if delta and delta.role:
                seen["roles"].append(delta.role)
            if choice.finish_reason:
                seen["reasons"].append(choice.finish_reason)
        if chunk.usage:
            seen["usage"].append((chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens))
        head = head or (chunk.id, chunk.created)
        seen["heads"].add(((chunk.id, chunk.created) == head, chunk.model, chunk.object))
    return seen


def chat(base, headers, through):
    with openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client:
        return read_openai(client.chat.completions.create, through, messages=[{"role": "user", "content": PROMPT}], extra_headers=headers)


def completion(base, headers, through):
    with openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client:
        return read_openai(client.completions.create, through, prompt=PROMPT, extra_headers=headers)


def langchain(base, headers, **more):
    return {"model": "sim", "base_url": base + "/v1", "api_key": "none", "max_retries": 0, "default_headers": headers, "temperature": 0, "max_tokens": TOKENS} | more


def langchain_chat(base, headers, through):
    """The sum of the chunks has a reason or a number twice if a chunk comes twice."""
    model = langchain_openai.ChatOpenAI(**langchain(base, headers, stream_usage=True))
    whole = None
    for chunk in through(model.stream(PROMPT)):
        whole = chunk if whole is None else whole + chunk
    used = whole.usage_metadata
    return whole.content, whole.response_metadata["finish_reason"], used["input_tokens"], used["output_tokens"], type(whole).__name__


def langchain_completion(base, headers, through):
    return "".join(through(langchain_openai.OpenAI(**langchain(base, headers)).stream(PROMPT)))


class ContinuedTest(unittest.TestCase):
    def compare(self, read):
        want = read(ALONE, {}, iter)
        order("/ready")
        name = read.__name__
        self.assertEqual(read(URL, {"x-request-id": name}, killing), want)
        self.assertEqual(seams(name), ["continued"])
        return want

    def test_openai_chat(self):
        want = self.compare(chat)
        self.assertEqual((len(want["roles"]), want["reasons"], len(want["usage"])), (1, ["length"], 1))

    def test_openai_completion(self):
        want = self.compare(completion)
        self.assertEqual((want["reasons"], len(want["usage"])), (["length"], 1))

    def test_langchain_chat(self):
        text, reason, _, tokens, _ = self.compare(langchain_chat)
        self.assertTrue(text)
        self.assertEqual((reason, tokens), ("length", TOKENS))

    def test_langchain_completion(self):
        self.assertTrue(self.compare(langchain_completion))

    def fails(self, name, create, error):
        order("/ready")
        with self.assertRaises(error) as caught:
            for _ in killing(create(extra_headers={"x-request-id": name})):
                pass
        self.assertIn("engine", str(caught.exception))
        self.assertEqual(seams(name), ["no_ids"])

    def test_openai_response(self):
        with openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0) as client:
            self.fails("response", lambda **more: client.responses.create(model="sim", input=PROMPT, max_output_tokens=TOKENS, stream=True, **more), openai.APIError)

    def test_langchain_response(self):
        model = langchain_openai.ChatOpenAI(**langchain(URL, {"x-request-id": "langchain-response"}, use_responses_api=True))
        self.fails("langchain-response", lambda **_: model.stream(PROMPT), openai.APIError)

    def test_anthropic_message(self):
        with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as client:
            message = {"model": "sim", "max_tokens": TOKENS, "messages": [{"role": "user", "content": PROMPT}], "stream": True}
            self.fails("message", lambda **more: client.messages.create(**message, **more), anthropic.APIStatusError)


if __name__ == "__main__":
    unittest.main(verbosity=2)
