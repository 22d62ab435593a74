// The engines by role, their pairs, and where the KV is.
import {byId, el, labelled, list, pill, redraw, setAttribute, setText} from './dom.js'
import {ago, bytes, count, ms, number, percent, words} from './format.js'

const roles = [['prefill', 'Prefill'], ['decode', 'Decode'], ['both', 'Prefill and decode']]
const roleOf = e => roles.some(([r]) => r === e.role) ? e.role : 'both'

/** How bad the state of an engine is: good, warn or bad. */
export function level(engine) {
  if (engine.state === 'unhealthy' || engine.state === 'down' || engine.circuit === 'open') return 'bad'
  return ['draining', 'asleep', 'waking'].includes(engine.state) || engine.circuit === 'half_open' || engine.index === 'disagrees' ? 'warn' : 'good'
}

const total = (engine, field) => engine.ranks.reduce((n, r) => n + (r[field] ?? 0), 0)
const most = (engine, field) => Math.max(0, ...engine.ranks.map(r => r[field] ?? 0))

/** Draws the engines. */
export function drawEngines(snapshot) {
  const present = roles.filter(([role]) => snapshot.engines.some(e => roleOf(e) === role))
  list(byId('roles'), present, ([role]) => role,
    ([role, title]) => el('div', {role: 'group', 'aria-labelledby': 'role-' + role}, el('h3', {id: 'role-' + role}, title, el('span')), el('ul', {role: 'list'})),
    (column, [role]) => {
      const engines = snapshot.engines.filter(e => roleOf(e) === role)
      const ready = engines.filter(e => e.state === 'ready').length
      setText(column.querySelector('h3 span'), `${ready} of ${engines.length} ready`)
      const scale = Math.max(4, ...engines.map(e => total(e, 'requests')))
      const rankScale = Math.max(1, ...engines.flatMap(e => e.ranks.map(r => r.requests)))
      list(column.querySelector('ul'), engines, e => e.name, card, (li, e) => update(li, e, snapshot.time, scale, rankScale))
    })
}

function card(engine) {
  const gauge = (name, kind) => [el('dt', {}, name), el('dd', {class: 'track ' + kind, 'aria-hidden': 'true'}, el('i')), el('dd', {class: 'v'})]
  return el('li', {class: 'engine'},
    el('div', {class: 'title'}, el('span', {class: 'name'}, engine.name), el('span', {class: 'pills'}), el('span', {class: 'model'})),
    el('dl', {class: 'gauges'}, ...gauge('Requests', 'load'), ...gauge('Queue', 'queue'), ...gauge('KV memory', 'kv')),
    el('div', {class: 'ranks', role: 'img', hidden: true}))
}

function update(li, e, now, scale, rankScale) {
  setAttribute(li, 'data-level', level(e))
  setAttribute(li, 'data-engine', e.name)
  const pills = [[{ready: 'good', draining: 'warn', asleep: 'warn', waking: 'warn'}[e.state] ?? 'bad', e.state === 'ready' ? 'ready' : `${e.state} for ${ago(now - e.since)}`]]
  if (e.circuit !== 'closed') pills.push([e.circuit === 'open' ? 'bad' : 'warn', 'circuit ' + words(e.circuit)])
  if (e.restarts) pills.push(['', e.restarts === 1 ? '1 restart' : e.restarts + ' restarts'])
  redraw(li.querySelector('.pills'), pills, () => pills.flatMap(([l, text]) => [pill(l, text), ' ']))
  setText(li.querySelector('.model'), [e.model, e.connector].filter(Boolean).join(' · '))
  const [load, queue, kv] = li.querySelectorAll('.track i')
  const [loadText, queueText, kvText] = li.querySelectorAll('.v')
  const requests = total(e, 'requests'), waiting = total(e, 'waiting'), queued = most(e, 'queue_ms')
  const usage = e.ranks.some(r => r.kv_usage != null) ? most(e, 'kv_usage') : null
  load.style.width = 100 * requests / scale + '%'
  setText(loadText, waiting ? `${requests}, ${waiting} wait` : String(requests))
  queue.style.width = Math.min(100, queued / 20) + '%' // 2 s fill the bar
  queue.classList.toggle('high', queued > 2000)
  setText(queueText, queued ? ms(queued) : total(e, 'queued') ? number(total(e, 'queued')) + ' tokens' : '0 ms')
  kv.style.width = 100 * usage + '%'
  kv.classList.toggle('high', usage > .9)
  setText(kvText, percent(usage))
  const ranks = li.querySelector('.ranks')
  ranks.hidden = e.ranks.length < 2
  if (ranks.hidden) return
  setAttribute(ranks, 'aria-label', 'Requests by rank: ' + e.ranks.map(r => r.requests).join(', '))
  list(ranks, e.ranks.map((r, i) => [i, r]), ([i]) => String(i), () => el('i'), (bar, [i, r]) => {
    bar.style.height = 100 * r.requests / rankScale + '%'
    setAttribute(bar, 'title', `rank ${i}: ${r.requests} requests, ${percent(r.kv_usage)} of its KV memory`)
  })
}

/** Why a pair cannot be used, or its measured transfers: bandwidth, set-up time and number. */
function transfers(pair) {
  if (pair.unavailable) return [pair.unavailable]
  if (pair.bandwidth != null) return [(pair.bandwidth_at_least ? '> ' : '') + number(pair.bandwidth) + ' tokens/s', ms(pair.set_up_ms) + ' set-up', count(pair.samples) + ' samples']
  if (pair.samples) return ['measuring', pair.samples === 1 ? '1 sample' : count(pair.samples) + ' samples']
  return [pair.failures ? pair.failures + ' failures' : pair.state === 'unknown' ? 'not used' : 'not measured']
}

/** Draws the matrix of pairs. */
export function drawPairs(snapshot) {
  const names = role => snapshot.engines.filter(e => e.role === role || e.role === 'both').map(e => e.name)
  const pairs = new Map(snapshot.pairs.map(p => [p.prefill + '\u0000' + p.decode, p]))
  const rows = [...new Set([...names('prefill'), ...snapshot.pairs.map(p => p.prefill)])]
  const columns = [...new Set([...names('decode'), ...snapshot.pairs.map(p => p.decode)])]
  const table = byId('pairs'), none = !rows.length || !columns.length || !snapshot.engines.some(e => e.role !== 'both')
  table.parentElement.hidden = none
  setText(byId('pairs-none'), none ? 'No prefill and decode engines: all requests have one leg.' : snapshot.more_pairs ? `${count(snapshot.more_pairs)} pairs more are not shown.` : '')
  table.classList.toggle('many', columns.length > 7)
  const key = [rows, columns].join('\u0001')
  if (table.key !== key) {
    table.key = key
    table.replaceChildren(
      el('thead', {}, el('tr', {}, el('td'), ...columns.map(c => el('th', {scope: 'col'}, c)))),
      el('tbody', {}, ...rows.map(r => el('tr', {}, el('th', {scope: 'row'}, r), ...columns.map(() => el('td', {}, el('div', {class: 'cell'}, el('b'), el('div'))))))))
  }
  const cells = table.querySelectorAll('.cell')
  rows.forEach((r, i) => columns.forEach((c, j) => {
    const pair = pairs.get(r + '\u0000' + c) ?? {state: 'unknown', failures: 0}, cell = cells[i * columns.length + j]
    const state = pair.refused ? 'refused' : pair.state
    setAttribute(cell, 'class', 'cell ' + (pair.refused ? 'broken' : pair.state))
    setText(cell.firstChild, state)
    const lines = transfers(pair)
    redraw(cell.lastChild, lines, () => lines.map(text => el('span', {}, text)))
    setAttribute(cell, 'title', `${r} to ${c}: ${[state, pair.refused, ...lines].filter(Boolean).join(', ')}, ${pair.failures} failures${pair.last_error ? ', the last one: ' + words(pair.last_error) : ''}`)
  }))
}

/** What the comparison of the KV index with the engine's reports says. */
function comparison(e) {
  switch (e.index) {
    case 'agrees': return pill('good', 'agrees')
    case 'disagrees': return pill('warn', words(e.distrust))
    case 'engine_down': return pill('bad', 'engine is ' + e.state)
    case 'unchecked': return pill('', 'not compared')
  }
  return '–'
}

/** Draws the state of the KV index and the prefix hits. */
export function drawKV(snapshot) {
  const prompts = snapshot.engines.reduce((n, e) => ({tokens: n.tokens + e.prompts.tokens, cached: n.cached + e.prompts.cached}), {tokens: 0, cached: 0})
  const facts = [['All prefix hits', percent(prompts.cached / prompts.tokens)], ['Blocks by events', count(snapshot.kv.event_blocks)],
    ['Expected blocks', count(snapshot.kv.expected_blocks)], ['Memory of the index', bytes(snapshot.kv.bytes)]]
  list(byId('index'), facts, ([name]) => name, ([name]) => el('div', {}, el('dt', {}, name), el('dd')), (e, [, value]) => setText(e.lastChild, value))
  list(byId('kv'), snapshot.engines, e => e.name, e => labelled(el('tr', {}, el('th', {scope: 'row'}, e.name),
    el('td', {}, el('div', {class: 'share'}, el('div', {class: 'track kv', 'aria-hidden': 'true'}, el('i')), el('span'))), el('td', {class: 'n'}), el('td', {class: 'n'}), el('td')), ['Engine', 'Prefix hits', 'Prompt tokens', 'Blocks', 'Index']),
  (tr, e) => {
    const [, hits, tokens, blocks, index] = tr.children
    const share = e.prompts.tokens ? e.prompts.cached / e.prompts.tokens : null
    hits.querySelector('i').style.width = 100 * (share ?? 0) + '%'
    setText(hits.querySelector('span'), percent(share))
    setText(tokens, e.prompts.tokens ? count(e.prompts.tokens) : '–')
    setText(blocks, count(total(e, 'kv_blocks')))
    redraw(index, [e.index, e.distrust, e.state], () => [comparison(e)])
  })
}
