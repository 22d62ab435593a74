package discovery

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestRefusedRecordsLogLittle: however many records are refused, and however long their keys
// and the reasons are, the log stays small. A key that is refused again later is logged again.
func TestRefusedRecordsLogLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		b := newBook("etcd", slog.New(slog.NewTextHandler(&out, nil)))
		b.read = func(key string, value []byte) (config.Engine, error) {
			return config.Engine{}, errors.New("bad: " + string(value))
		}
		for i := range 100_000 {
			b.note(fmt.Sprint("/engines/", i), []byte("{}"), int64(i))
		}
		b.note(strings.Repeat("k", maxRecord+1), nil, 1)
		if n := out.Len(); n > 30_000 {
			t.Errorf("%d bytes for 100,000 records", n)
		}
		time.Sleep(refusalEvery)
		out.Reset()
		long := strings.Repeat("x", 60_000)
		for i := range 1000 {
			b.note("/engines/flips", fmt.Append(nil, i%2, long), int64(i))
		}
		if n := out.Len(); n == 0 || n > 1000 {
			t.Errorf("%d bytes for a record whose reason alternates", n)
		}
		time.Sleep(refusalEvery)
		out.Reset()
		b.note("/engines/flips", []byte("other"), 5000)
		if n := strings.Count(out.String(), "registration refused"); n != 1 {
			t.Errorf("later: %d lines", n)
		}
	})
}

// TestRecordNamesAreShort: a record with a long name is refused.
func TestRecordNamesAreShort(t *testing.T) {
	for n, ok := range map[int]bool{256: true, 257: false, 60_000: false} {
		_, err := readRecord("", fmt.Appendf(nil, `{"name":%q,"url":"http://10.0.0.1:1","role":"both","connector":"none"}`, strings.Repeat("a", n)))
		if (err == nil) != ok {
			t.Errorf("a name of %d bytes: %v", n, err)
		}
		if err != nil && (len(err.Error()) > 200 || !strings.Contains(err.Error(), "name")) {
			t.Errorf("a name of %d bytes has the error %.300q", n, err.Error())
		}
	}
}
