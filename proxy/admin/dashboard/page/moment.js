// The requests of a moment that the user has clicked in a chart.
import {byId, el, list, setText} from './dom.js'
import {clock, count} from './format.js'
import {ask} from './stream.js'
import {endedRow, runningRow} from './tables.js'

/** Lists the requests that ran at some time of a period. */
export async function openMoment(from, to) {
  const section = byId('moment')
  section.hidden = false
  setText(byId('h-moment'), `Requests from ${clock(from)} to ${clock(to)}`)
  setText(byId('moment-about'), 'Reading …')
  const query = `?from=${from.toFixed(3)}&to=${to.toFixed(3)}`
  let held, running
  try {
    const answers = await Promise.all([ask('/v1/dashboard/requests' + query), ask('/v1/exchanges')])
    if (!answers.every(a => a.ok)) throw new Error()
    ;[held, running] = await Promise.all(answers.map(a => a.json()))
  } catch {
    held = null
  }
  const present = Date.now() / 1000
  show(from, to, held, held && running.filter(r => present - r.age_ms / 1000 <= to))
}

function show(from, to, held, running) {
  const rows = held ? [...held.troubled, ...running, ...held.others] : []
  const lost = held ? missing(from, to, held) : ''
  setText(byId('moment-about'), !held ? 'The proxy does not answer.' : rows.length || !lost ? about(held, running, rows.length) : '')
  setText(byId('moment-lost'), lost)
  byId('moment-lost').hidden = !lost
  list(byId('moment-rows'), rows, r => r.request_id + (r.end ?? ''), r => r.end ? endedRow(r) : runningRow(r))
  const calm = matchMedia('(prefers-reduced-motion: reduce)').matches
  byId('moment').scrollIntoView({behavior: calm ? 'auto' : 'smooth', block: 'nearest'})
}

function about(held, running, shown) {
  const all = held.total + running.length
  if (!all) return 'No request ran.'
  return [all === 1 ? '1 request ran' : `${count(all)} requests ran`, running.length && `${count(running.length)} of them still run`,
    held.troubled.length && 'those that failed or deviated come first', shown < all && `the list shows ${count(shown)}`].filter(Boolean).join('; ') + '.'
}

/** Times are rounded to milliseconds: they differ by less than this, in seconds. */
const rounding = .002

/** What the list lacks, '' for nothing. */
function missing(from, to, held) {
  const texts = []
  if (held.since > to) texts.push(`The proxy no longer holds the requests of this moment: the requests that it holds begin at ${clock(held.since)}.`)
  else if (held.since > from + rounding) texts.push(`The proxy no longer holds all requests of this moment: some that ended before ${clock(held.since)} are missing.`)
  if (texts.length) texts.push('Each process keeps its last 4096 requests.')
  if (held.silent_workers) texts.push(`${held.silent_workers} workers did not answer: their requests are missing.`)
  return texts.join(' ')
}

/** Closes the list. */
export const closeMoment = () => { byId('moment').hidden = true }
