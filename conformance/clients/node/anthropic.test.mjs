// Anthropic's Node client against a proxy (PDPROXY_URL), its operators' side (PDPROXY_ADMIN) and
// one engine alone (PDPROXY_ALONE).
import Anthropic from '@anthropic-ai/sdk'
import assert from 'node:assert/strict'
import test from 'node:test'

const { PDPROXY_URL: url, PDPROXY_ADMIN: admin, PDPROXY_ALONE: aloneURL, PDPROXY_CONNECTOR: connector } = process.env
const client = (base) => new Anthropic({ baseURL: base, apiKey: 'none', maxRetries: 0 })
const proxied = client(url)
const alone = client(aloneURL)
const prompt = 'Tell me of the sea, the "☕ 🙂" and\n\tgüne水 \\ at the shore.'
const ask = (more) => ({
  model: 'sim',
  max_tokens: 16,
  system: [{ type: 'text', text: 'You answer in riddles.', cache_control: { type: 'ephemeral' } }],
  messages: [{ role: 'user', content: prompt }],
  ...more,
})

// busy adds up the open leases of the proxy, and the requests and blocks of its engines.
async function busy() {
  const engines = await (await fetch(admin + '/v1/engines')).json()
  const sims = await Promise.all(engines.map(async (e) => (await fetch(e.url + '/sim/state')).json()))
  const metrics = await (await fetch(admin + '/metrics')).text()
  return sims.reduce((n, s) => n + s.requests_running + s.requests_waiting + s.blocks_used, Number(/^pdproxy_leases_open (\S+)$/m.exec(metrics)[1]))
}

async function untilIdle() {
  const patience = AbortSignal.timeout(20_000)
  while (await busy()) {
    patience.throwIfAborted()
    await new Promise((done) => setTimeout(done, 20))
  }
}

test('models', async () => {
  const ids = []
  for await (const model of proxied.models.list()) ids.push(model.id)
  assert.deepEqual(ids, ['sim'])
})

if (connector === 'trtllm') {
  test('not served', async () => {
    await assert.rejects(proxied.messages.create(ask()), (e) => e.status === 501 && e.error.type === 'error')
  })
} else {
  test('message', async () => {
    const [got, want] = await Promise.all([proxied, alone].map((c) => c.messages.create(ask())))
    assert.ok(got.content[0].text)
    assert.equal(got.content[0].text, want.content[0].text)
    assert.equal(got.stop_reason, 'max_tokens')
    assert.equal(got.usage.output_tokens, 16)
  })

  test('stream', async () => {
    const want = await alone.messages.create(ask())
    let text = ''
    const stream = proxied.messages.stream(ask()).on('text', (delta) => (text += delta))
    const got = await stream.finalMessage()
    assert.equal(text, want.content[0].text)
    assert.equal(got.content[0].text, text)
    assert.equal(got.stop_reason, 'max_tokens')
  })

  test('tools', async () => {
    const tools = [{ name: 'run', description: 'Runs a command.', input_schema: { type: 'object', properties: { command: { type: 'string' } }, required: ['command'] } }]
    const turn = ask({ tools, max_tokens: 64, messages: [{ role: 'user', content: 'run it <call run command> <eos6>' }] })
    const [got, want] = await Promise.all([proxied.messages.stream(turn).finalMessage(), alone.messages.create(turn)])
    assert.equal(got.stop_reason, 'tool_use')
    assert.deepEqual(got.content[0].input, want.content[0].input)
    assert.ok(got.content[0].input.command.startsWith('echo '))
    turn.messages.push({ role: 'assistant', content: got.content }, { role: 'user', content: [{ type: 'tool_result', tool_use_id: got.content[0].id, content: 'done' }] })
    const [second, right] = await Promise.all([proxied, alone].map((c) => c.messages.create(turn)))
    assert.equal(second.stop_reason, 'end_turn')
    assert.equal(second.content[0].text, right.content[0].text)
  })

  test('beta', async () => {
    const got = await proxied.beta.messages.create(ask({ betas: ['context-management-2025-06-27'], context_management: { edits: [] } }))
    assert.equal(got.content[0].text, (await alone.messages.create(ask())).content[0].text)
  })

  test('count tokens', async () => {
    const { max_tokens: _, ...rest } = ask()
    const [got, want] = await Promise.all([proxied, alone].map((c) => c.messages.countTokens(rest)))
    assert.ok(got.input_tokens > 10)
    assert.equal(got.input_tokens, want.input_tokens)
  })

  test('bad field', async () => {
    await assert.rejects(proxied.messages.create(ask({ max_tokens: -1 })), (e) => {
      assert.ok(e instanceof Anthropic.BadRequestError)
      assert.equal(e.error.error.param, 'max_tokens')
      return true
    })
  })

  for (const stream of [false, true]) {
    test(`unknown model, stream ${stream}`, async () => {
      await assert.rejects(proxied.messages.create(ask({ model: 'nobody', stream })), (e) => {
        assert.ok(e instanceof Anthropic.NotFoundError)
        assert.equal(e.error.error.code, 'model_not_found')
        return true
      })
    })
  }

  test('abort a stream', async () => {
    await untilIdle()
    const stream = await proxied.messages.create(ask({ max_tokens: 2000, stream: true }))
    let events = 0
    for await (const _ of stream) {
      if (++events === 5) {
        assert.ok(await busy())
        stream.controller.abort()
      }
    }
    await untilIdle()
  })
}
