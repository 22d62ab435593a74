package discovery

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// fileCase is a watched file. After each write the test waits for the two seconds in
// which the source must notice the change.
type fileCase struct {
	t    *testing.T
	path string
	r    *fakeRegistry
	l    *logs
}

func watchFile(t *testing.T, name, text string) *fileCase {
	t.Helper()
	f := &fileCase{t: t, path: filepath.Join(t.TempDir(), name), r: newFakeRegistry(), l: &logs{}}
	if text != "" {
		f.put(text)
	}
	m, err := New(config.Discovery{File: config.DiscoveryFile{Path: f.path}}, options(f.r, f.l))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { m.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	synctest.Wait()
	return f
}

func (f *fileCase) put(text string) {
	f.t.Helper()
	if err := os.WriteFile(f.path, []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
}

// write replaces the file and waits until the source must have noticed the change.
func (f *fileCase) write(text string) {
	f.t.Helper()
	f.put(text)
	time.Sleep(2 * time.Second)
	synctest.Wait()
}

func (f *fileCase) want(names ...string) {
	f.t.Helper()
	if got := f.r.names("file"); !slices.Equal(got, names) {
		f.t.Errorf("engines are %v, want %v", got, names)
	}
}

const (
	fileA  = "[[engine]]\nname='a'\nurl='http://a:1'\nrole='both'\n"
	fileB  = "[[engine]]\nname='b'\nurl='http://b:1'\nrole='both'\n"
	jsonAB = `[{"name":"a","url":"http://a:1","role":"both"},{"name":"b","url":"http://b:1","role":"both"}]`
)

func TestFileIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := watchFile(t, "engines.toml", fileA)
		f.want("a") // without a wait
		f.write(fileA + fileB)
		f.want("a", "b")
		// The size and the time are the same, but the content differs.
		f.write(fileA + strings.ReplaceAll(fileB, "b", "c"))
		f.write(jsonAB)
		f.want("a", "b")
		f.write("engine = []\n")
		f.want()
		// Orchestrators replace a file by renaming another file.
		next := f.path + ".new"
		if err := os.WriteFile(next, []byte(fileB), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, f.path); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		f.want("b")
		applied := f.r.applied
		time.Sleep(time.Minute)
		if f.r.applied != applied {
			t.Error("an unchanged file was applied again")
		}
	})
}

func TestBadFileChangesNothing(t *testing.T) {
	for name, tt := range map[string]struct{ text, logged string }{
		"unknown key":   {fileA + "colour = 'red'\n", `line=5 key=engine[0].colour problem="unknown key"`},
		"bad value":     {fileA + fileB + "ranks = 0\n", `line=9 key=engine[1].ranks problem="must be at least 1`},
		"half of TOML":  {"[[engine]]\nname = 'a", "line=2 key=engine.name problem=\"invalid TOML"},
		"half of JSON":  {"[\n{\"name\": ", `line=2 key="" problem="invalid JSON`},
		"bad JSON":      {"[{\"name\":\"a\",\n\"url\":\"http://a\",\"role\":\"chef\"}]", `line=2 key=engine[0].role problem="must be one of`},
		"emptied":       {"", `key=engine problem="the file is empty: write engine = []`},
		"two of a name": {fileA + fileA, "already the name of"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := watchFile(t, "engines", fileA+fileB)
				f.l.take()
				f.write(tt.text)
				f.want("a", "b")
				if text := f.l.take(); !strings.Contains(text, tt.logged) || strings.Contains(text, "line=0") {
					t.Errorf("logged: %s", text)
				}
				time.Sleep(time.Minute)
				if text := f.l.take(); text != "" {
					t.Errorf("the problem was logged again: %s", text)
				}
				f.write(fileB)
				f.want("b")
			})
		})
	}
}

func TestMissingFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := watchFile(t, "engines.json", "")
		if text := f.l.take(); !strings.Contains(text, "no such file") {
			t.Errorf("logged: %s", text)
		}
		f.write(jsonAB)
		f.want("a", "b")
		if text := f.l.take(); !strings.Contains(text, "works again") {
			t.Errorf("logged: %s", text)
		}
		if err := os.Remove(f.path); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		f.want("a", "b")
		if text := f.l.take(); strings.Count(text, "no such file") != 1 {
			t.Errorf("logged: %s", text)
		}
		f.write(strings.Repeat("#", maxFile+1))
		f.want("a", "b")
		if text := f.l.take(); !strings.Contains(text, "more than") {
			t.Errorf("logged: %s", text)
		}
	})
}

// TestIrregularFile: a named pipe or a folder in place of the file is an error, and does not stop
// the source.
func TestIrregularFile(t *testing.T) {
	for name, replace := range map[string]func(path string) error{
		"a named pipe": func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"a folder":     func(path string) error { return os.Mkdir(path, 0o700) },
		"a device":     func(path string) error { return os.Symlink(os.DevNull, path) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := watchFile(t, "engines.toml", fileA)
				f.want("a")
				if err := errors.Join(os.Remove(f.path), replace(f.path)); err != nil {
					t.Fatal(err)
				}
				f.l.take()
				time.Sleep(2 * time.Second)
				synctest.Wait()
				f.want("a")
				if text := f.l.take(); !strings.Contains(text, "no regular file") {
					t.Errorf("logged: %s", text)
				}
				if err := os.Remove(f.path); err != nil {
					t.Fatal(err)
				}
				f.write(fileB)
				f.want("b")
			})
		})
	}
}

// The source does not use a partly written file.
func TestFileBeingWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := watchFile(t, "engines.toml", fileA+fileB)
		time.Sleep(readFileEvery - time.Millisecond)
		f.put(fileA) // the source has read the file once
		time.Sleep(readFileEvery / 2)
		f.put(fileA + fileB)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if f.want("a", "b"); f.r.applied != 1 {
			t.Errorf("%d lists were applied", f.r.applied)
		}
	})
}
