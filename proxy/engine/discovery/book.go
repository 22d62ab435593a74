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

// errSkip says that a record is not of an engine that can be served.
var errSkip = errors.New("not an engine that is served here")

// book is the records of engines that register by key in a store, and what they
// say. One goroutine owns it.
type book struct {
	name string
	// read makes an engine of a record, or errSkip.
	read func(key string, value []byte) (config.Engine, error)
	// same names what an engine is: of several records with one answer, the
	// youngest counts.
	same func(config.Engine) string
	log  *slog.Logger

	records map[string]record // by key
	said    map[string]string // what is wrong with records, as logged, by key
}

// record is one key that was read.
type record struct {
	spec    config.Engine
	created int64     // grows from one key to the next; 0 for a lost one
	until   time.Time // when a lost one is given up; zero for others
}

// newBook returns a book of engines that are told apart by their names.
func newBook(name string, log *slog.Logger) book {
	return book{
		name: name, log: log, records: map[string]record{}, said: map[string]string{},
		same: func(e config.Engine) string { return e.Name },
	}
}

// Name is the source of these engines in the registry.
func (b *book) Name() string { return b.name }

// note takes a record in. Of one that cannot be read, the last good version
// stays.
func (b *book) note(key string, value []byte, created int64) {
	var spec config.Engine
	err := errors.New("the record is too long")
	if len(key)+len(value) <= maxRecord {
		spec, err = b.read(key, value)
	}
	if err == nil {
		b.records[key] = record{spec: spec, created: created}
		delete(b.said, key)
		return
	}
	if b.said[key] != err.Error() {
		b.said[key] = err.Error()
		level := slog.LevelError
		if errors.Is(err, errSkip) {
			level = slog.LevelInfo
		}
		b.log.Log(context.Background(), level, "registration refused", "source", b.name, "key", key, "error", err)
	}
	if r, known := b.records[key]; known { // it is no lost one any more
		b.records[key] = record{spec: r.spec, created: created}
	}
}

// drop forgets a key.
func (b *book) drop(key string) {
	delete(b.records, key)
	delete(b.said, key)
}

// engines lists what the records say, by key, each engine once.
func (b *book) engines() []config.Engine {
	best := map[string]string{} // the key that counts of each engine
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
