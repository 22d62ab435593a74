package discovery

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/lograte"
)

// maxRecord bounds one record, and its key, in bytes.
const maxRecord = 64 << 10

// Limits of the log of refused records. refusalEvery is the time in which one key causes one
// line; in this time at most refusedKeys keys do. maxLogged bounds a text from a record, in
// bytes.
const (
	refusalEvery = time.Minute
	refusedKeys  = 100
	maxLogged    = 300
)

// newRefusals returns the limits of the log of refused engines and records, by name or key.
func newRefusals() *lograte.Limiter[string] {
	return &lograte.Limiter[string]{Every: refusalEvery, Most: refusedKeys}
}

// errSkip reports that a record does not describe an engine that the proxy can use.
var errSkip = errors.New("not an engine that is served here")

// book holds the records of engines that register by key in a store. One goroutine owns
// it.
type book struct {
	name string
	// read converts a record to an engine. It returns errSkip for other records.
	read func(key string, value []byte) (config.Engine, error)
	// same returns the identity of an engine: of several records with the same
	// identity, the youngest counts.
	same func(config.Engine) string
	log  *slog.Logger

	records  map[string]record        // by key
	logged   map[string]string        // the present problems of records, by key
	refusals *lograte.Limiter[string] // decides which of them are logged, by key
}

// record is one key that was read.
type record struct {
	spec    config.Engine
	created int64     // increases from key to key; 0 for a lost one
	until   time.Time // when a lost record is removed; zero for others
}

// newBook returns a book in which engines are identified by their names.
func newBook(name string, log *slog.Logger) book {
	return book{
		name: name, log: log, records: map[string]record{}, logged: map[string]string{},
		refusals: newRefusals(),
		same:     func(e config.Engine) string { return e.Name },
	}
}

// Name is the source of these engines in the registry.
func (b *book) Name() string { return b.name }

// note stores a record. If it cannot be read, the last valid version stays.
func (b *book) note(key string, value []byte, created int64) {
	var spec config.Engine
	err := errors.New("the record is too long")
	if len(key)+len(value) <= maxRecord {
		spec, err = b.read(key, value)
	}
	if err == nil {
		b.records[key] = record{spec: spec, created: created}
		delete(b.logged, key)
		return
	}
	b.refuse(key, err)
	if r, known := b.records[key]; known { // it is not lost any more
		b.records[key] = record{spec: r.spec, created: created}
	}
}

// refuse logs why a record is refused: once until the reason changes, and within the limits of
// b.refusals.
func (b *book) refuse(key string, err error) {
	text := excerpt(err.Error())
	if b.logged[key] == text {
		return
	}
	b.logged[key] = text
	if !b.refusals.Allow(key) {
		return
	}
	level := slog.LevelError
	if errors.Is(err, errSkip) {
		level = slog.LevelInfo
	}
	b.log.Log(context.Background(), level, "registration refused", "source", b.name, "key", excerpt(key), "error", text)
}

// excerpt shortens a text that the writer of a record chooses, for the log.
func excerpt(text string) string {
	if len(text) > maxLogged {
		return text[:maxLogged] + "..."
	}
	return text
}

// drop removes a key.
func (b *book) drop(key string) {
	delete(b.records, key)
	delete(b.logged, key)
}

// engines lists the engines in the records, sorted by key, each engine once.
func (b *book) engines() []config.Engine {
	best := map[string]string{} // the key that counts for each engine
	keys := slices.Sorted(maps.Keys(b.records))
	for _, key := range keys {
		is := b.same(b.records[key].spec)
		if other, again := best[is]; !again || b.records[key].created > b.records[other].created {
			best[is] = key
		}
	}
	var list []config.Engine
	for _, key := range keys {
		if best[b.same(b.records[key].spec)] == key {
			list = append(list, b.records[key].spec)
		}
	}
	slices.SortStableFunc(list, func(a, b config.Engine) int { return cmp.Compare(a.Name, b.Name) })
	return list
}
