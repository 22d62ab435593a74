package privatedir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLinks is how many symbolic links a path may contain, as in the Linux kernel.
const maxLinks = 40

// UnsafeError reports that users other than root and the owner of this process could change the
// content of a folder or a file.
type UnsafeError struct {
	Path   string
	Owner  int    // user id
	Mode   uint32 // permission bits, with the sticky bit
	Reason string // completes a sentence that begins with the path
	Remedy string // an instruction to the operator
}

func (e *UnsafeError) Error() string {
	return fmt.Sprintf("%s %s (owner: user %d, mode %04o): %s", e.Path, e.Reason, e.Owner, e.Mode, e.Remedy)
}

func unsafe(path string, st *unix.Stat_t, reason, remedy string) error {
	mode := uint32(st.Mode) //nolint:unconvert // has 16 bits on darwin
	return &UnsafeError{Path: path, Owner: int(st.Uid), Mode: mode & 0o7777, Reason: reason, Remedy: remedy}
}

// walker opens a path one component at a time. It holds a descriptor of the folder
// that it has reached and has checked, so that no other user can exchange a component
// between its check and its use.
type walker struct {
	at    *os.File // the folder that the walker has reached
	rest  []string // the components that follow
	links int      // the symbolic links that the walker has followed
	make  int      // number of last components that the walker creates if they are missing
}

// openFolder opens a folder after a check of the folder, by check, and of every folder
// above it. It makes up to missing of the last components.
func openFolder(path string, missing, flag int, check func(*os.File) error) (*os.File, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	w := &walker{rest: split(path), make: missing}
	if err := w.restart(); err != nil {
		return nil, err
	}
	defer func() { w.at.Close() }() // the folder above the one that is returned
	for len(w.rest) > 1 {
		if err := w.step(); err != nil {
			return nil, err
		}
	}
	if len(w.rest) == 0 {
		return nil, fmt.Errorf("%s cannot be a private folder", path)
	}
	f, err := w.open(w.rest[0], flag)
	if err != nil {
		return nil, err
	}
	if err := check(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func split(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == filepath.Separator })
}

// restart goes to the root folder.
func (w *walker) restart() error {
	f, err := openAt(unix.AT_FDCWD, "/", "/", openSearch)
	if err != nil {
		return err
	}
	return w.enter(f)
}

// enter makes f the folder that the walker has reached.
func (w *walker) enter(f *os.File) error {
	if err := checkAbove(f); err != nil {
		f.Close()
		return err
	}
	if w.at != nil {
		w.at.Close()
	}
	w.at = f
	return nil
}

// step opens the next component of the path. The component may be a symbolic link that
// belongs to root or to this user: no other user can replace such a link, because its
// folder has been checked.
func (w *walker) step() error {
	name := w.rest[0]
	path := filepath.Join(w.at.Name(), name)
	var st unix.Stat_t
	err := unix.Fstatat(int(w.at.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return w.follow(name, path, &st)
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	f, err := w.open(name, openSearch)
	if err != nil {
		return err
	}
	w.rest = w.rest[1:]
	return w.enter(f)
}

// follow replaces a component that is a symbolic link by the components of its target.
func (w *walker) follow(name, path string, st *unix.Stat_t) error {
	if !trusted(st) {
		return unsafe(path, st, "is a symbolic link of another user", "remove the link, or configure another folder")
	}
	if w.links++; w.links > maxLinks {
		return &os.PathError{Op: "open", Path: path, Err: unix.ELOOP}
	}
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(w.at.Fd()), name, buf)
	if err != nil {
		return &os.PathError{Op: "readlink", Path: path, Err: err}
	}
	target := string(buf[:n])
	w.rest = append(split(target), w.rest[1:]...)
	if filepath.IsAbs(target) {
		return w.restart()
	}
	return nil
}

// open opens a component, which is no link. It makes the component if that is missing
// and near enough to the end of the path.
func (w *walker) open(name string, flag int) (*os.File, error) {
	at, path := int(w.at.Fd()), filepath.Join(w.at.Name(), name)
	f, err := openAt(at, name, path, flag)
	if len(w.rest) > w.make || !errors.Is(err, unix.ENOENT) {
		return f, err
	}
	if err := unix.Mkdirat(at, name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, &os.PathError{Op: "mkdir", Path: path, Err: err}
	}
	return openAt(at, name, path, flag)
}

// openAt opens a folder and follows no link.
func openAt(at int, name, path string, flag int) (*os.File, error) {
	for {
		fd, err := unix.Openat(at, name, flag|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		switch {
		case err == nil:
			return os.NewFile(uintptr(fd), path), nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
			err = errNoFolder
		}
		return nil, &os.PathError{Op: "open folder", Path: path, Err: err}
	}
}

// errNoFolder is the error for a component that is a file or, at the end of a path, a
// link.
var errNoFolder = errors.New("is not a folder; symbolic links to folders are not followed here")

// trusted reports whether root or this process's user owns the file.
func trusted(st *unix.Stat_t) bool { return st.Uid == 0 || int(st.Uid) == os.Geteuid() }

// checkAbove checks a folder on the way: only root and this user can replace entries that
// belong to root or to this user. In a folder with the sticky bit, like /tmp, others can
// add entries, but cannot exchange these.
func checkAbove(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	switch {
	case !trusted(&st):
		return unsafe(f.Name(), &st, fmt.Sprintf("belongs neither to root nor to user %d", os.Geteuid()), "remove the folder, or configure another one")
	case st.Mode&0o022 != 0 && st.Mode&unix.S_ISVTX == 0:
		return unsafe(f.Name(), &st, "can be changed by other users", "run chmod go-w on it, or configure another folder")
	}
	return nil
}

// checkOwn checks the folder at the end of the path.
func checkOwn(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	switch {
	case int(st.Uid) != os.Geteuid():
		return unsafe(f.Name(), &st, fmt.Sprintf("does not belong to user %d", os.Geteuid()), "remove the folder, or configure another one")
	case st.Mode&0o077 != 0:
		return unsafe(f.Name(), &st, "is open to other users", "run chmod 0700 on it, or configure another folder")
	}
	return nil
}
