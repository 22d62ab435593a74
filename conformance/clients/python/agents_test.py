"""Sessions of agents against a proxy (PDPROXY_URL) in front of two prefill and two decode engines: each
turn has the prompt of the turn before it, so the engine that computed it has its KV. A sub-agent begins
with the instructions of its parent. The bodies and headers have the shape of Claude Code, Codex and
OpenCode."""

import os
import unittest
import uuid

import anthropic
import openai

URL = os.environ["PDPROXY_URL"]
PATIENCE = 20 # seconds, for events that are certain
TURNS = 4
BLOCK = 16 # tokens of a block of KV
RULES = " ".join(f"Rule {n}: read a file before you change it, and say in one line what you did." for n in range(40))
TOOL = "Runs a command in the folder of the project and returns what it prints."
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


class Agent:
    """One conversation of an agent. A turn returns prompt tokens, cached tokens and the prefill engine."""

    def __init__(self, parent=None):
        self.id, self.parent, self.items = str(uuid.uuid4()), parent, []

    def turn(self, task):
        self.say(task)
        raw = self.ask()
        usage = None
        for event in raw.parse():
            usage = self.read(event) or usage
        return *usage, raw.headers["x-pdproxy-prefill"]


class ClaudeCode(Agent):
    def __init__(self, parent=None):
        super().__init__(parent)
        self.client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=PATIENCE)
        self.session = parent.session if parent else self.id
        self.prompt = None

    def say(self, task):
        if self.items:
            call = f"toolu_{len(self.items)}"
            self.items[-1]["content"].append({"type": "tool_use", "id": call, "name": "Bash", "input": {"command": "ls"}})
            self.items.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": task}]})
        else:
            self.items.append({"role": "user", "content": [{"type": "text", "text": task}]})

    def ask(self):
        headers = {"User-Agent": "claude-cli/2.1.177 (external, cli)", "X-Claude-Code-Session-Id": self.session}
        if self.parent:
            headers |= {"X-Claude-Code-Agent-Id": self.id}
        bill = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={uuid.uuid4().hex[:5]};"
        self.items.append({"role": "assistant", "content": [{"type": "text", "text": ""}]})
        return self.client.messages.with_raw_response.create(
            model="sim", max_tokens=16, stream=True, extra_headers=headers, messages=self.items[:-1],
            system=[{"type": "text", "text": bill}, {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}],
            tools=[{"name": "Bash", "description": TOOL, "input_schema": PARAMETERS}])

    def read(self, event):
        if event.type == "content_block_delta":
            self.items[-1]["content"][0]["text"] += event.delta.text
        if event.type == "message_delta":
            cached = event.usage.cache_read_input_tokens or 0
            return event.usage.input_tokens + cached, cached


class Codex(Agent):
    def __init__(self, parent=None):
        super().__init__(parent)
        self.client = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        self.text = ""

    def say(self, task):
        if self.items:
            call = f"call_{len(self.items)}"
            self.items += [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": self.text}]},
                {"type": "function_call", "call_id": call, "name": "shell", "arguments": '{"command":"ls"}'},
                {"type": "function_call_output", "call_id": call, "output": task}]
        else:
            self.items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": task}]})

    def ask(self):
        headers = {"User-Agent": "codex_cli_rs/0.98.0", "session-id": self.id, "thread-id": self.id}
        if self.parent:
            headers["x-codex-parent-thread-id"] = self.parent.id
        self.text = ""
        return self.client.responses.with_raw_response.create(
            model="sim", max_output_tokens=16, stream=True, store=False, extra_headers=headers, input=self.items, instructions=RULES,
            tools=[{"type": "function", "name": "shell", "description": TOOL, "parameters": PARAMETERS, "strict": False}])

    def read(self, event):
        if event.type == "response.output_text.delta":
            self.text += event.delta
        if event.type in ("response.completed", "response.incomplete"):
            usage = event.response.usage
            return usage.input_tokens, usage.input_tokens_details.cached_tokens


class OpenCode(Agent):
    def __init__(self, parent=None):
        super().__init__(parent)
        self.client = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def say(self, task):
        if self.items:
            call = f"call_{len(self.items)}"
            self.items[-1]["tool_calls"] = [{"id": call, "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}]
            self.items.append({"role": "tool", "tool_call_id": call, "content": task})
        else:
            self.items = [{"role": "system", "content": RULES}, {"role": "user", "content": task}]

    def ask(self):
        headers = {"User-Agent": "opencode/1.4.0", "x-opencode-session": self.id}
        if self.parent:
            headers["x-parent-session-id"] = self.parent.id
        self.items.append({"role": "assistant", "content": ""})
        return self.client.chat.completions.with_raw_response.create(
            model="sim", max_tokens=16, stream=True, stream_options={"include_usage": True}, extra_headers=headers, messages=self.items[:-1],
            tools=[{"type": "function", "function": {"name": "bash", "description": TOOL, "parameters": PARAMETERS}}])

    def read(self, event):
        for choice in event.choices:
            self.items[-1]["content"] += choice.delta.content or ""
        if event.usage:
            return event.usage.prompt_tokens, event.usage.prompt_tokens_details.cached_tokens


class Sessions(unittest.TestCase):
    def play(self, kind):
        parent = kind()
        tokens, _, first = parent.turn("Find out why the build of the docs fails.")
        for n in range(1, TURNS):
            before = tokens
            tokens, cached, engine = parent.turn(f"Step {n}: the log has {n} lines, and the last one says that a file is missing.")
            self.assertGreater(tokens, before)
            self.assertGreaterEqual(cached, before // BLOCK * BLOCK - BLOCK, f"turn {n}")
            self.assertEqual(engine, first, f"turn {n}")
        for _ in range(2):
            child = kind(parent)
            tokens, cached, engine = child.turn("List the files of the folder docs.")
            self.assertEqual(engine, first, "a sub-agent begins at another engine than its parent")
            self.assertGreater(cached, tokens // 2, "a sub-agent does not find the KV of the instructions")
            before = tokens
            tokens, cached, _ = child.turn("There are 12 files.")
            self.assertGreaterEqual(cached, before // BLOCK * BLOCK - BLOCK)

    def test_claude_code(self):
        self.play(ClaudeCode)

    def test_codex(self):
        self.play(Codex)

    def test_opencode(self):
        self.play(OpenCode)


if __name__ == "__main__":
    unittest.main(verbosity=2)
