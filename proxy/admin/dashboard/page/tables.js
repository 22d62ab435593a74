// The tables: policies, failures and fallbacks, and the latest requests.
import {byId, el, labelled, list, pill, redraw, requestButton, setText} from './dom.js'
import {clock, count, micros, ms, percent, seam, words} from './format.js'

const stateLevels = {active: 'good', canary: 'info', parked: 'bad', failed: 'bad'}
const stateText = p => p.state === 'canary' && p.share ? `canary, ${percent(p.share)} of requests` : p.state

/** Draws the policies and filters. */
export function drawPolicies(snapshot) {
  const key = p => [p.name, p.phase, p.version_sha256, p.runtime, p.state].join('\u0000')
  list(byId('policies'), snapshot.policies, key, p => labelled(el('tr', {'data-policy': p.name},
    el('th', {scope: 'row', title: p.version_sha256 ? 'SHA-256 ' + p.version_sha256 : ''}, p.name), el('td', {}, p.phase),
    el('td', {}, pill(stateLevels[p.state] ?? '', stateText(p))), el('td', {}, p.runtime),
    ...Array.from({length: 4}, () => el('td', {class: 'n'}))), ['Name', 'Phase', 'State', 'Runtime', 'Calls', 'Failures', 'Mean', 'p99']),
  (tr, p) => {
    const values = [count(p.calls), count(p.failures), p.calls ? micros(p.mean_us) : '–', p.calls ? '≤ ' + micros(p.p99_us) : '–']
    values.forEach((text, i) => setText(tr.children[4 + i], text))
    tr.children[5].classList.toggle('bad', p.failures > 0)
  })
}

const outcomeLevels = {ok: 'good', client_error: '', cancelled: '', none: ''}
const outcome = (r, status = r.status) => pill(outcomeLevels[r.outcome] ?? 'bad', words(r.outcome) + (status ? ', ' + status : ''))
const engines = r => [r.prefill, r.decode].filter(Boolean).join(' → ') || '–'

// What the reasons of failed legs mean, where their names alone do not say it.
const reasons = {dial: 'dial: no connection', head: 'head: no answer', body: 'body: the answer broke off'}

/** What deviated, one text for each failed leg, place where the stream broke off, and fallback. */
const happened = r => [
  ...(r.failed_legs ?? []).map(l => `${l.phase} on ${l.engine} failed: ${reasons[l.reason] ?? words(l.reason)}`),
  ...(r.continuations ?? []).map(c => 'stream ' + seam(c)),
  ...(r.fallbacks ?? []).map(f => `fallback: ${words(f.what)}, ${words(f.reason)}`),
]

// A list stands still while the user points at it or has the focus in it.
const inUse = body => body.matches(':hover, :focus-within')

/** Draws how many streams broke off since the start, and what became of them. */
export function drawStreams(snapshot) {
  const {continued = 0, completed = 0, ...reasons} = snapshot.streams.continuations
  const rows = [['Streams continued', continued], ['Completed by the proxy', completed], ['Ended in an error event', snapshot.streams.broken],
    ...Object.keys(reasons).sort().map(reason => ['Not continued: ' + words(reason), reasons[reason]])]
  list(byId('streams'), rows, ([name]) => name, ([name]) => el('div', {}, el('dt', {}, name), el('dd')), (e, [, n]) => setText(e.lastChild, count(n)))
}

const requestRow = (ended, r, outcome, texts, took) => labelled(el('tr', {}, el('td', {}, ended), el('td', {}, requestButton(r.request_id)), el('td', {}, outcome),
  el('td', {class: 'wrap'}, ...texts.map(text => el('div', {}, text))), el('td', {}, engines(r)), el('td', {class: 'n'}, ms(took))), ['Ended', 'Request', 'Outcome', 'What happened', 'Engines', 'Duration'])

/** A row of a request that has ended. */
export const endedRow = r => requestRow(clock(r.end), r, outcome(r), happened(r), r.duration_ms)

/** A row of a request that runs. */
export const runningRow = r => requestRow('–', r, pill('info', 'runs'), [], r.age_ms)

/** Draws the requests that failed or deviated. */
export function drawTroubled(snapshot) {
  const body = byId('troubled')
  if (inUse(body)) return
  byId('troubled-none').hidden = snapshot.troubled.length > 0
  list(body, snapshot.troubled, r => r.request_id + r.end, endedRow)
}

/** Draws the latest requests. */
export function drawLatest(snapshot) {
  const body = byId('latest')
  if (inUse(body)) return
  byId('latest-none').hidden = snapshot.latest.length > 0
  list(body, snapshot.latest, r => r.request_id + r.end, r => labelled(el('tr', {},
    el('td', {}, requestButton(r.request_id)), el('td', {}, engines(r), ...(r.outcome === 'ok' ? [] : [' ', outcome(r, 0)])),
    el('td', {class: 'n'}, ms(r.first_byte_ms)), el('td', {class: 'n'}, ms(r.duration_ms)), el('td', {class: 'n'}, `${count(r.prompt_tokens)} + ${count(r.output_tokens)}`)), ['Request', 'Engines', 'First byte', 'All', 'Tokens']))
}

/** Draws the numbers in the head of the page. */
export function drawFacts(snapshot) {
  const ready = snapshot.engines.filter(e => e.state === 'ready').length
  const broken = snapshot.pairs.filter(p => p.state === 'broken').length
  const parked = snapshot.policies.filter(p => p.state === 'parked' || p.state === 'failed').length
  const facts = [
    ['Engines ready', `${ready}`, `of ${snapshot.engines.length}`],
    ['Running', count(snapshot.traffic.running), ''], ['Waiting', count(snapshot.traffic.waiting), ''],
    ['Broken pairs', count(broken), `of ${count(snapshot.pairs.length)}`], ['Parked policies', count(parked), `of ${snapshot.policies.length}`],
  ]
  if (snapshot.workers != null) facts.push(['Workers', count(snapshot.workers - snapshot.silent_workers), `of ${snapshot.workers} answer`])
  list(byId('facts'), facts, ([name]) => name, ([name]) => el('div', {}, el('dt', {}, name), el('dd')),
    (e, [, value, rest]) => redraw(e.lastChild, [value, rest], () => [value, ' ', el('small', {}, rest)]))
}
