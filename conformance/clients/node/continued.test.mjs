// Clients read streams whose decode engine is killed in the middle. PDPROXY_CONTROL kills it.
// OpenAI's and Anthropic's Node clients and ai-sdk, against a proxy (PDPROXY_URL), its operators'
// side (PDPROXY_ADMIN) and one engine alone (PDPROXY_ALONE).
import assert from 'node:assert/strict'
import test from 'node:test'
import Anthropic from '@anthropic-ai/sdk'
import OpenAI from 'openai'
import { createOpenAI } from '@ai-sdk/openai'
import { streamText } from 'ai'

const { PDPROXY_URL: url, PDPROXY_ADMIN: admin, PDPROXY_ALONE: aloneURL, PDPROXY_CONTROL: control } = process.env

const prompt = 'Tell me of the sea, the "☕ 🙂" and\n\tgüne水 \\ at the shore.'
const tokens = 100
const common = { model: 'sim', temperature: 0, max_tokens: tokens, stream: true }
const openai = (base) => new OpenAI({ baseURL: base + '/v1', apiKey: 'none', maxRetries: 0 })
const aiSDK = (base, headers) => createOpenAI({ baseURL: base + '/v1', apiKey: 'none', headers })

async function order(path) {
  const answer = await fetch(control + path, { method: 'POST' })
  assert.equal(answer.status, 200, await answer.text())
}

// Passes a stream on, and kills its decode engine behind the fifth event.
async function* killing(stream) {
  let n = 0
  for await (const event of stream) {
    if (++n === 5) await order('/kill')
    yield event
  }
}

const undisturbed = (stream) => stream

async function seams(id) {
  const patience = AbortSignal.timeout(20_000)
  for (;;) {
    const answer = await fetch(`${admin}/v1/explain/${id}`)
    if (answer.ok) return (await answer.json()).continuations ?? []
    assert.ok(!patience.aborted, `no explanation of ${id}`)
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}

// Reads the events of OpenAI's client.
async function readOpenAI(stream, through) {
  const seen = { text: '', roles: [], reasons: [], usage: [], heads: new Set() }
  let id
  for await (const chunk of through(stream)) {
    const choice = chunk.choices[0]
    seen.text += choice?.delta?.content ?? choice?.text ?? ''
    if (choice?.delta?.role) seen.roles.push(choice.delta.role)
    if (choice?.finish_reason) seen.reasons.push(choice.finish_reason)
    if (chunk.usage) seen.usage.push([chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens])
    id ??= chunk.id + chunk.created
    seen.heads.add([chunk.id + chunk.created === id, chunk.model, chunk.object].join())
  }
  return seen
}

async function readAISDK(model, through) {
  const seen = { text: '', parts: [], reason: '', usage: [] }
  const result = streamText({ model, prompt, temperature: 0, maxOutputTokens: tokens, maxRetries: 0, onError: () => {} })
  for await (const part of through(result.fullStream)) {
    if (part.type === 'error') throw part.error
    if (part.type === 'text-delta') seen.text += part.text
    else seen.parts.push(part.type)
    if (part.type === 'finish') {
      seen.reason = part.finishReason
      seen.usage = [part.totalUsage.inputTokens, part.totalUsage.outputTokens]
    }
  }
  return seen
}

const usage = { stream_options: { include_usage: true } }
const reads = {
  'OpenAI chat': async (base, headers, through) =>
    readOpenAI(await openai(base).chat.completions.create({ ...common, ...usage, messages: [{ role: 'user', content: prompt }] }, { headers }), through),
  'OpenAI completion': async (base, headers, through) => readOpenAI(await openai(base).completions.create({ ...common, ...usage, prompt }, { headers }), through),
  'ai-sdk chat': (base, headers, through) => readAISDK(aiSDK(base, headers).chat('sim'), through),
  'ai-sdk completion': (base, headers, through) => readAISDK(aiSDK(base, headers).completion('sim'), through),
}

for (const [name, read] of Object.entries(reads)) {
  test(`${name} is continued`, async () => {
    const want = await read(aloneURL, {}, undisturbed)
    assert.ok(want.text.length > tokens)
    await order('/ready')
    const id = name.replaceAll(' ', '-')
    assert.deepEqual(await read(url, { 'x-request-id': id }, killing), want)
    assert.deepEqual((await seams(id)).map((s) => s.result), ['continued'])
  })
}

const input = { model: 'sim', input: prompt, max_output_tokens: tokens, stream: true }
const message = { model: 'sim', max_tokens: tokens, messages: [{ role: 'user', content: prompt }], stream: true }
const fails = {
  'OpenAI response': async (headers) => readAll(await openai(url).responses.create(input, { headers })),
  'ai-sdk response': (headers) => readAISDK(aiSDK(url, headers).responses('sim'), killing),
  'Anthropic message': async (headers) => readAll(await new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0 }).messages.create(message, { headers })),
}

async function readAll(stream) {
  for await (const _ of killing(stream));
}

for (const [name, read] of Object.entries(fails)) {
  test(`${name} ends with an error`, async () => {
    await order('/ready')
    const id = name.replaceAll(' ', '-')
    await assert.rejects(read({ 'x-request-id': id }), (e) => {
      const text = e.message ?? JSON.stringify(e)
      assert.match(text, /engine/, text)
      return true
    })
    assert.deepEqual((await seams(id)).map((s) => s.result), ['no_ids'])
  })
}
