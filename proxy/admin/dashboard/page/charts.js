// The charts of the traffic. Each shows the last minutes of one or more series.
import {el, svg, setAttribute, setText} from './dom.js'
import {duration, number} from './format.js'

const span = 180 // seconds that a chart shows
const width = 360, height = 84 // of a chart, in its own units

const plain = (value, unit = '') => [number(value), unit]

/** The charts: series are read from the traffic of a snapshot. */
const charts = [
  {title: 'Requests', unit: 'per second', series: [['ended', '--blue', t => t.requests], ['failed', '--coral', t => failed(t)]], fill: true},
  {title: 'Output', unit: 'per second', series: [['stream events', '--green', t => t.events], ['tokens reported', '--violet', t => t.output_tokens]], fill: true},
  {title: 'In the proxy', unit: 'requests', series: [['running', '--blue', t => t.running], ['waiting', '--amber', t => t.waiting]], fill: true},
  {title: 'Time to first token', series: percentiles('ttft_ms'), format: duration},
  {title: 'Time between tokens', series: percentiles('itl_ms'), format: duration},
  {title: 'Trouble', unit: 'per second', series: [['failed legs', '--coral', t => sum(t.leg_errors)], ['retries', '--amber', t => t.retries], ['shed', '--violet', t => t.shed]]},
]

function percentiles(name) {
  return [['p50', '--teal', t => t[name].p50], ['p95', '--amber', t => t[name].p95], ['p99', '--coral', t => t[name].p99]]
}

const sum = values => Object.values(values).reduce((a, b) => a + b, 0)

/** Requests a second that ended by a fault of the engines or of the proxy. */
export const failed = traffic => sum(traffic.outcomes) - ['ok', 'client_error', 'cancelled', 'none'].reduce((n, name) => n + (traffic.outcomes[name] ?? 0), 0)

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name)

class Chart {
  constructor(definition) {
    Object.assign(this, {format: plain, ...definition})
    this.points = [] // [time, value of each series]
    this.values = el('dl', {class: this.series.length > 2 ? 'values many' : 'values'})
    this.lines = []
    this.plot = svg('svg', {viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none', role: 'img'},
      ...[.5, height / 2, height - .5].map(y => svg('line', {class: 'grid-line', x1: 0, x2: width, y1: y, y2: y})))
    for (const [name, tint] of this.series) {
      const value = el('dd'), key = el('i', {class: 'key', 'aria-hidden': 'true'})
      this.values.append(el('div', {}, el('dt', {}, key, name), value))
      const area = svg('path', {class: 'area'}), curve = svg('path', {class: 'curve'})
      this.plot.append(area, curve)
      this.lines.push({value, key, area, curve, tint})
    }
    this.top = el('span', {class: 'top', 'aria-hidden': 'true'})
    this.figure = el('figure', {}, el('figcaption', {}, el('span', {}, this.title), el('span', {}, this.unit)), this.values,
      el('div', {class: 'plot'}, this.plot, this.top),
      el('div', {class: 'times', 'aria-hidden': 'true'}, el('span', {}, '−3 min'), el('span', {}, 'now')))
    this.tint()
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

  /** Adds a point, and draws the chart unless it stands still. */
  add(time, traffic, still) {
    this.points.push([time, ...this.series.map(([, , read]) => read(traffic))])
    while (this.points[0][0] < time - span) this.points.shift()
    if (still) return
    const last = this.points.at(-1)
    this.lines.forEach((line, i) => {
      const [value, unit] = this.format(last[i + 1])
      setText(line.value, value)
      if (unit) line.value.append(el('small', {}, unit))
    })
    this.draw(time)
  }

  draw(now) {
    const most = round(Math.max(...this.points.flatMap(p => p.slice(1).map(v => v ?? 0))))
    const x = t => width * (1 - (now - t) / span)
    const y = v => height - 1.5 - (height - 4) * v / most
    this.lines.forEach((line, i) => {
      let path = '', area = '', from = null
      const close = to => { if (from != null) area += `V${height}H${x(from).toFixed(1)}Z` }
      let before = null
      for (const p of this.points) {
        const v = p[i + 1]
        const gap = before == null || p[0] - before > 5
        if (v == null || gap) close()
        if (v == null) { before = from = null; continue }
        const at = `${x(p[0]).toFixed(1)} ${y(v).toFixed(1)}`
        path += (gap ? 'M' : 'L') + at
        area += (gap ? 'M' : 'L') + at
        if (gap) from = p[0]
        before = p[0]
      }
      close()
      setAttribute(line.curve, 'd', path)
      setAttribute(line.area, 'd', this.fill && i === 0 ? area : '')
    })
    setText(this.top, this.format(most).join(' ').trim())
    const says = this.series.map(([name], i) => name + ' ' + this.format(this.points.at(-1)[i + 1]).join(' ').trim())
    setAttribute(this.plot, 'aria-label', `${this.title}${this.unit ? ', ' + this.unit : ''}: now ${says.join(', ')}`)
  }
}

/** The next round number: 1, 2 or 5 times a power of ten. */
function round(v) {
  if (!(v > 0)) return 1
  const power = 10 ** Math.floor(Math.log10(v))
  return [1, 2, 5, 10].find(f => f * power >= v * .999) * power
}

let drawn = []

/** Adds the traffic of a snapshot to the charts, and draws them unless they stand still. */
export function drawTraffic(parent, snapshot, still) {
  if (!drawn.length) {
    drawn = charts.map(c => new Chart(c))
    parent.append(...drawn.map(c => c.figure))
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => drawn.forEach(c => c.tint()))
  }
  for (const chart of drawn) chart.add(snapshot.time, snapshot.traffic, still)
}
