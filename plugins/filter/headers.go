package filter

import (
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
)

// headerMap is a header or a trailer in the chain. The filter that holds it
// changes it while others may read it for a property, so it is safe for
// concurrent use. net/http keeps no order among names, so guests see them
// sorted.
type headerMap struct {
	mu     sync.Mutex
	pseudo host.Pairs   // :method, :path, :authority, :scheme or :status; guarded by mu
	room   [4]host.Pair // storage for pseudo; guarded by mu
	lines  http.Header  // canonical names; guarded by mu
	shared bool         // lines belong to another owner: copied before a change; guarded by mu
	plain  bool         // a trailer, which has no pseudo-headers

	// The size of the map, known after the guest's first change; guarded by mu.
	known bool
	size  mapSize
}

// mapSize is the number of header lines and of their bytes.
type mapSize struct{ lines, bytes int }

// lineCost is the cost of a header line in bytes, in addition to its text:
// about the memory of a line in the maps of net/http.
const lineCost = 128

func (s mapSize) cost() int64 { return int64(s.lines)*lineCost + int64(s.bytes) }

func (s mapSize) plus(t mapSize) mapSize { return mapSize{s.lines + t.lines, s.bytes + t.bytes} }

func (s mapSize) minus(t mapSize) mapSize { return mapSize{s.lines - t.lines, s.bytes - t.bytes} }

// sizeOfLines returns the size of all lines of a name.
func sizeOfLines(name string, values []string) mapSize {
	s := mapSize{len(values), len(values) * len(name)}
	for _, value := range values {
		s.bytes += len(value)
	}
	return s
}

// sizeOf returns the size of pairs.
func sizeOf(pairs host.Pairs) mapSize {
	s := mapSize{lines: len(pairs)}
	for i := range pairs {
		s.bytes += len(pairs[i].Key) + len(pairs[i].Value)
	}
	return s
}

// sizeNow returns the size of the map. The caller holds m.mu.
func (m *headerMap) sizeNow() mapSize {
	if !m.known {
		m.known, m.size = true, sizeOf(m.pseudo)
		for name, values := range m.lines {
			m.size = m.size.plus(sizeOfLines(name, values))
		}
	}
	return m.size
}

// resize counts a change by f's guest from size old to size fresh; f is nil for
// the host's own changes. InternalFailure: the map exceeds the limit of a map,
// or the plugin's budget is too small. The caller holds m.mu.
func (m *headerMap) resize(f *filter, old, fresh mapSize) host.Status {
	if f == nil {
		m.known = false
		return host.OK
	}
	before := m.sizeNow()
	after := before.minus(old).plus(fresh)
	grows := after.lines > before.lines || after.bytes > before.bytes
	if grows && (after.lines > host.MaxPairs || after.bytes > host.MaxPairsBytes) {
		f.p.deps.Host.Refuse(budget.RefusedMemory)
		return host.InternalFailure
	}
	if !f.hold(ofStream, after.cost()-before.cost()) {
		return host.InternalFailure
	}
	m.size = after
	return host.OK
}

// lowerNames avoids an allocation for the usual names.
var lowerNames = func() map[string]string {
	m := make(map[string]string)
	for _, name := range []string{
		"Accept", "Accept-Encoding", "Authorization", "Cache-Control", "Connection", "Content-Encoding",
		"Content-Length", "Content-Type", "Cookie", "Date", "Origin", "Referer", "Server", "Trailer",
		"Traceparent", "Transfer-Encoding", "User-Agent", "Via", "X-Api-Key", "X-Forwarded-For",
		"X-Forwarded-Proto", "X-Real-Ip", "X-Request-Id",
	} {
		m[name] = strings.ToLower(name)
	}
	return m
}()

func lowerName(name string) string {
	if lower, ok := lowerNames[name]; ok {
		return lower
	}
	return strings.ToLower(name)
}

// Pairs implements host.HeaderMap.
func (m *headerMap) Pairs() host.Pairs {
	m.mu.Lock()
	defer m.mu.Unlock()
	var room [32]string
	names := room[:0]
	n := len(m.pseudo)
	for name, values := range m.lines {
		names = append(names, name)
		n += len(values)
	}
	slices.Sort(names)
	pairs := append(make(host.Pairs, 0, n), m.pseudo...)
	for _, name := range names {
		lower := lowerName(name)
		for _, value := range m.lines[name] {
			pairs = append(pairs, host.Pair{Key: lower, Value: value})
		}
	}
	return pairs
}

// len returns the number of header lines, including pseudo-headers.
func (m *headerMap) len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := len(m.pseudo)
	for _, values := range m.lines {
		n += len(values)
	}
	return n
}

// Value implements host.HeaderMap. Of several lines of one name it returns the
// first, as Envoy does.
func (m *headerMap) Value(key string) (string, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i := m.pseudoAt(key); i >= 0 {
		return m.pseudo[i].Value, true
	}
	if values := m.lines[http.CanonicalHeaderKey(key)]; len(values) > 0 {
		return values[0], true
	}
	return "", false
}

// get is Value for a name in canonical form; "" when there is none.
func (m *headerMap) get(name string) string {
	value, _ := m.Value(name)
	return value
}

// pseudoAt finds a pseudo-header by its own name or as "host"; -1: not found.
// The caller holds m.mu.
func (m *headerMap) pseudoAt(key string) int {
	key = pseudoName(key)
	if key == "" {
		return -1
	}
	return slices.IndexFunc(m.pseudo, func(p host.Pair) bool { return p.Key == key })
}

// pseudoName returns the pseudo-header that a key means; "" for the key of a
// normal line.
func pseudoName(key string) string {
	switch {
	case len(key) > 0 && key[0] == ':':
		return strings.ToLower(key)
	case strings.EqualFold(key, "host"):
		return ":authority"
	}
	return ""
}

// setPairs replaces all lines on behalf of f's guest. BadArgument: one of the
// lines is invalid in a header. InternalFailure: see resize. On an error the
// map does not change.
func (m *headerMap) setPairs(f *filter, pairs host.Pairs) host.Status {
	var pseudo host.Pairs
	lines := make(http.Header, len(pairs))
	for _, p := range pairs {
		name := pseudoName(p.Key)
		switch {
		case !validValue(p.Value) || name == "" && !validName(p.Key):
			return host.BadArgument
		case name == "" || m.plain:
			key := http.CanonicalHeaderKey(p.Key)
			lines[key] = append(lines[key], p.Value)
		default:
			pseudo = append(pseudo, host.Pair{Key: name, Value: p.Value})
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if status := m.resize(f, m.sizeNow(), sizeOf(pairs)); status != host.OK {
		return status
	}
	m.pseudo, m.lines, m.shared = pseudo, lines, false
	return host.OK
}

// Add adds a line for the host. BadArgument: the line is invalid in a header.
func (m *headerMap) Add(key, value string) host.Status { return m.put(nil, key, value, false) }

// Replace is Add, but replaces all lines of that name by this one.
func (m *headerMap) Replace(key, value string) host.Status { return m.put(nil, key, value, true) }

// put adds a line, on behalf of f's guest if f is not nil.
func (m *headerMap) put(f *filter, key, value string, replace bool) host.Status {
	name := pseudoName(key)
	if m.plain {
		name = ""
	}
	if !validValue(value) || name == "" && !validName(key) {
		return host.BadArgument
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if name != "" { // each pseudo-header exists once
		i := m.pseudoAt(name)
		fresh, old := mapSize{1, len(name) + len(value)}, mapSize{}
		if i >= 0 {
			old = sizeOf(m.pseudo[i : i+1])
		}
		if status := m.resize(f, old, fresh); status != host.OK {
			return status
		}
		if i >= 0 {
			m.pseudo[i].Value = value
		} else {
			m.pseudo = append(m.pseudo, host.Pair{Key: name, Value: value})
		}
		return host.OK
	}
	key = http.CanonicalHeaderKey(key)
	var old mapSize
	if replace {
		old = sizeOfLines(key, m.lines[key])
	}
	if status := m.resize(f, old, mapSize{1, len(key) + len(value)}); status != host.OK {
		return status
	}
	m.own()
	if replace {
		m.lines[key] = []string{value}
	} else {
		m.lines[key] = append(slices.Clip(m.lines[key]), value)
	}
	return host.OK
}

// Remove removes lines for the host. An absent key is OK.
func (m *headerMap) Remove(key string) host.Status { return m.remove(nil, key) }

// remove removes lines, on behalf of f's guest if f is not nil.
func (m *headerMap) remove(f *filter, key string) host.Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i := m.pseudoAt(key); i >= 0 {
		m.resize(f, sizeOf(m.pseudo[i:i+1]), mapSize{})
		m.pseudo = slices.Delete(m.pseudo, i, i+1)
		return host.OK
	}
	key = http.CanonicalHeaderKey(key)
	if values, ok := m.lines[key]; ok {
		m.resize(f, sizeOfLines(key, values), mapSize{})
		m.own()
		delete(m.lines, key)
	}
	return host.OK
}

// own copies the lines, unless the map already owns them. The caller holds m.mu.
func (m *headerMap) own() {
	if m.shared || m.lines == nil {
		m.lines = maps.Clone(m.lines)
		if m.lines == nil {
			m.lines = make(http.Header)
		}
		m.shared = false
	}
}

// take returns the lines and gives up their ownership. The map may still be
// read but must not be changed.
func (m *headerMap) take() http.Header {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.shared = true
	if m.lines == nil {
		m.lines = make(http.Header)
	}
	return m.lines
}

// guestMap is a map that the guest of one filter reads and edits: data that the guest adds counts
// in its plugin's budget.
type guestMap struct {
	*headerMap
	f *filter
}

// SetPairs implements host.HeaderMap.
func (g *guestMap) SetPairs(p host.Pairs) host.Status { return g.setPairs(g.f, p) }

// Add implements host.HeaderMap.
func (g *guestMap) Add(key, value string) host.Status { return g.put(g.f, key, value, false) }

// Replace implements host.HeaderMap: it replaces all lines of that name by one.
func (g *guestMap) Replace(key, value string) host.Status { return g.put(g.f, key, value, true) }

// Remove implements host.HeaderMap. An absent key is OK.
func (g *guestMap) Remove(key string) host.Status { return g.remove(g.f, key) }

// readOnly is a map after its stream has ended.
type readOnly struct{ *headerMap }

// SetPairs implements host.HeaderMap. The map is read-only.
func (readOnly) SetPairs(host.Pairs) host.Status { return host.BadArgument }

// Add implements host.HeaderMap. The map is read-only.
func (readOnly) Add(string, string) host.Status { return host.BadArgument }

// Replace implements host.HeaderMap. The map is read-only.
func (readOnly) Replace(string, string) host.Status { return host.BadArgument }

// Remove implements host.HeaderMap. The map is read-only.
func (readOnly) Remove(string) host.Status { return host.BadArgument }

// validName reports whether name is a token (RFC 9110 5.6.2).
func validName(name string) bool {
	for i := range len(name) {
		c := name[i]
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return name != ""
}

// validValue reports whether value is valid in a header line: it has no line
// end and no NUL (RFC 9110 5.5).
func validValue(value string) bool { return !strings.ContainsAny(value, "\r\n\x00") }
