package privatedir

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// openDir returns a new private folder, which the end of the test closes.
func openDir(t *testing.T) *Dir {
	t.Helper()
	d, err := Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// stranger is the id of a user who is neither root nor the user of the test.
const stranger = 65534

// TestOpenRefuses: Open refuses every folder that another user could change, and the
// error names its path. Open accepts a folder that no other user can change.
func TestOpenRefuses(t *testing.T) {
	steps := func(steps ...func() error) func() error {
		return func() error {
			for _, step := range steps {
				if err := step(); err != nil {
					return err
				}
			}
			return nil
		}
	}
	base := t.TempDir()
	at := func(name string) string { return filepath.Join(base, name) }
	mkdir := func(name string, mode os.FileMode) func() error {
		return steps(func() error { return os.MkdirAll(at(name), 0o700) }, func() error { return os.Chmod(at(name), mode) })
	}
	chown := func(name string) func() error { return func() error { return os.Lchown(at(name), stranger, stranger) } }
	link := func(target, name string) func() error { return func() error { return os.Symlink(target, at(name)) } }
	for _, c := range []struct {
		name  string
		root  bool // needs root
		setup func() error
		path  string
		want  string // text of the error; "": no error
		owner string // owner of the folder or link that the error names
	}{
		{name: "new", setup: steps(), path: "new"},
		{name: "new, with the one above", setup: steps(), path: "new2/above/run"},
		{name: "three are missing above", setup: steps(), path: "a/b/c/d", want: "no such file"},
		{name: "own", setup: mkdir("own", 0o700), path: "own"},
		{name: "others read", setup: mkdir("read", 0o755), path: "read", want: "read is open to other users"},
		{name: "group reads", setup: mkdir("group", 0o740), path: "group", want: "group is open to other users"},
		{name: "others write", setup: mkdir("write", 0o777), path: "write", want: "mode 0777"},
		{name: "sticky leaf", setup: mkdir("stickyleaf", 0o777|os.ModeSticky), path: "stickyleaf", want: "mode 1777"},
		{name: "others write above", setup: mkdir("wide", 0o777), path: "wide/run", want: "wide can be changed by other users"},
		{name: "group writes above", setup: mkdir("wideg", 0o770), path: "wideg/run", want: "wideg can be changed by other users"},
		{name: "others write far above", setup: steps(mkdir("far/a/b", 0o700), mkdir("far", 0o777)), path: "far/a/b/run", want: "far can be changed by other users"},
		{name: "sticky above", setup: mkdir("sticky", 0o777|os.ModeSticky), path: "sticky/run"},
		{name: "others read above", setup: mkdir("readable", 0o755), path: "readable/run"},
		{name: "a file", setup: func() error { return os.WriteFile(at("file"), nil, 0o600) }, path: "file", want: "is not a folder"},
		{name: "a file above", setup: func() error { return os.WriteFile(at("file2"), nil, 0o600) }, path: "file2/run", want: "is not a folder"},
		{name: "a link", setup: steps(mkdir("real", 0o700), link("real", "link")), path: "link", want: "symbolic links to folders are not followed"},
		{name: "a link to nothing", setup: link("nothing", "dangling"), path: "dangling", want: "symbolic links to folders are not followed"},
		{name: "own link above", setup: steps(mkdir("real2", 0o700), link("real2", "link2")), path: "link2/run"},
		{name: "own link up and down again", setup: steps(mkdir("real3/x", 0o700), link("../real3/./x", "real3/link")), path: "real3/link/run"},
		{name: "own absolute link above", setup: steps(mkdir("real4", 0o700), link(at("real4"), "link4")), path: "link4/run"},
		{name: "own link to an unsafe folder", setup: steps(mkdir("wide2", 0o777), link("wide2", "link5")), path: "link5/run", want: "wide2 can be changed by other users"},
		{name: "links in a circle", setup: link("circle", "circle"), path: "circle/run", want: "too many levels"},
		{name: "a stranger's leaf", root: true, setup: steps(mkdir("st/leaf", 0o700), chown("st/leaf")), path: "st/leaf", want: "leaf does not belong to user 0", owner: "user 65534"},
		{name: "a stranger's leaf in a sticky folder", root: true, setup: steps(mkdir("tmp/leaf", 0o700), chown("tmp/leaf"), mkdir("tmp", 0o777|os.ModeSticky)), path: "tmp/leaf", want: "leaf does not belong to user 0", owner: "user 65534"},
		{name: "a stranger's folder above", root: true, setup: steps(mkdir("st2/run", 0o700), chown("st2")), path: "st2/run", want: "st2 belongs neither to root nor to user 0", owner: "user 65534"},
		{name: "a stranger's folder far above", root: true, setup: steps(mkdir("st3/a/b", 0o700), chown("st3")), path: "st3/a/b/run", want: "st3 belongs neither to root nor to user 0", owner: "user 65534"},
		{name: "a stranger's sticky folder above", root: true, setup: steps(mkdir("st4", 0o777|os.ModeSticky), chown("st4")), path: "st4/run", want: "st4 belongs neither to root nor to user 0", owner: "user 65534"},
		{name: "a stranger's link above", root: true, setup: steps(mkdir("real5", 0o700), link("real5", "link6"), chown("link6")), path: "link6/run", want: "link6 is a symbolic link of another user", owner: "user 65534"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.root && os.Geteuid() != 0 {
				t.Skip("this case needs root; make test-all runs it as root")
			}
			if err := c.setup(); err != nil {
				t.Fatal(err)
			}
			for range 2 { // in the second round the folder exists
				d, err := Open(at(c.path))
				if err == nil {
					d.Close()
				}
				switch {
				case c.want == "" && err != nil:
					t.Error(err)
				case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), c.owner)):
					t.Errorf("got %v, want %q", err, c.want)
				}
			}
		})
	}
}

func TestOpenExisting(t *testing.T) {
	base := t.TempDir()
	if _, err := OpenExisting(filepath.Join(base, "run")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if entries, err := os.ReadDir(base); len(entries) != 0 || err != nil {
		t.Error(entries, err)
	}
	if _, err := Open("/"); err == nil {
		t.Error("the root folder is private")
	}
}

func TestFiles(t *testing.T) {
	d := openDir(t)
	if _, err := d.ReadFile("a", 10); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	for _, write := range []func(string, []byte) error{d.WriteFile, d.WriteFileNoSync} {
		for _, text := range []string{"one", "three"} {
			if err := write("a", []byte(text)); err != nil {
				t.Fatal(err)
			}
			if b, err := d.ReadFile("a", 5); string(b) != text || err != nil {
				t.Errorf(`d.ReadFile("a", 5) = %q, %v, want %q, nil`, b, err, text)
			}
		}
	}
	if _, err := d.ReadFile("a", 4); err == nil {
		t.Error("ReadFile returns a file above the limit")
	}
	if err := d.CreateFile("a", nil); !errors.Is(err, fs.ErrExist) {
		t.Error(err)
	}
	if err := errors.Join(d.CreateFile("b", []byte("new")), d.Rename("b", "c"), d.Symlink("c", "link")); err != nil {
		t.Fatal(err)
	}
	if to, err := d.Readlink("link"); to != "c" || err != nil {
		t.Error(to, err)
	}
	if to, err := d.Readlink("missing"); to != "" || !errors.Is(err, fs.ErrNotExist) {
		t.Error(to, err)
	}
	if names, err := d.Names("", ""); !slices.Equal(names, []string{"a", "c", "link"}) || err != nil {
		t.Error(names, err)
	}
	if names, err := d.Names("li", "nk"); !slices.Equal(names, []string{"link"}) || err != nil {
		t.Error(names, err)
	}
	for _, name := range []string{"a", "c"} {
		if info, err := os.Lstat(filepath.Join(d.Name(), name)); err != nil || info.Mode() != 0o600 {
			t.Error(info.Mode(), err)
		}
		if err := d.Remove(name); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{"", ".", "..", "/", "a/b", "../a", "/etc/passwd"} {
		if _, err := d.OpenFile(name, os.O_RDWR|os.O_CREATE); err == nil {
			t.Errorf("%q is opened", name)
		}
		if err := errors.Join(d.WriteFile("x", nil), d.Rename("x", name)); err == nil {
			t.Errorf("%q is a new name", name)
		}
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := d.WriteFile("a", nil); !errors.Is(err, fs.ErrClosed) {
		t.Error(err)
	}
}

// TestFilesRefused: Dir neither reads, writes nor waits for a file that is not a regular
// file of this user.
func TestFilesRefused(t *testing.T) {
	victim := filepath.Join(t.TempDir(), "victim")
	for name, c := range map[string]struct {
		root  bool
		make  func(path string) error
		write bool // only writing is refused
	}{
		"link":      {make: func(path string) error { return os.Symlink(victim, path) }},
		"dangling":  {make: func(path string) error { return os.Symlink(victim+"-new", path) }},
		"hard link": {make: func(path string) error { return os.Link(victim, path) }, write: true},
		"pipe":      {make: func(path string) error { return unix.Mkfifo(path, 0o600) }},
		"folder":    {make: func(path string) error { return os.Mkdir(path, 0o700) }},
		"open to others": {make: func(path string) error {
			return errors.Join(os.WriteFile(path, []byte("x"), 0o600), os.Chmod(path, 0o622))
		}},
		"of a stranger": {root: true, make: func(path string) error {
			return errors.Join(os.WriteFile(path, []byte("x"), 0o600), os.Chown(path, stranger, stranger))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.root && os.Geteuid() != 0 {
				t.Skip("this case needs root; make test-all runs it as root")
			}
			d := openDir(t)
			if err := errors.Join(os.WriteFile(victim, []byte("precious"), 0o600), c.make(filepath.Join(d.Name(), "f"))); err != nil {
				t.Fatal(err)
			}
			if _, err := d.ReadFile("f", 100); err == nil && !c.write {
				t.Error("read")
			}
			for _, flag := range []int{os.O_WRONLY | os.O_CREATE | os.O_TRUNC, os.O_RDWR | os.O_CREATE, os.O_RDWR | os.O_TRUNC} {
				if f, err := d.OpenFile("f", flag); err == nil {
					f.Close()
					t.Error("opened for writing")
				}
			}
			if _, err := d.TryLock("f"); err == nil {
				t.Error("locked")
			}
			if b, err := os.ReadFile(victim); string(b) != "precious" || err != nil {
				t.Errorf("victim: %q, %v", b, err)
			}
			if _, err := os.Lstat(victim + "-new"); err == nil {
				t.Error("a file has been made through a link")
			}
			if name == "folder" { // a folder is not replaced
				return
			}
			if err := d.WriteFile("f", []byte("own")); err != nil { // replaces only the name
				t.Error(err)
			}
			if b, err := d.ReadFile("f", 100); string(b) != "own" || err != nil {
				t.Errorf(`d.ReadFile("f", 100) = %q, %v, want "own", nil`, b, err)
			}
			if b, err := os.ReadFile(victim); string(b) != "precious" || err != nil {
				t.Errorf("victim: %q, %v", b, err)
			}
		})
	}
}

// TestDescriptor: after the folder was exchanged, operations use the opened folder.
func TestDescriptor(t *testing.T) {
	d := openDir(t)
	moved := d.Name() + "-moved"
	if err := errors.Join(d.WriteFile("f", []byte("own")), os.Rename(d.Name(), moved), os.Mkdir(d.Name(), 0o700), os.WriteFile(filepath.Join(d.Name(), "f"), []byte("other"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if b, err := d.ReadFile("f", 100); string(b) != "own" || err != nil {
		t.Errorf(`d.ReadFile("f", 100) = %q, %v, want "own", nil`, b, err)
	}
	lock, err := d.TryLock("l")
	if err != nil {
		t.Fatal(err)
	}
	lock.Close()
	if _, err := os.Stat(filepath.Join(moved, "l")); err != nil {
		t.Error(err)
	}
	if d.proc == "" {
		return // without /proc, sockets use the path
	}
	l, err := d.ListenUnix("s")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := os.Stat(filepath.Join(moved, "s")); err != nil {
		t.Error(err)
	}
}

// TestReopen: a folder that was removed and created again is used again, if it is safe.
func TestReopen(t *testing.T) {
	d := openDir(t)
	path := d.SocketPath("f")
	if err := os.RemoveAll(d.Name()); err != nil {
		t.Fatal(err)
	}
	if err := d.WriteFile("f", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := errors.Join(os.Mkdir(d.Name(), 0o700), os.Chmod(d.Name(), 0o777)); err != nil {
		t.Fatal(err)
	}
	if err := d.WriteFile("f", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := errors.Join(os.Chmod(d.Name(), 0o700), d.WriteFile("f", nil)); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(d.Path("f")); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Error(err)
	}
}

func TestSockets(t *testing.T) {
	d, err := Open(filepath.Join(t.TempDir(), strings.Repeat("long", 30), "run"))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if d.proc == "" {
		t.Skip("socket paths are limited where there is no /proc")
	}
	l, err := d.ListenUnix("s")
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(filepath.Join(d.Name(), "s")); err != nil || info.Mode().Perm() != 0o600 {
		t.Error(info.Mode(), err)
	}
	if err := d.Symlink("s", "link"); err != nil {
		t.Fatal(err)
	}
	c, err := d.Dial(context.Background(), "unix", "link")
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	l.Close()
	if _, err := d.Dial(context.Background(), "unix", "s"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Error("closing the listener removes the name:", err)
	}
	g, err := d.ListenUnixgram("g")
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	to, err := d.Dial(context.Background(), "unixgram", "g")
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if _, err := io.WriteString(to, "hello"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 10)
	if n, err := g.Read(b); string(b[:n]) != "hello" || err != nil {
		t.Errorf("%q: g.Read(b) = %v, want nil", b[:n], err)
	}
}

// TestRefresh: all files in the folder get a new time, and no file outside is changed.
func TestRefresh(t *testing.T) {
	d := openDir(t)
	outside := filepath.Join(t.TempDir(), "outside")
	if err := errors.Join(os.WriteFile(outside, nil, 0o600), d.WriteFile("epoch", nil), d.Symlink("epoch", "in"), os.Symlink(outside, filepath.Join(d.Name(), "out"))); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-30 * 24 * time.Hour)
	epoch := filepath.Join(d.Name(), "epoch")
	if err := errors.Join(os.Chtimes(epoch, old, old), os.Chtimes(outside, old, old)); err != nil {
		t.Fatal(err)
	}
	if err := d.Refresh(); err != nil {
		t.Fatal(err)
	}
	for path, renewed := range map[string]bool{epoch: true, outside: false} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if age := time.Since(info.ModTime()); renewed != (age < time.Hour) {
			t.Errorf("%s is %v old", path, age)
		}
	}
}

func TestRuntime(t *testing.T) {
	base := t.TempDir()
	xdg, wide, system := filepath.Join(base, "xdg"), filepath.Join(base, "wide"), filepath.Join(base, "run")
	if err := errors.Join(os.Mkdir(xdg, 0o700), os.Mkdir(wide, 0o700), os.Chmod(wide, 0o777), os.MkdirAll(filepath.Join(system, "pdproxy"), 0o755)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", base)
	for _, c := range []struct{ xdg, system, want string }{
		{xdg, system, filepath.Join(xdg, "pdproxy")},
		{wide, system, filepath.Join(system, "pdproxy")},
		{"relative", system, filepath.Join(system, "pdproxy")},
		{filepath.Join(base, "missing"), system, filepath.Join(system, "pdproxy")},
		{"", system, filepath.Join(system, "pdproxy")},
		{"", filepath.Join(base, "missing"), filepath.Join(base, "pdproxy-"+strconv.Itoa(os.Geteuid()))},
	} {
		t.Setenv("XDG_RUNTIME_DIR", c.xdg)
		if got := runtimesBelow(c.system)[0]; got != c.want {
			t.Errorf("XDG_RUNTIME_DIR %q, system %s: %s, want %s", c.xdg, c.system, got, c.want)
		}
	}
	if ownFolder(wide) || !ownFolder(filepath.Join(system, "pdproxy")) || ownFolder(filepath.Join(base, "missing")) {
		t.Error("ownFolder")
	}
}
