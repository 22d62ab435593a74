// The stream of snapshots. fetch and not EventSource reads it, because EventSource cannot send
// the token in a header, and a token in a URL would end up in logs.

const tokenKey = 'pdproxy-token'
const longestPause = 10_000 // ms between two tries

export const token = () => sessionStorage.getItem(tokenKey)
export const setToken = text => sessionStorage.setItem(tokenKey, text)
export const dropToken = () => sessionStorage.removeItem(tokenKey)

/** Asks the admin address. Throws if there is no answer. */
export function ask(path, options = {}) {
  const headers = {}
  if (token()) headers.Authorization = 'Bearer ' + token()
  return fetch(path, {...options, headers, cache: 'no-store', credentials: 'omit'})
}

/**
 * Reads snapshots until the token is refused, and connects again whenever the stream ends.
 * on has the functions snapshot(data), lost(reason) and refused().
 */
export async function follow(on) {
  for (let pause = 500; ; pause = Math.min(2 * pause, longestPause)) {
    try {
      const answer = await ask('/v1/dashboard/events')
      if (answer.status === 401) return on.refused()
      if (!answer.ok) throw new Error('status ' + answer.status)
      await read(answer.body, text => {
        pause = 500
        on.snapshot(JSON.parse(text))
      })
      on.lost('The proxy closed the connection')
    } catch (error) {
      on.lost(error instanceof TypeError ? 'The proxy does not answer' : 'The proxy answers with an error: ' + error.message)
    }
    await new Promise(resolve => setTimeout(resolve, pause))
  }
}

/** Calls each(data) for every event of a stream. The proxy sends one line of data an event. */
async function read(body, each) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ''
  for (;;) {
    const {done, value} = await reader.read()
    if (done) return
    const lines = (rest + value).split('\n')
    rest = lines.pop()
    for (const line of lines) if (line.startsWith('data: ')) each(line.slice(6))
  }
}
