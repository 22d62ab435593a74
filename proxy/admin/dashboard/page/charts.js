// The charts of the traffic. Each shows one or more series over the chosen range.
import {byId, el, list, svg, setAttribute, setText} from './dom.js'
import {clock, duration, number} from './format.js'
import {add, apart, pointAt, points, ranges, whole} from './history.js'
import {openMoment} from './moment.js'

const width = 360, height = 84 // of a chart, in its own units

const plain = (value, unit = '') => [number(value), unit]

/** The charts: series are read from a point. */
const charts = [
  {title: 'Requests', unit: 'per second', series: [['ended', '--blue', t => t.requests], ['failed', '--coral', t => t.failed]], fill: true},
  {title: 'Output', unit: 'per second', series: [['stream events', '--green', t => t.events], ['tokens reported', '--violet', t => t.output_tokens]], fill: true},
  {title: 'In the proxy', unit: 'requests', series: [['running', '--blue', t => t.running], ['waiting', '--amber', t => t.waiting]], fill: true},
  {title: 'Time to first token', series: percentiles('ttft_ms'), format: duration},
  {title: 'Time between tokens', series: percentiles('itl_ms'), format: duration},
  {title: 'Trouble', unit: 'per second', series: [['failed legs', '--coral', t => t.failed_legs], ['retries', '--amber', t => t.retries], ['shed and evicted', '--violet', t => t.shed + t.evicted]]},
]

function percentiles(name) {
  return [['p50', '--teal', t => t[name].p50], ['p95', '--amber', t => t[name].p95], ['p99', '--coral', t => t[name].p99]]
}

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name)

class Chart {
  constructor(definition) {
    Object.assign(this, {format: plain, ...definition})
    this.values = el('dl', {class: this.series.length > 2 ? 'values many' : 'values'})
    this.lines = []
    this.down = svg('path', {class: 'down'})
    this.ticks = svg('path', {class: 'grid-line'})
    this.moment = svg('path', {class: 'moment'})
    this.svg = svg('svg', {viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none', 'aria-hidden': 'true'}, this.down, this.ticks)
    for (const [name, tint] of this.series) {
      const value = el('dd'), key = el('i', {class: 'key', 'aria-hidden': 'true'})
      this.values.append(el('div', {}, el('dt', {}, key, name), value))
      const area = svg('path', {class: 'area'}), curve = svg('path', {class: 'curve'})
      this.svg.append(area, curve)
      this.lines.push({value, key, area, curve, tint})
    }
    this.svg.append(this.moment)
    this.top = el('span', {class: 'top', 'aria-hidden': 'true'})
    this.at = el('span', {class: 'at'})
    this.times = el('div', {})
    this.plot = el('div', {class: 'plot', role: 'slider', tabindex: '0', 'aria-label': this.title, title: 'Click to list the requests of this moment'}, this.svg, this.top)
    this.figure = el('figure', {}, el('figcaption', {}, el('span', {}, this.title), el('span', {}, this.unit)), this.values, this.plot,
      el('div', {class: 'times', 'aria-hidden': 'true'}, this.times, this.at))
    this.tint()
    this.listen()
  }

  /** Takes the colors of the present color scheme. */
  tint() {
    for (const {key, area, curve, tint} of this.lines) {
      const c = color(tint)
      key.style.background = c
      area.style.fill = c
      curve.style.stroke = c
    }
  }

  /** Makes the pointer and the keys choose a moment, and open its requests. */
  listen() {
    const time = event => {
      const {left, width} = this.svg.getBoundingClientRect()
      return now - range.span * (1 - Math.min(1, Math.max(0, (event.clientX - left) / width)))
    }
    this.plot.addEventListener('pointermove', event => choose(time(event)))
    this.plot.addEventListener('pointerleave', () => choose(null))
    this.plot.addEventListener('blur', () => choose(null))
    this.plot.addEventListener('click', event => { choose(time(event)); openChosen() })
    this.plot.addEventListener('keydown', event => {
      const step = {ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1}[event.key]
      if (step) choose((chosen ?? now) + step * range.span / 90)
      else if (event.key === 'Enter' || event.key === ' ') openChosen()
      else if (event.key === 'Escape') choose(null)
      else return
      event.preventDefault()
    })
  }

  /** Shows the values of a point, null for none. */
  show(point, time) {
    const says = this.series.map(([name, , read], i) => {
      const [value, unit] = this.format(point && read(point)), to = this.lines[i].value
      setText(to, value)
      if (unit) to.append(el('small', {}, unit))
      return name + ' ' + [value, unit].join(' ').trim()
    })
    const x = width * (1 - (now - time) / range.span)
    setAttribute(this.moment, 'd', chosen == null ? '' : `M${x.toFixed(1)} 0V${height}`)
    const down = point?.engines_down
    setText(this.at, chosen == null ? '' : clock(time) + (down ? `, ${down} engine${down > 1 ? 's' : ''} down` : ''))
    this.at.style.left = Math.min(88, Math.max(12, 100 * x / width)) + '%'
    setAttribute(this.plot, 'aria-valuemin', Math.round(now - range.span))
    setAttribute(this.plot, 'aria-valuemax', Math.round(now))
    setAttribute(this.plot, 'aria-valuenow', Math.round(time))
    setAttribute(this.plot, 'aria-valuetext', `${clock(time)}${this.unit ? ', ' + this.unit : ''}: ${says.join(', ')}`)
  }

  draw(shown) {
    const values = this.series.map(([, , read]) => shown.map(read))
    const most = round(Math.max(...values.flat().map(v => v ?? 0)))
    const x = t => (width * (1 - (now - t) / range.span)).toFixed(1)
    const y = v => (height - 1.5 - (height - 4) * v / most).toFixed(1)
    this.lines.forEach((line, i) => {
      let path = '', area = '', from = null, before = null
      const close = () => { if (from) area += `V${height}H${x(from.time)}Z` }
      shown.forEach((p, n) => {
        const v = values[i][n]
        const gap = !before || apart(before, p)
        if (v == null || gap) close()
        if (v == null) { before = from = null; return }
        const step = (gap ? 'M' : 'L') + x(p.time) + ' ' + y(v)
        path += step
        area += step
        if (gap) from = p
        before = p
      })
      close()
      setAttribute(line.curve, 'd', path)
      setAttribute(line.area, 'd', this.fill && i === 0 ? area : '')
    })
    setText(this.top, this.format(most).join(' ').trim())
    setAttribute(this.down, 'd', shown.filter(p => p.engines_down).map(p => `M${x(p.time - Math.min(p.seconds, range.tick / 20))} 0H${x(p.time)}V${height}H${x(p.time - Math.min(p.seconds, range.tick / 20))}Z`).join(''))
    const ticks = []
    for (let t = Math.ceil((now - range.span) / range.tick) * range.tick; t <= now; t += range.tick) ticks.push(t)
    setAttribute(this.ticks, 'd', `M0 .5H${width}M0 ${height / 2}H${width}M0 ${height - .5}H${width}` + ticks.map(t => `M${x(t)} 0V${height}`).join(''))
    list(this.times, ticks, String, t => el('span', {}, clock(t).slice(0, 5)), (e, t) => {
      const share = 100 * x(t) / width
      e.style.left = share + '%'
      e.hidden = share < 5 || share > 95
    })
  }
}

/** The next round number: 1, 2 or 5 times a power of ten. */
function round(v) {
  if (!(v > 0)) return 1
  const power = 10 ** Math.floor(Math.log10(v))
  return [1, 2, 5, 10].find(f => f * power >= v * .999) * power
}

let drawn = []
let now = 0 // right end of the charts
let range = null // null until the history has come: then the shortest that shows all of it
let chosen = null // the time at the pointer

function choose(time) {
  chosen = time
  const point = time == null ? points.at(-1) : pointAt(time)
  for (const chart of drawn) chart.show(point, time == null ? now : point?.time ?? time)
}

function openChosen() {
  const point = chosen == null ? points.at(-1) : pointAt(chosen)
  if (point) openMoment(point.time - point.seconds, point.time)
  else openMoment(chosen - 10, chosen)
}

function redraw() {
  now = points.at(-1).time
  const shown = points.filter(p => p.time >= now - range.span)
  for (const chart of drawn) chart.draw(shown)
  byId('down').hidden = !shown.some(p => p.engines_down)
  for (const button of byId('ranges').children) setAttribute(button, 'aria-pressed', button.range === range)
  choose(chosen)
}

function create(parent) {
  drawn = charts.map(c => new Chart(c))
  parent.append(...drawn.map(c => c.figure))
  byId('ranges').append(...ranges.map(r => {
    const button = el('button', {type: 'button'}, r.name)
    button.range = r
    button.addEventListener('click', () => { range = r; redraw() })
    return button
  }))
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => drawn.forEach(c => c.tint()))
}

/** Adds the traffic of a snapshot to the charts, and draws them unless they stand still. */
export async function drawTraffic(parent, snapshot, still) {
  const first = await add(snapshot) && !range
  if (first) range = whole()
  if (!range) return
  if (!drawn.length) create(parent)
  if (!still || first) redraw()
}
