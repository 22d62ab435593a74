// One request: why it went to its engines, with its legs on a timeline.
import {byId, el, pill} from './dom.js'
import {clock, ms, number, words} from './format.js'
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

const head = (...names) => el('thead', {}, el('tr', {}, ...names.map(([name, n]) => el('th', {scope: 'col', class: n ? 'n' : null}, name))))
const scrolled = (label, table) => el('div', {class: 'scroll', role: 'region', tabindex: '0', 'aria-label': label}, table)

function legs(e) {
  return scrolled('Legs', el('table', {}, head(['Leg'], ['Engine'], ['Rank', 1], ['Try', 1], ['Start', 1], ['First byte', 1], ['End', 1], ['Status', 1], ['Error']),
    el('tbody', {id: 'legs'}, ...e.legs.map(l => el('tr', {}, el('th', {scope: 'row'}, l.phase), el('td', {}, l.engine),
      ...[l.rank, l.attempt, ms(l.start_ms), ms(l.first_byte_ms), ms(l.end_ms), l.status || '–'].map(v => el('td', {class: 'n'}, String(v))),
      el('td', {class: failed(l) ? 'bad' : null}, l.error ? words(l.error) : '–'))))))
}

function candidates(rows) {
  if (!rows.length) return []
  return [el('div', {}, el('h3', {}, 'Engines that the policy could choose'), scrolled('Engines that the policy could choose', el('table', {},
    head(['Engine'], ['Role'], ['Rank', 1], ['Score', 1], ['Requests', 1], ['Tokens', 1], ['Queued', 1], ['Blocks on GPU', 1], ['KV memory', 1], ['Pair']),
    el('tbody', {}, ...rows.map(c => el('tr', {}, el('th', {scope: 'row'}, c.engine), el('td', {}, c.facts.role),
      ...[c.rank, c.score == null ? '–' : number(c.score), c.facts.requests, number(c.facts.tokens), number(c.facts.queued), c.facts.blocks_gpu, c.facts.usage ? (100 * c.facts.usage).toFixed(0) + ' %' : '–']
        .map(v => el('td', {class: 'n'}, String(v))), el('td', {}, c.facts.pair)))))))]
}
