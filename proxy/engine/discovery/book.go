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
)

// maxRecord bounds one record, and its key, in bytes.
const maxRecord = 64 << 10

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

	records map[string]record // by key
	logged  map[string]string // the logged problems of records, by key
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
		same: func(e config.Engine) string { return e.Name },
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
	if b.logged[key] != err.Error() {
		b.logged[key] = err.Error()
		level := slog.LevelError
		if errors.Is(err, errSkip) {
			level = slog.LevelInfo
		}
		b.log.Log(context.Background(), level, "registration refused", "source", b.name, "key", key, "error", err)
	}
	if r, known := b.records[key]; known { // it is not lost any more
		b.records[key] = record{spec: r.spec, created: created}
	}
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
