// Numbers and times as people read them. Each function returns text.

const none = '–'

/** 0.84, 12.3, 1.24 k, 3.1 M */
export function number(v) {
  if (v == null || !Number.isFinite(v)) return none
  for (const [size, unit] of [[1e9, ' G'], [1e6, ' M'], [1e4, ' k']]) {
    if (Math.abs(v) >= size) return digits(v / (unit === ' k' ? 1e3 : size)) + unit
  }
  return digits(v)
}

function digits(v) {
  const a = Math.abs(v)
  if (a >= 100 || Number.isInteger(v)) return v.toFixed(0)
  return v.toFixed(a >= 10 ? 1 : 2)
}

/** A count without fractions: 1 234 567 */
export const count = v => v == null ? none : Math.round(v).toLocaleString('en').replaceAll(',', '\u202f')

export const percent = share => share == null || !Number.isFinite(share) ? none : (100 * share).toFixed(share > 0 && share < .1 ? 1 : 0) + ' %'

/** Milliseconds as value and unit: ['1.24', 's'] */
export function duration(ms) {
  if (ms == null || !Number.isFinite(ms)) return [none, '']
  if (ms < 1) return [digits(ms * 1000), 'µs']
  if (ms < 1000) return [digits(ms), 'ms']
  if (ms < 120e3) return [digits(ms / 1000), 's']
  if (ms < 7200e3) return [digits(ms / 60e3), 'min']
  return [digits(ms / 3600e3), 'h']
}

export const ms = v => duration(v).join(' ').trim()

export const micros = v => v == null ? none : ms(v / 1000)

export function bytes(v) {
  for (const [size, unit] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']]) {
    if (v >= size) return digits(v / size) + ' ' + unit
  }
  return (v ?? 0) + ' B'
}

/** The time of day of seconds since the Unix epoch. */
export const clock = seconds => new Date(seconds * 1000).toLocaleTimeString('en-GB')

/** How long ago: 12 s, 3 min, 2 h */
export function ago(seconds) {
  const s = Math.max(0, Math.round(seconds))
  if (s < 120) return s + ' s'
  if (s < 7200) return Math.round(s / 60) + ' min'
  if (s < 172800) return Math.round(s / 3600) + ' h'
  return Math.round(s / 86400) + ' d'
}

/** What became of a stream at a place where it broke off. */
export function seam(c) {
  const behind = c.tokens ? `, behind ${count(c.tokens)} tokens` : '' // 0: the proxy kept nothing of the stream
  switch (c.result) {
    case 'continued': return `continued on ${[c.prefill, c.decode].filter(Boolean).join(' → ')}, gap ${ms(c.gap_ms)}` + behind
    case 'completed': return 'completed by the proxy' + behind
  }
  return `not continued, ${words(c.result)}` + behind
}

/** Words of a label: kv_late becomes kv late. */
export const words = label => label.replaceAll('_', ' ')
