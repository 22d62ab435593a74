// Package privatedir opens folders that only this process's user can change, and the
// files in them.
//
// Open checks the owner and the mode of the folder and of every folder above it. All
// later operations use the descriptor that Open has checked, and follow no symbolic
// links. Another user of the host can therefore neither exchange the folder nor direct
// an operation to another file.
//
// The decisions behind this package are in docs/design/edge.md.
package privatedir

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Dir is an open private folder. Its methods are safe for concurrent use. Errors of
// operations on files are *os.PathError; errors.Is finds fs.ErrNotExist and so on.
type Dir struct {
	folder *os.File
	path   string
	proc   string // the folder's name below /proc/self/fd; "" where there is none
}

// Open opens a folder that belongs to this process's user and has mode 0700. Open makes the folder,
// and up to two above it, if they are missing. Every folder above must belong to root or to the
// user, and others may write to it only if it has the sticky bit. The last component of the path
// must not be a symbolic link. The other components may be links that belong to root or to the
// user. The error is *UnsafeError if another user could change the folder. The caller closes the
// folder.
func Open(path string) (*Dir, error) { return open(path, 3) }

// OpenExisting is Open, but creates no folder. The error is fs.ErrNotExist if the folder
// is missing.
func OpenExisting(path string) (*Dir, error) { return open(path, 0) }

func open(path string, missing int) (*Dir, error) {
	f, err := openFolder(path, missing, unix.O_RDONLY, checkOwn)
	if err != nil {
		return nil, err
	}
	if path, err = filepath.Abs(path); err != nil {
		f.Close()
		return nil, err
	}
	d := &Dir{folder: f, path: path}
	d.findProc()
	return d, nil
}

// Name returns the absolute path with which the folder was opened, for messages and
// for other processes, which open the folder themselves.
func (d *Dir) Name() string { return d.path }

// Path returns the path of a file of the folder, for messages and for other processes.
func (d *Dir) Path(name string) string { return filepath.Join(d.path, name) }

// Close closes the folder. Files and sockets of the folder stay open. nil is allowed.
func (d *Dir) Close() error {
	if d == nil {
		return nil
	}
	return d.folder.Close()
}

// do calls f with the folder's descriptor. The descriptor stays open until f returns.
func (d *Dir) do(op, name string, f func(fd int) error) error {
	if name != filepath.Base(name) || name == "." || name == ".." || name == "/" {
		return fmt.Errorf("%s %q in %s: not the name of a file", op, name, d.path)
	}
	conn, err := d.folder.SyscallConn()
	if err != nil {
		return err
	}
	again := func(fd uintptr) {
		for err = f(int(fd)); errors.Is(err, unix.EINTR); err = f(int(fd)) {
		}
		if errors.Is(err, unix.ENOENT) && d.reopen(int(fd)) {
			err = f(int(fd))
		}
	}
	if conn.Control(again) != nil {
		err = os.ErrClosed
	}
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ELOOP) {
		err = errLink
	}
	return &os.PathError{Op: op, Path: d.Path(name), Err: err}
}

// reopen opens the folder again, with all checks, if it was removed and another one has
// been made in its place. The descriptor keeps its number.
func (d *Dir) reopen(fd int) bool {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Nlink > 0 {
		return false
	}
	f, err := openFolder(d.path, 0, unix.O_RDONLY, checkOwn)
	if err != nil {
		return false
	}
	defer f.Close()
	return replaceDescriptor(int(f.Fd()), fd) == nil
}

// errLink is the error for a file that is a symbolic link.
var errLink = errors.New("symbolic links are not followed")

// OpenFile opens a regular file of the folder, as os.OpenFile does. A new file has
// mode 0600. The file must belong to this process's user, and others must not be
// allowed to write to it. A file that is opened for writing must have one name only.
func (d *Dir) OpenFile(name string, flag int) (*os.File, error) {
	var fd int
	err := d.do("open", name, func(at int) (err error) {
		// A named pipe would block without O_NONBLOCK. O_TRUNC has to wait for the check.
		fd, err = unix.Openat(at, name, flag&^os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return nil, err
	}
	path := d.Path(name)
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err != nil {
		err = &os.PathError{Op: "stat", Path: path, Err: err}
	} else if err = checkFile(&st, path, flag); err == nil {
		err = unix.SetNonblock(fd, false)
	}
	if err == nil && flag&os.O_TRUNC != 0 {
		err = unix.Ftruncate(fd, 0)
	}
	if err != nil {
		_ = unix.Close(fd) // nothing has been written to it
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// checkFile checks a file that is opened with a flag.
func checkFile(st *unix.Stat_t, path string, flag int) error {
	const remedy = "remove the file"
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return unsafe(path, st, "is not a regular file", remedy)
	case int(st.Uid) != os.Geteuid():
		return unsafe(path, st, fmt.Sprintf("does not belong to user %d", os.Geteuid()), remedy)
	case st.Mode&0o022 != 0:
		return unsafe(path, st, "can be changed by other users", remedy)
	case flag&unix.O_ACCMODE != unix.O_RDONLY && st.Nlink > 1:
		return unsafe(path, st, "has more than one name", remedy)
	}
	return nil
}

// ReadFile reads a file of at most limit bytes. A longer file is an error.
func (d *Dir) ReadFile(name string, limit int64) ([]byte, error) {
	f, err := d.OpenFile(name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("read %s: the file has more than %d bytes", f.Name(), limit)
	}
	return b, err
}

// WriteFile replaces a file, or makes it with mode 0600. Other processes see either the
// old content or the new one. The new content is on the disk when WriteFile returns.
func (d *Dir) WriteFile(name string, data []byte) error {
	if err := d.replace(name, data, (*os.File).Sync); err != nil {
		return err
	}
	return d.folder.Sync()
}

// WriteFileNoSync is WriteFile for content that may be lost when the host crashes.
func (d *Dir) WriteFileNoSync(name string, data []byte) error {
	return d.replace(name, data, func(*os.File) error { return nil })
}

func (d *Dir) replace(name string, data []byte, sync func(*os.File) error) error {
	next, err := d.stage(name, data, sync)
	if err != nil {
		return err
	}
	if err := d.Rename(next, name); err != nil {
		_ = d.Remove(next) // err is the reason why the content was not stored
		return err
	}
	return nil
}

// CreateFile makes a file with mode 0600 and the given content. The error is
// fs.ErrExist if there is a file of that name. Other processes see no file or the
// whole content.
func (d *Dir) CreateFile(name string, data []byte) error {
	next, err := d.stage(name, data, (*os.File).Sync)
	if err != nil {
		return err
	}
	err = d.do("link", name, func(fd int) error { return unix.Linkat(fd, next, fd, name, 0) })
	return errors.Join(err, d.Remove(next))
}

// stage makes a new file with the content, under a name that nothing else has.
func (d *Dir) stage(name string, data []byte, sync func(*os.File) error) (next string, err error) {
	next = "." + name + "." + rand.Text()
	f, err := d.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return "", err
	}
	_, err = f.Write(data)
	if err == nil {
		err = sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		_ = d.Remove(next) // err is the reason why the content was not stored
		return "", err
	}
	return next, nil
}

// Remove removes a file, a socket or a link.
func (d *Dir) Remove(name string) error {
	return d.do("remove", name, func(fd int) error { return unix.Unlinkat(fd, name, 0) })
}

// Rename gives a file another name, and replaces the file that had the name.
func (d *Dir) Rename(name, to string) error {
	return d.do("rename", name, func(fd int) error {
		return d.do("rename", to, func(int) error { return unix.Renameat(fd, name, fd, to) })
	})
}

// Symlink makes a symbolic link to another name of the folder. Of all methods only
// Dial follows links.
func (d *Dir) Symlink(target, name string) error {
	return d.do("symlink", target, func(fd int) error {
		return d.do("symlink", name, func(int) error { return unix.Symlinkat(target, fd, name) })
	})
}

// Readlink returns the target of a symbolic link.
func (d *Dir) Readlink(name string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n := 0
	err := d.do("readlink", name, func(fd int) (err error) {
		n, err = unix.Readlinkat(fd, name, buf)
		return err
	})
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// Names returns the sorted names of all entries that begin with prefix and end with
// suffix.
func (d *Dir) Names(prefix, suffix string) ([]string, error) {
	var list *os.File // a separate descriptor, with a separate position in the list
	err := d.do("list", "folder", func(fd int) (err error) {
		list, err = openAt(fd, ".", d.path, unix.O_RDONLY)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer list.Close()
	names, err := list.Readdirnames(-1)
	names = slices.DeleteFunc(names, func(n string) bool {
		return len(n) < len(prefix)+len(suffix) || !strings.HasPrefix(n, prefix) || !strings.HasSuffix(n, suffix)
	})
	slices.Sort(names)
	return names, err
}

// Refresh sets the times of all entries to the present, so that programs which remove
// old files from temporary folders leave them.
func (d *Dir) Refresh() error {
	names, err := d.Names("", "")
	if err != nil {
		return err
	}
	now := unix.NsecToTimespec(time.Now().UnixNano())
	var errs []error
	for _, name := range names {
		err := d.do("touch", name, func(fd int) error {
			return unix.UtimesNanoAt(fd, name, []unix.Timespec{now, now}, unix.AT_SYMLINK_NOFOLLOW)
		})
		if !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
