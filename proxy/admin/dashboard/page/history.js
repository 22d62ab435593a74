// The traffic of the last hours: the history of the proxy, and the snapshots that came later.
import {ask} from './stream.js'

/** The times that the charts can show, and the distance of their ticks, in seconds. */
export const ranges = [{span: 180, tick: 60, name: '3 min'}, {span: 600, tick: 120, name: '10 min'}, {span: 3600, tick: 600, name: '1 h'}, {span: 10800, tick: 1800, name: '3 h'}]

const longest = ranges.at(-1).span
const refresh = 300 // seconds after which the page reads the history again: it has fewer points than the snapshots

/** Points with the names of the traffic, the oldest first. Each covers `seconds` before `time`. */
export let points = []
let due = 0 // time at which the page reads the history

/** The shortest range that shows all points. */
export const whole = () => ranges.find(r => points.at(-1).time - points[0].time < r.span) ?? ranges.at(-1)

/** Adds a snapshot. Returns a promise of true if it read the history. */
export async function add(snapshot) {
  const now = snapshot.time
  points.push({...snapshot.traffic, time: now, seconds: snapshot.seconds})
  if (now < due) return false
  due = now + refresh
  try {
    const answer = await ask('/v1/dashboard/history')
    if (!answer.ok) throw new Error()
    const {points: read} = await answer.json()
    if (read.length) points = [...points.filter(p => p.time < read[0].time), ...read, ...points.filter(p => p.time > read.at(-1).time)]
    points = points.filter(p => p.time > now - longest)
    return true
  } catch {
    due = now + 10
    return false
  }
}

/** Notes that snapshots may be missing: the page reads the history with the next one. */
export const interrupted = () => { due = 0 }

/** Whether there is a gap between two points. */
export const apart = (a, b) => b.time - a.time > 1 + 1.6 * Math.max(a.seconds, b.seconds)

/** The point of a moment: the nearest one, null in a gap. */
export function pointAt(time) {
  let best = null
  for (const p of points) if (!best || Math.abs(p.time - time) <= Math.abs(best.time - time)) best = p
  return best && Math.abs(best.time - time) <= 1 + 1.6 * best.seconds ? best : null
}
