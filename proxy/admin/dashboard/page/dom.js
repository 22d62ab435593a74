// Elements of the page. All text of the proxy goes into text nodes, never into HTML: names of
// engines, plugins and models come from others.

/** Returns a new element with attributes, class and children; a string child becomes a text node. */
export function el(tag, attributes = {}, ...children) {
  const e = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue
    if (name === 'class') e.className = value
    else e.setAttribute(name, value === true ? '' : value)
  }
  e.append(...children.filter(child => child != null))
  return e
}

const svgNamespace = 'http://www.w3.org/2000/svg'

/** Returns a new SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const e = document.createElementNS(svgNamespace, tag)
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value)
  e.append(...children)
  return e
}

export const byId = id => document.getElementById(id)

/** Sets the text of an element, if it differs: screen readers and selections see no change otherwise. */
export function setText(e, text) {
  if (e.textContent !== text) e.textContent = text
}

/** Sets an attribute, if it differs; null removes it. */
export function setAttribute(e, name, value) {
  if (value == null) e.removeAttribute(name)
  else if (e.getAttribute(name) !== String(value)) e.setAttribute(name, value)
}

/**
 * Makes the children of parent those of rows, in order. An element stays the same as long as
 * its row has the same key, so that the focus stays where it is.
 * create(row) makes an element; update(element, row) sets what changes.
 */
export function list(parent, rows, keyOf, create, update = () => {}) {
  const before = parent.listed ?? new Map()
  const now = new Map()
  let at = parent.firstChild
  for (const row of rows) {
    let key = keyOf(row)
    while (now.has(key)) key += '\u0000' // a draining engine and its successor have the same name
    const e = before.get(key) ?? create(row)
    before.delete(key)
    now.set(key, e)
    update(e, row)
    if (e === at) at = at.nextSibling
    else parent.insertBefore(e, at)
  }
  for (const e of before.values()) e.remove()
  parent.listed = now
}

/** Replaces the children of parent if the data differs from that of the last call. */
export function redraw(parent, data, draw) {
  const text = JSON.stringify(data)
  if (parent.drawn === text) return
  parent.drawn = text
  parent.replaceChildren(...draw())
}

/** Names the cells of a row, for screens on which each cell has a line of its own. Returns the row. */
export function labelled(row, names) {
  names.forEach((name, i) => row.children[i].setAttribute('data-label', name))
  return row
}

/** A small label with a sign in front: good, warn, bad, info or ''. */
export const pill = (level, text) => el('span', {class: ('pill ' + level).trim()}, text)

/** A button that looks up a request. */
export const requestButton = id => el('button', {type: 'button', class: 'id', 'data-request': id, title: 'Explain request ' + id}, id)
