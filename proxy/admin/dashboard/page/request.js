// One request: why it went to its engines, with its legs on a timeline.
import {byId, el, labelled, pill} from './dom.js'
import {clock, ms, number, percent, seam, words} from './format.js'
import {ask} from './stream.js'

const result = () => byId('explained')

/** Looks a request up and shows it. */
export async function explain(id) {
  byId('request-id').value = id
  let answer, body
  try {
    answer = await ask('/v1/explain/' + encodeURIComponent(id))
    body = await answer.json()
  } catch {
    return show(el('p', {class: 'bad'}, 'The proxy does not answer.'))
  }
  if (answer.ok) return show(...explanation(body))
  const running = answer.status === 404 ? await findRunning(id) : null
  if (running) return show(el('p', {}, `The request runs since ${ms(running.age_ms)}: ${legsOf(running)}. Its explanation comes when it has ended.`))
  show(el('p', {class: 'bad'}, body.error?.message ?? 'The proxy answers with status ' + answer.status))
}

const legsOf = r => [r.flow && words(r.flow), [r.prefill, r.decode].filter(Boolean).join(' → ')].filter(Boolean).join(', ') || 'not placed yet'

async function findRunning(id) {
  try {
    const answer = await ask('/v1/exchanges')
    return answer.ok ? (await answer.json()).find(r => r.request_id === id) : null
  } catch {
    return null
  }
}

const show = (...children) => result().replaceChildren(...children)

const facts = pairs => el('dl', {class: 'facts small'}, ...pairs.filter(([, value]) => value).map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value))))

function explanation(e) {
  const good = ['ok', 'client_error', 'cancelled', 'none'].includes(e.outcome)
  return [
    facts([['Outcome', pill(e.outcome === 'ok' ? 'good' : good ? '' : 'bad', words(e.outcome) + (e.status ? ', ' + e.status : ''))], ['Came', clock(e.arrival)],
      ['Duration', ms(e.duration_ms)], ['Flow', words(e.flow)], ['Policy', e.policy], ['Model', e.model], ['Conversation', e.conversation && `turn ${e.turn}`]]),
    ...(e.legs.length ? [timeline(e), legs(e)] : [el('p', {class: 'soft'}, 'The request had no leg.')]),
    ...section('Where the stream broke off', (e.continuations ?? []).map(c => `at ${ms(c.at_ms)}: ${seam(c)}`)),
    ...section('Fallbacks', e.fallbacks.map(f => `${words(f.what)}: ${words(f.reason)}`)),
    ...section('Notes', e.notes ?? []),
    ...candidates(e.candidates),
  ]
}

const section = (title, texts) => texts.length ? [el('div', {}, el('h3', {}, title), el('ul', {role: 'list'}, ...texts.map(t => el('li', {}, t))))] : []

const failed = l => l.error !== '' && l.error !== 'cancelled'

/** The legs as bars. The table of the legs says the same to screen readers. */
function timeline(e) {
  const end = Math.max(e.duration_ms, ...e.legs.map(l => l.end_ms ?? l.start_ms), .001)
  const at = v => 100 * v / end + '%'
  const rows = e.legs.flatMap(l => {
    const lane = el('div', {class: ['lane', l.phase, failed(l) ? 'failed' : ''].join(' ')})
    const last = l.end_ms ?? end, first = Math.min(l.first_byte_ms ?? last, last)
    lane.append(bar('wait', l.start_ms, first, at), bar('flow', first, last, at))
    return [el('b', {}, `${l.phase} ${l.engine}${l.attempt > 1 ? `, try ${l.attempt}` : ''}`), lane, el('span', {class: failed(l) ? 'n bad' : 'n'}, failed(l) ? words(l.error) : ms(last - l.start_ms))]
  })
  const axis = el('div', {class: 'axis'}, ...[0, .25, .5, .75, 1].map(f => el('span', {}, f ? ms(f * end) : '0')))
  return el('div', {}, el('h3', {}, 'Legs'), el('div', {class: 'timeline', 'aria-hidden': 'true'}, ...rows, axis))
}

function bar(kind, from, to, at) {
  const i = el('i', {class: kind})
  i.style.left = at(from)
  i.style.width = at(Math.max(0, to - from))
  return i
}

/** A table of columns [name, whether its values are numbers], and of rows of cells. */
function table(label, columns, rows, id = null) {
  const names = columns.map(([name]) => name)
  return el('div', {class: 'scroll', role: 'region', tabindex: '0', 'aria-label': label}, el('table', {class: 'rows'},
    el('thead', {}, el('tr', {}, ...columns.map(([name, n]) => el('th', {scope: 'col', class: n ? 'n' : null}, name)))),
    el('tbody', {id}, ...rows.map(cells => labelled(el('tr', {}, ...cells), names)))))
}

const numbers = values => values.map(v => el('td', {class: 'n'}, String(v)))

const legs = e => table('Legs', [['Leg'], ['Engine'], ['Rank', 1], ['Try', 1], ['Start', 1], ['First byte', 1], ['End', 1], ['Status', 1], ['Error']],
  e.legs.map(l => [el('th', {scope: 'row'}, l.phase), el('td', {}, l.engine),
    ...numbers([l.rank, l.attempt, ms(l.start_ms), ms(l.first_byte_ms), ms(l.end_ms), l.status || '–']),
    el('td', {class: failed(l) ? 'bad' : null}, l.error ? words(l.error) : '–')]), 'legs')

function candidates(rows) {
  if (!rows.length) return []
  const title = 'Engines that the policy could choose'
  return [el('div', {}, el('h3', {}, title), table(title,
    [['Engine'], ['Role'], ['Rank', 1], ['Score', 1], ['Requests', 1], ['Tokens', 1], ['Queued', 1], ['Blocks on GPU', 1], ['KV memory', 1], ['Pair']],
    rows.map(c => [el('th', {scope: 'row'}, c.engine), el('td', {}, c.facts.role),
      ...numbers([c.rank, c.score == null ? '–' : number(c.score), c.facts.requests, number(c.facts.tokens), number(c.facts.queued), c.facts.blocks_gpu, percent(c.facts.usage)]),
      el('td', {}, c.facts.pair)])))]
}
