// The page: reads snapshots and draws them.
import {byId, el, list, setAttribute, setText} from './dom.js'
import {drawTraffic} from './charts.js'
import {drawEngines, drawKV, drawPairs} from './engines.js'
import {drawFacts, drawLatest, drawPolicies, drawStreams, drawTroubled} from './tables.js'
import {interrupted} from './history.js'
import {closeMoment} from './moment.js'
import {explain} from './request.js'
import {dropToken, follow, setToken, token} from './stream.js'
import {words} from './format.js'

let paused = false
let latest = null // the last snapshot

/** Shows the state of the connection: waiting, live, lost or paused. */
function status(state, text) {
  setAttribute(byId('status'), 'data-state', state)
  setText(byId('status').lastElementChild, text)
  setAttribute(byId('panels'), 'data-stale', state === 'lost' ? '' : null)
}

/** What an operator should look at. The texts have no running times: each change is read aloud. */
function problems(s) {
  const found = []
  const add = (severe, text) => found.push({severe, text})
  for (const e of s.engines) {
    if (e.state === 'unhealthy' || e.state === 'down') add(true, `Engine ${e.name} (${e.role}) is ${e.state}`)
    else if (e.circuit !== 'closed') add(e.circuit === 'open', `The circuit of engine ${e.name} is ${words(e.circuit)}`)
    else if (['draining', 'asleep', 'waking'].includes(e.state)) add(false, `Engine ${e.name} is ${e.state}`)
    if (e.index === 'disagrees') add(false, `The KV index and engine ${e.name} disagree: ${words(e.distrust)}`)
  }
  for (const role of ['prefill', 'decode']) {
    const of = s.engines.filter(e => e.role === role)
    if (of.length && of.every(e => e.state !== 'ready')) add(of.some(e => !['asleep', 'waking'].includes(e.state)), `No ${role} engine is ready`)
  }
  for (const p of s.pairs) {
    if (p.refused) add(false, `The pair ${p.prefill} → ${p.decode} is impossible: ${p.refused}`)
    else if (p.unavailable) continue // the list names the engine
    else if (p.state === 'broken') add(true, `The pair ${p.prefill} → ${p.decode} is broken: ${words(p.last_error)}`)
  }
  for (const p of s.policies) {
    if (p.state === 'parked') add(true, `${p.phase === 'filter' ? 'Filter' : 'Policy'} ${p.name} is parked because it failed too often. Reload it to use it again`)
    if (p.state === 'failed') add(true, `The new version of ${p.name} cannot be used. The old version serves`)
  }
  if (s.silent_workers) add(true, s.silent_workers === 1 ? 'A worker does not answer' : `${s.silent_workers} workers do not answer`)
  if (s.traffic.waiting) add(false, 'Requests wait for a place (limits.max_exchanges) or for an engine')
  if (s.traffic.shed) add(true, 'Limits refuse requests')
  if (s.traffic.evicted) add(false, 'Running requests end for waiting requests of a higher class')
  const most = 12
  const shown = found.sort((a, b) => b.severe - a.severe).slice(0, most)
  if (found.length > most) shown.push({severe: false, text: `and ${found.length - most} more`})
  return shown
}

function draw(s) {
  setText(byId('version'), s.version)
  drawFacts(s)
  list(byId('problems'), problems(s), p => p.text, p => el('li', {class: p.severe ? 'severe' : null}, p.text))
  drawEngines(s)
  drawPairs(s)
  drawKV(s)
  drawPolicies(s)
  drawStreams(s)
  drawTroubled(s)
  drawLatest(s)
}

const live = () => paused ? status('paused', 'Paused') : status('live', 'Live, updated each second')

function connect() {
  byId('login').hidden = true
  follow({
    snapshot(s) {
      byId('panels').hidden = false
      latest = s
      drawTraffic(byId('charts'), s, paused) // the charts also collect while the page is paused
      live()
      if (!paused) draw(s)
    },
    lost(reason) {
      interrupted()
      status('lost', reason + '. The page connects again')
    },
    refused() {
      setText(byId('login-error'), token() ? 'This token is not valid.' : '')
      dropToken()
      byId('panels').hidden = true
      byId('login').hidden = false
      byId('token').value = ''
      byId('token').focus()
      status('waiting', 'Waiting for the token')
    },
  })
}

byId('login').addEventListener('submit', event => {
  event.preventDefault()
  setToken(byId('token').value.trim())
  connect()
})

byId('pause').addEventListener('click', () => {
  paused = !paused
  setAttribute(byId('pause'), 'aria-pressed', paused)
  live()
  if (!paused && latest) draw(latest)
})

byId('lookup').addEventListener('submit', event => {
  event.preventDefault()
  explain(byId('request-id').value.trim())
})

byId('moment-close').addEventListener('click', closeMoment)

document.addEventListener('click', event => {
  const button = event.target.closest('button[data-request]')
  if (!button) return
  explain(button.dataset.request)
  const calm = matchMedia('(prefers-reduced-motion: reduce)').matches
  byId('request').scrollIntoView({behavior: calm ? 'auto' : 'smooth', block: 'nearest'})
})

connect()
