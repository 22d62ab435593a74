// OpenAI's Node client against a proxy (PDPROXY_URL), its operators' side
// (PDPROXY_ADMIN) and one engine alone (PDPROXY_ALONE).
import assert from 'node:assert/strict'
import test from 'node:test'
import OpenAI, { toFile } from 'openai'

const { PDPROXY_URL: url, PDPROXY_ADMIN: admin, PDPROXY_ALONE: aloneURL } = process.env
const client = (base) => new OpenAI({ baseURL: base + '/v1', apiKey: 'none', maxRetries: 0 })
const proxied = client(url)
const alone = client(aloneURL)

const connector = process.env.PDPROXY_CONNECTOR
const prompt = 'Tell me of the sea, the "☕ 🙂" and\n\tgüne水 \\ at the shore.'
const completion = (more) => ({ model: 'sim', prompt, max_tokens: 16, ...more })
const chat = (more) => ({
  model: 'sim',
  max_tokens: 16,
  messages: [
    { role: 'system', content: 'You answer in riddles.' },
    { role: 'user', content: prompt },
  ],
  ...more,
})

const getJSON = async (address) => (await fetch(address)).json()

// state adds up the engines' reports and the proxy's counters.
async function state() {
  const engines = await getJSON(admin + '/v1/engines')
  const sims = await Promise.all(engines.map((e) => getJSON(e.url + '/sim/state')))
  const metrics = await (await fetch(admin + '/metrics')).text()
  const sum = (rows, of) => rows.reduce((n, row, i) => n + of(row, i), 0)
  return {
    booked: sum(engines.flatMap((e) => e.ranks), (r) => r.requests),
    leases: Number(/^pdproxy_leases_open (\S+)$/m.exec(metrics)[1]),
    running: sum(sims, (s) => s.requests_running + s.requests_waiting),
    decoding: sum(sims, (s, i) => (engines[i].role === 'decode' ? s.requests_running : 0)),
    pinned: sum(sims, (s) => s.blocks_pinned),
    blocks: sum(sims, (s) => s.blocks_used),
  }
}

async function until(ok) {
  const patience = AbortSignal.timeout(20_000)
  for (;;) {
    const s = await state()
    if (ok(s)) return
    assert.ok(!patience.aborted, JSON.stringify(s))
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}

const untilIdle = () => until((s) => Object.values(s).every((n) => n === 0))

test('models', async () => {
  const ids = []
  for await (const model of proxied.models.list()) ids.push(model.id)
  assert.deepEqual(ids, ['sim'])
})

test('translation', async () => {
  const sound = Buffer.from('RIFF\r\n--\0\r\n\r\n'.repeat(9000))
  const create = async (c) => c.audio.translations.create({ model: 'sim', file: await toFile(sound, 'a "b".wav') })
  if (connector !== 'vllm-nixl') {
    await assert.rejects(create(proxied), (e) => e.status === 501 && e.code === 'not_implemented')
    return
  }
  const [got, want] = await Promise.all([proxied, alone].map(create))
  assert.equal(got.text, want.text)
  assert.ok(got.text.includes(`a sound of ${sound.length} bytes`))
})

test('completion', async () => {
  const [got, want] = await Promise.all([proxied, alone].map((c) => c.completions.create(completion())))
  assert.ok(got.choices[0].text)
  assert.equal(got.choices[0].text, want.choices[0].text)
  assert.equal(got.choices[0].finish_reason, 'length')
  assert.equal(got.usage.prompt_tokens, want.usage.prompt_tokens)
  assert.equal(got.usage.completion_tokens, 16)
})

test('chat', async () => {
  const [got, want] = await Promise.all([proxied, alone].map((c) => c.chat.completions.create(chat())))
  assert.ok(got.choices[0].message.content)
  assert.equal(got.choices[0].message.content, want.choices[0].message.content)
  assert.equal(got.choices[0].message.role, 'assistant')
  assert.equal(got.usage.total_tokens, want.usage.total_tokens)
})

test('request id', async () => {
  const { request_id: id } = await proxied.chat.completions.create(chat()).withResponse()
  assert.equal((await getJSON(`${admin}/v1/explain/${id}`)).request_id, id)
})

test('completion stream', async () => {
  const want = await alone.completions.create(completion())
  let text = ''
  for await (const chunk of await proxied.completions.create(completion({ stream: true }))) text += chunk.choices[0]?.text ?? ''
  assert.equal(text, want.choices[0].text)
})

test('chat stream with usage', async () => {
  const want = await alone.chat.completions.create(chat())
  let text = ''
  let usage
  for await (const chunk of await proxied.chat.completions.create(chat({ stream: true, stream_options: { include_usage: true } }))) {
    text += chunk.choices[0]?.delta.content ?? ''
    usage = chunk.usage ?? usage
  }
  assert.equal(text, want.choices[0].message.content)
  assert.equal(usage.total_tokens, want.usage.total_tokens)
})

test('stream helper', async () => {
  const want = await alone.chat.completions.create(chat())
  const got = await proxied.chat.completions.stream(chat()).finalChatCompletion()
  assert.equal(got.choices[0].message.content, want.choices[0].message.content)
  assert.equal(got.choices[0].finish_reason, 'length')
})

test('bad field', async () => {
  await assert.rejects(proxied.completions.create(completion({ max_tokens: -1 })), (e) => {
    assert.ok(e instanceof OpenAI.BadRequestError)
    assert.equal(e.status, 400)
    assert.equal(e.param, 'max_tokens')
    assert.ok(e.requestID)
    return true
  })
})

for (const stream of [false, true]) {
  test(`unknown model, stream ${stream}`, async () => {
    await assert.rejects(proxied.chat.completions.create(chat({ model: 'nobody', stream })), (e) => {
      assert.ok(e instanceof OpenAI.NotFoundError)
      assert.equal(e.status, 404)
      assert.equal(e.code, 'model_not_found')
      return true
    })
  })
}

test('abort a stream', async () => {
  await untilIdle()
  const stream = await proxied.chat.completions.create(chat({ stream: true, max_tokens: 2000 }))
  let chunks = 0
  for await (const _ of stream) {
    if (++chunks === 5) {
      assert.equal((await state()).running, 1)
      stream.controller.abort()
    }
  }
  await untilIdle()
})

test('break out of a stream', async () => {
  for await (const _ of await proxied.completions.create(completion({ stream: true, max_tokens: 2000 }))) break
  await untilIdle()
})

test('abort a unary request', async () => {
  const stop = new AbortController()
  const answer = proxied.completions.create(completion({ max_tokens: 2000 }), { signal: stop.signal })
  const refused = assert.rejects(answer, OpenAI.APIUserAbortError)
  await until((s) => s.decoding > 0 && s.pinned === 0) // decode has taken prefill's blocks
  stop.abort()
  await refused
  await untilIdle()
})
